# `make book` makes every table from the embedded data; `make test` runs all tests. Both create the environment first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TMP    := $(abspath $(VENV))/tmp

# `make bench` times everything and writes figures/scale/speed; other frameworks join in with e.g. PEERS='{pfl: /path/to/its/python}'.
PEERS  ?= {}

.PHONY: book test env readme bench device

book: env
	$(BIN)/fedbook reproduce --profile smoke

test: export PATH := $(abspath $(BIN)):$(PATH)
test: export FEDBOOK_FIGURES = $(TMP)/figures
test: export FEDBOOK_DATA = $(TMP)/data
test: export TQDM_DISABLE = 1
test: export OMP_NUM_THREADS = 1
test: env
	nbdev_test --n_workers 2 --skip_folder_re '^([_.]|00_tutorials)' # the tutorials are run by tests/test_tutorials.py
	env -u FEDBOOK_FIGURES python -m pytest -n 2 --dist worksteal

BENCH = workloads: [softmax, mlp, cnn64, cnn512, resnet18, frozen], repeats: 5, seconds: .3, half: true, \
	per_round: [5, 10, 20, 50, 100], clients: [100, 1000, 10000, 100000], folder: ../../figures/scale/speed, peers: $(PEERS)
POSTHOC = clients: 50, epochs: 15, samples: 128, repeats: 3, folder: ../../figures/scale/speed

bench: env
	$(BIN)/fedbook queue pause
	mkdir -p $(TMP) figures/scale/speed
	trap '$(BIN)/fedbook queue continue' EXIT; export PATH="$(abspath $(BIN)):$$PATH"; papermill nbs/05_scale/speed.ipynb $(TMP)/speed.ipynb --cwd nbs/05_scale --no-progress-bar -y "{$(BENCH)}" && \
	papermill nbs/05_scale/posthoc.ipynb $(TMP)/posthoc.ipynb --cwd nbs/05_scale --no-progress-bar -y "{$(POSTHOC)}"

# `make device` measures the accelerator, or the processor where there is none, and writes figures/scale/device/cpu or cuda.
DEVICE = clients: [10, 100], precisions: [float32, bf16], networks: {resnet18: {image_size: 32, batch: 128, images: 1024, stem: cifar}, \
	vit_small_patch16_224: {image_size: 224, batch: 128, images: 512}}, sizes: [2048, 8192], repeats: 5, folder: ../../figures/scale/device

device: env
	mkdir -p $(TMP) figures/scale/device
	PATH="$(abspath $(BIN)):$$PATH" papermill nbs/05_scale/device.ipynb $(TMP)/device.ipynb --cwd nbs/05_scale --no-progress-bar -y "{$(DEVICE)}"

readme: env
	$(BIN)/python tests/readme.py

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3,11,4))' || { echo "fedbook needs Python 3.11.4 or newer; set PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	-$(BIN)/python -m compileall -qq -j 0 -x 'site-packages/(.*/tests|pip|transformers/models)/' $(VENV)/lib fedbook # by all processors; pip takes one
	@touch $@
