# Two commands are all it takes: `make fit` trains a model, `make test` runs the tests. Both set up what they need first.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: fit test test-widths lint format board clean

fit: $(VENV)/installed
	$(BIN)/python -m lightning_hmm fit --config configs/standard/synthetic.yaml

test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

# The tests of the compiled kernels with other vector instructions than those of `make test`, which uses the widest that the processor has.
SIMD ?= avx2 generic

test-widths: $(VENV)/installed-dev
	set -e; for simd in $(SIMD); do \
		echo "LIGHTNING_HMM_SIMD=$$simd"; \
		LIGHTNING_HMM_SIMD=$$simd OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile tests/inference tests/optim tests/models/test_cloned.py; \
	done

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

board: $(VENV)/installed
	$(BIN)/tensorboard --logdir logs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Also drops the compiled kernels.
clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
