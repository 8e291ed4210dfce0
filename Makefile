.DEFAULT_GOAL := help
.PHONY: help install test chaos lint format docs demo clean

PYTHON ?= python3
BIN := .venv/bin
# Written when the environment is complete: it is laid again when what it was made of changes.
STAMP := .venv/installed

help:
	@echo "make test     all tests, on PostgreSQL 18 and 15 (ARGS='-k name' runs some, without coverage)"
	@echo "make chaos    break a running system and judge it (SECONDS=60 SEED=n; a new seed by default)"
	@echo "make lint     ruff, mypy, import contract"
	@echo "make format   put the code in form"
	@echo "make docs     the documentation, into build/docs"
	@echo "make demo     a fan-out over the PDF files of the example (PAPERS=folder: over yours)"
	@echo "make clean    remove what these made, the environment included"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing the development environment"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable ".[dev]"
	@touch $@

install: $(STAMP)

test: $(STAMP)
	@$(BIN)/python -m tests $(ARGS)

chaos: $(STAMP)
	@$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP)
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: $(STAMP)
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/docs
	@echo "Documentation: build/docs/index.html"

demo: $(STAMP)
	@$(BIN)/python -m examples.extract_papers.demo $(if $(PAPERS),"$(PAPERS)")

clean:
	@rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
