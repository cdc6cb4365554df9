# `make` lists what there is to make. Needs Python 3.11 or newer, a POSIX shell and make.

PYTHON ?= python3
# PYTHONSAFEPATH: the four packages come from the installation, not from the folder that a command runs in.
BIN = PYTHONSAFEPATH=1 .venv/bin
INSTALLED = .venv/.installed

.PHONY: help install demo test lint type bench bench-convergence clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED) ## install into .venv, once

# pip ends with the word Successfully or it failed; its complaints are kept for that case.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("spes-node needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv .venv
	@printf 'Installing into .venv, some minutes the first time '
	@.venv/bin/python -m pip install -c constraints.txt -e '.[dev]' 2> .venv/install.log | { \
		failed=1; \
		while read -r word rest; do \
			case $$word in Collecting | Processing) printf . ;; Successfully) failed=0 ;; esac; \
		done; \
		echo; exit $$failed; \
	} || { cat .venv/install.log >&2; exit 1; }
	@touch $(INSTALLED)

demo: install ## train a small model on four nodes on this box; DATA=book.txt trains on a text of yours
	@$(BIN)/spes-node demo $${DATA:+--data "$$DATA"}

test: install ## run all tests, the quick ones first
	$(BIN)/python -m pytest -m 'not swarm'
	$(BIN)/python -m pytest -m swarm

lint: install ## check style, format and the layers of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

type: install ## check types
	$(BIN)/mypy

bench: bench-convergence ## run every benchmark

bench-convergence: install ## compare a swarm's loss with ordinary training
	PYTHONPATH=. $(BIN)/python -m bench.convergence

clean: ## remove .venv and everything else that was built
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
