# `make book` makes every table from the embedded data; `make test` runs all tests. Both create the environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TMP    := $(abspath $(VENV))/tmp

.PHONY: book test env readme

book: env
	$(BIN)/fedbook reproduce --profile smoke

test: export PATH := $(abspath $(BIN)):$(PATH)
test: export FEDBOOK_FIGURES = $(TMP)/figures
test: export FEDBOOK_DATA = $(TMP)/data
test: export TQDM_DISABLE = 1
test: export OMP_NUM_THREADS = 1
test: env
	nbdev_test --n_workers 2
	env -u FEDBOOK_FIGURES python -m pytest

readme: env
	$(BIN)/python tests/readme.py

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3,11))' || { echo "fedbook needs Python 3.11 or newer; set PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
