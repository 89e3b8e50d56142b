# `make demo` and `make test` do all the set-up on a machine with Python 3.11 or newer and make.
# PYTHON=python3.12 make test   takes another interpreter;   DATA: set FEDQUILT_DATA to a folder with data caches.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2
SEED ?= 1
MINUTES ?= 30

.PHONY: help demo test lint types fuzz test-gpu test-deploy soak bench docs clean

help:
	@echo "make demo         set up, then five methods side by side on handwritten digits (about a minute)"
	@echo "make test         set up, then lint, types, and all tests and examples"
	@echo "make fuzz         damaged uploads, runs, files and settings by the thousand (some minutes)"
	@echo "make test-gpu     the tests that need a GPU"
	@echo "make test-deploy  the slow tests on a real network stack"
	@echo "make soak         a deployment under random faults for half an hour (SEED=1 MINUTES=30)"
	@echo "make bench        the engine against a plain loop over clients"
	@echo "make docs         the documentation, into site/"
	@echo "make clean        remove $(VENV) and what tools left behind"

# Stamps: a second call installs nothing unless the requirements changed.
$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "fedquilt needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# PyTorch first and by itself, so that the builds of it that are configured for this machine are the ones asked for.
$(VENV)/.torch: $(VENV)/.made
	@echo "installing PyTorch into $(VENV); the first time takes a minute or two"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.core: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e '.[data,plots,report,deploy,dp,track,export,docs,dev]'
	@touch $@ $(VENV)/.core

demo: $(VENV)/.core
	@$(BIN)/fedquilt demo

test: lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not deploy"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: $(VENV)/.dev
	$(BIN)/mypy

fuzz: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) tests/fuzz --hypothesis-profile=fuzz

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m gpu -ra

test-deploy: $(VENV)/.dev
	$(BIN)/python -m pytest -m deploy

soak: $(VENV)/.dev
	$(BIN)/python tests/deploy/soak.py --seed $(SEED) --minutes $(MINUTES)

bench: $(VENV)/.core
	$(BIN)/python benchmarks/engine.py

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site src/*.egg-info
