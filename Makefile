# Nothing needs to be done before any of these: what they need is made first.
PYTHON ?= python3
BIN := .venv/bin
PROCESSES ?= 2

.PHONY: setup demo test test-slow mutation docs check format clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nmt needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

demo: setup  ## raw text to BLEU in a few minutes
	$(BIN)/nmt run -c demo

test: setup  ## everything quick
	$(BIN)/python -m pytest -q -n $(PROCESSES) -m 'not slow'

test-slow: setup  ## what takes longer
	$(BIN)/python -m pytest -q -n $(PROCESSES) -m slow

mutation: setup  ## which faults of the core no test would find; hours
	$(BIN)/python scripts/mutation.py

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	touch $@

docs: setup .venv/docs  ## the documentation as a site, docs/_build/index.html
	rm -rf docs/_build
	$(BIN)/python -m sphinx -E -W --keep-going -q docs docs/_build

check: setup  ## format, lint, types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## caches and builds; data/ and runs/ stay
	rm -rf build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
