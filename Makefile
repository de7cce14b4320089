# The verbs of this repository. `make` alone explains them.
.DEFAULT_GOAL := help
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first interpreter on PATH that is new enough. Override: make install PYTHON=/path/to/python3.11
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

MODEL ?= demo
PORT ?= 8000
URL ?= http://127.0.0.1:$(PORT)
ARGS ?=

.PHONY: help install serve test test-fast check format soak bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(STAMP) ## Create .venv and install kvatlas with exactly the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or run make PYTHON=/path/to/python"; exit 1; }
	@echo "Installing into $(VENV): some minutes, about 2 GB with torch for the CPU"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo "Compiling the kernels of pool and router, once"
	$(BIN)/python -c "import kvpool.kernels.key_chain, kvpool.pool, router.service, actors.flat_layer"
	@touch $@

serve: install ## Serve a model in the foreground (MODEL=demo PORT=8000 ARGS='--mode exact')
	$(BIN)/kvatlas serve $(MODEL) --port $(PORT) $(ARGS)

# Two at a time, but those that start Ray one after the other: a cluster takes the whole machine. 5: nothing selected by ARGS.
test: install ## All tests except soak (minutes)
	$(BIN)/python -m pytest -m "not ray and not soak" -n 2 --dist loadfile $(ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m "ray and not soak" $(ARGS) || [ $$? -eq 5 ]

test-fast: install ## Tests without Ray and Redis, about a minute on two cores
	$(BIN)/python -m pytest -m "not ray and not redis and not slow and not soak" $(ARGS)

check: install ## Lint, format, types, and the import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

format: install ## Rewrite sources in the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: install ## The long runs
	$(BIN)/python -m pytest -m soak --timeout 7200 $(ARGS)

bench: install ## Load a running server and print one JSON object (URL=http://127.0.0.1:8000 ARGS='--workload FILE')
	$(BIN)/kvatlas bench serve --url $(URL) --json $(ARGS)

clean: ## Remove the environment, caches and build output
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .schemathesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
