VENV ?= .venv
# The first interpreter that runs; the pins in constraints.txt are for Python 3.11.
PYTHON ?= $(shell for p in python3.11 python3; do "$$p" -c "" 2>/dev/null && echo "$$p" && break; done)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL = $(BIN)/python -m pip install -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install browser test lint demo bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-8s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Create the virtual environment (VENV=.venv) with the pinned development dependencies

# The pinned setuptools goes in first, so that the build uses it rather than an unpinned one. timm comes without its
# dependency torchvision, whose builds are for GPUs: tests of encoders do without it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	echo '*' > $(VENV)/.gitignore
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	$(PIP_INSTALL) --no-deps timm
	touch $@

# Tests look at reports in a real browser. Where it cannot be installed they are skipped and say so, but not in CI.
browser:
	command -v chromium >/dev/null || { apt-get update -q && apt-get install -q -y chromium; } || test -z "$$CI"

test: $(STAMP) browser ## Check format, lint, types and layers, then run the tests
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(STAMP) ## Format and fix what can be fixed, then check types and layers
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: $(STAMP) ## Draw slides, extract features, train PSA-MIL and ABMIL, compare them in demo-report/index.html
	$(BIN)/python -m psamil demo --out demo-report

bench: $(STAMP) ## Measure time and memory of the attention
	$(BIN)/python benchmarks/attention.py

clean: ## Remove the virtual environment, caches and generated files
	rm -rf $(VENV) build dist demo-report src/*.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
