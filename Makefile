# Two commands do everything: `make demo` and `make test`. Both make .venv themselves.
# `make test` skips what needs PyTorch, cuDNN, dask or MPI; `make test-torch`,
# `make test-cudnn` and `make test-many` install them first. None needs a GPU.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out
JOBS ?= auto
# A test that hangs is ended. RERUNS=2 gives one that fails two more chances, and lists it
# as RERUN: what that list names depends on a clock or on threads, and has to be mended.
RERUNS ?= 0
ONE_BY_ONE := $(BIN)/python -m pytest -raR --timeout 300 --reruns $(RERUNS)
PYTEST := $(ONE_BY_ONE) -n $(JOBS) --dist worksteal
# Tests start hundreds of processes, each of which would compile the library again.
export PYTHONDONTWRITEBYTECODE :=
# Each test belongs to one target, whatever is installed, and a target reads only the
# files in which its mark stands: every process that runs tests imports all it is given.
marked = $$(grep -lE '$(1)' tests/test_*.py)
DEMO_TRAIN := --data digits --epochs 15 --lr 0.05 --seed 0
CUDNN := nvidia-cudnn-cu12==9.19.0.56 nvidia-cuda-nvrtc-cu12 cuda-pathfinder
# PyTorch's CUDA build without NVIDIA's libraries, which tests/fakecuda stands in for.
FAKECUDA := .venv-fakecuda
FAKECUDA_TORCH := torch==2.14.1 triton==3.8.0 torchvision==0.29.1
FAKECUDA_HEADERS := nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88
FAKECUDA_NEEDS := expecttest filelock typing-extensions sympy networkx jinja2 fsspec setuptools pillow
LOAD_CUDNN := $(BIN)/python -c "from mucudnn.backends.cuda.loading import load_library; \
	print(load_library(without_driver=True).path)"

.PHONY: help demo demo-train test tests test-slow fuzz test-torch test-many test-cudnn install-cudnn \
	test-fakecuda bench-fakecuda install-fakecuda \
	check format bench docs screenshots gpu-wheels clean

help:
	@echo "make demo    a convolution, a training step, a PyTorch model, in less memory"
	@echo "make demo-train   train a network on handwritten digits, in a minute"
	@echo "make test    format, lint, types, import contracts and the tests that need no extra"
	@echo "make test-slow   the tests that take long: whole networks, every policy"
	@echo "make fuzz    the properties, on twenty times as many examples, at random"
	@echo "make test-torch   the tests that compare with PyTorch"
	@echo "make test-many   the tests of measuring by workers of dask and MPI, of training over MPI"
	@echo "make test-cudnn   the tests of the real cuDNN, no GPU needed (a 1.5 GB download)"
	@echo "make test-fakecuda   PyTorch steps on CUDA without a GPU (a 0.5 GB download)"
	@echo "make bench-fakecuda   bytes and launches of PyTorch steps on CUDA, without a GPU"
	@echo "make check   the same as test, without the tests"
	@echo "make tests   the same as test, without the checks"
	@echo "make format  let ruff rewrite the sources"
	@echo "make bench   the figures of bench/results, measured here"
	@echo "make docs    the documentation as pages, in out/site; needs no network once installed"
	@echo "make gpu-wheels   wheels for bench/gpu.sh on a machine without a network"
	@echo "make clean   remove .venv and what the tools left behind"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "mucudnn needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What is installed is remembered by a stamp an extra, renewed when pyproject.toml changes.
$(VENV)/base.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/base.stamp

$(VENV)/peers.stamp: pyproject.toml $(VENV)/base.stamp | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[peers]'
	@touch $@

# Without their dependencies: any build of PyTorch does, and it is there.
ZOO = import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["zoo"])
$(VENV)/zoo.stamp: pyproject.toml $(VENV)/peers.stamp | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
		$$($(BIN)/python -c '$(ZOO)')
	@touch $@

# A cuDNN that is there already is kept: two of its wheels would overwrite each other.
$(VENV)/cudnn.stamp: Makefile $(VENV)/base.stamp | $(BIN)/python
	@$(LOAD_CUDNN) >/dev/null 2>&1 \
		|| $(BIN)/pip install --quiet --disable-pip-version-check $(CUDNN)
	@touch $@

demo: $(VENV)/base.stamp
	@mkdir -p $(OUT)
	$(BIN)/mucudnn demo --report $(OUT)/demo.html

# The digits are a file of scikit-learn. With one cache of measurements every run plans
# the same convolutions, so that one seed gives one figure.
$(VENV)/digits.stamp: pyproject.toml $(VENV)/base.stamp | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[digits]'
	@touch $@

demo-train: $(VENV)/digits.stamp
	@mkdir -p $(OUT)
	$(BIN)/mucudnn train digits $(DEMO_TRAIN) --cache $(OUT)/demo-train.sqlite \
		--json $(OUT)/demo-train.json
	@echo "data: $(OUT)/demo-train.json"

# Types are checked by one process, beside which there is time for tests.
test:
	$(MAKE) --jobs 2 check tests

tests: $(VENV)/dev.stamp
	$(PYTEST) -m "not slow and not torch and not cudnn and not many"

test-slow: $(VENV)/dev.stamp
	$(PYTEST) -m "slow and not torch and not many" $(call marked,mark.slow)

fuzz: $(VENV)/dev.stamp
	$(PYTEST) -m hypothesis --hypothesis-profile=fuzz $(FUZZ)

test-torch: $(VENV)/dev.stamp $(VENV)/peers.stamp $(VENV)/zoo.stamp
	OMP_NUM_THREADS=1 $(PYTEST) -m torch $(call marked,mark.torch|tests.torch_marks)

$(VENV)/many.stamp: pyproject.toml $(VENV)/base.stamp | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[many]'
	@touch $@

test-many: $(VENV)/dev.stamp $(VENV)/many.stamp
	# One by one: they measure themselves.
	OMP_NUM_THREADS=1 $(ONE_BY_ONE) -m many $(call marked,mark.many)

install-cudnn: $(VENV)/cudnn.stamp

test-cudnn: $(VENV)/dev.stamp install-cudnn
	@$(LOAD_CUDNN)
	$(PYTEST) -m cudnn $(call marked,mark.cudnn)

$(FAKECUDA)/python.stamp: Makefile pyproject.toml
	$(PYTHON) -m venv $(FAKECUDA)
	$(FAKECUDA)/bin/pip install --quiet --disable-pip-version-check --no-deps \
		$(FAKECUDA_TORCH)
	$(FAKECUDA)/bin/pip install --quiet --disable-pip-version-check --no-deps \
		--upgrade --target $(FAKECUDA)/headers $(FAKECUDA_HEADERS)
	$(FAKECUDA)/bin/pip install --quiet --disable-pip-version-check $(FAKECUDA_NEEDS) \
		--editable '.[dev]'
	@touch $@

install-fakecuda: $(FAKECUDA)/python.stamp

$(FAKECUDA)/built.stamp: $(FAKECUDA)/python.stamp tests/fakecuda/build.py tests/fakecuda/cudart.cpp
	$(FAKECUDA)/bin/python -m tests.fakecuda.build \
		$$($(FAKECUDA)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
		$(FAKECUDA)/headers $(FAKECUDA)/lib/fakecuda
	@touch $@

OVER_FAKECUDA := LD_LIBRARY_PATH=$(CURDIR)/$(FAKECUDA)/lib/fakecuda OMP_NUM_THREADS=1 \
	$(FAKECUDA)/bin/python

bench-fakecuda: $(FAKECUDA)/built.stamp
	$(OVER_FAKECUDA) -m bench.torch_cuda

test-fakecuda: $(FAKECUDA)/built.stamp
	$(OVER_FAKECUDA) -m pytest -raR --timeout 300 --reruns $(RERUNS) \
		-n $(JOBS) --dist worksteal tests/test_fakecuda.py

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/peers.stamp $(VENV)/zoo.stamp
	$(BIN)/python -m bench all --out bench/results

$(VENV)/docs.stamp: pyproject.toml $(VENV)/base.stamp | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "pages: out/site/index.html"

# Of the reports, for the documentation; needs a Chromium.
screenshots: $(VENV)/base.stamp
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python docs/screenshots.py

# For a machine with a GPU and no network: what it may lack, to be taken along.
GPU_WHEELS ?= wheels
GPU_PYTHON ?=
gpu-wheels:
	$(PYTHON) bench/gpu/packages.py download $(GPU_WHEELS) $(GPU_PYTHON)

clean:
	rm -rf $(VENV) $(FAKECUDA) $(OUT) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
