# Two commands do everything: `make demo` and `make test`. Both make .venv themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out
DEMO := --batch 64 --policy powers_of_two --workspace-limit 8MiB,32MiB,64MiB \
	--memory-limit 4GiB --time-limit 240

.PHONY: help demo test check format bench clean

help:
	@echo "make demo    tune AlexNet on this machine's CPU; prints a table, writes a report"
	@echo "make test    format, lint, types, import contracts and all tests"
	@echo "make check   the same without the tests"
	@echo "make format  let ruff rewrite the sources"
	@echo "make bench   the figures of bench/results, measured here"
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

demo: $(VENV)/base.stamp
	@mkdir -p $(OUT)
	$(BIN)/mucudnn tune alexnet $(DEMO) --json $(OUT)/demo.json --report $(OUT)/demo.html
	@echo "report: $(OUT)/demo.html   data: $(OUT)/demo.json"

test: check
	$(BIN)/python -m pytest

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/peers.stamp
	$(BIN)/python -m bench all --out bench/results

clean:
	rm -rf $(VENV) $(OUT) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
