# A fresh machine needs Python 3.11 to 3.13 and make; everything else lands in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The stamp names the interpreter: another PYTHON makes .venv anew.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
STAMP := $(VENV)/installed-$(VERSION)

.PHONY: train test lint bench bench-replay clean

train: $(STAMP)
	$(BIN)/python -m experiments.train dfps_fast --env HalfCheetah-v4

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[bench]"
	$(BIN)/python -m experiments.bench_ppo

bench-replay: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[bench-replay]"
	$(BIN)/python -m experiments.bench_replay

clean:
	rm -rf $(VENV)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	touch $@
