# `make book` makes every table from the embedded data; `make test` runs all tests. Both create the environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: book test env readme

book: env
	$(BIN)/fedbook reproduce --profile smoke

test: env
	cd nbs && PATH="$(abspath $(BIN)):$$PATH" TQDM_DISABLE=1 OMP_NUM_THREADS=1 nbdev_test --n_workers 2
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest

readme: env
	$(BIN)/python tests/readme.py

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3,11))' || { echo "fedbook needs Python 3.11 or newer; set PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
