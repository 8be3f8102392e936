# `make help` lists the targets. Each target first sets up the environment that it needs.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help fit test quick test-widths lint format board clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

fit: $(VENV)/installed  ## Train a first model on synthetic data
	$(BIN)/python -m lightning_hmm fit --config configs/standard/synthetic.yaml

test: $(VENV)/installed-dev  ## Run all tests
	$(PYTEST)

QUICK = tests/test_imports.py tests/test_form.py tests/test_columns.py tests/test_sequences.py tests/distributions tests/inference/test_enumeration.py \
	tests/inference/test_operators.py tests/models/test_hmm.py tests/optim

quick: $(VENV)/installed-dev  ## Run a subset of the tests that covers the core (at most 2 minutes)
	$(PYTEST) $(QUICK)

# `make test` uses the widest vector instructions of the processor.
SIMD ?= avx2 generic

test-widths: $(VENV)/installed-dev  ## Run the tests of the compiled kernels with narrower vector instructions
	set -e; for simd in $(SIMD); do \
		echo "LIGHTNING_HMM_SIMD=$$simd"; \
		LIGHTNING_HMM_SIMD=$$simd $(PYTEST) tests/inference tests/optim tests/models/test_cloned.py; \
	done

lint: $(VENV)/installed-dev  ## Check style, types and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(VENV)/installed-dev  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

board: $(VENV)/installed  ## Show the logs in TensorBoard
	$(BIN)/tensorboard --logdir logs

clean:  ## Remove the environment, caches and compiled kernels
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
