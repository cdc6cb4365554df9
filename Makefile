# `make` lists what there is to make. Needs Python 3.11 or newer, a POSIX shell and make.

PYTHON ?= python3
# PYTHONSAFEPATH: the four packages come from the installation, not from the folder that a command runs in.
BIN = PYTHONSAFEPATH=1 .venv/bin
INSTALLED = .venv/.installed
# Tests run side by side: more threads than cores would wait for one another.
ONE_THREAD = OMP_NUM_THREADS=1
# pytest compiles much when it starts, and keeps that, whatever the surroundings say.
export PYTHONDONTWRITEBYTECODE =

BENCHES = bench-convergence bench-encodings bench-engine bench-memory bench-method bench-recovery bench-scale bench-sync bench-unequal bench-variants

.PHONY: help install demo test test-gpu lint type bench $(BENCHES) clean

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
	$(ONE_THREAD) $(BIN)/python -m pytest -m 'not swarm and not gpu' -n auto --maxprocesses 4
	$(ONE_THREAD) $(BIN)/python -m pytest -m swarm -n auto --maxprocesses 2

test-gpu: install ## run the tests that need a CUDA device; docs/gpu.md says what they show
	$(BIN)/python -m pytest -m gpu

lint: install ## check style, format and the layers of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

type: install ## check types
	$(BIN)/mypy

bench: $(BENCHES) ## run every benchmark

bench-convergence: install ## compare a swarm's loss with ordinary training
	PYTHONPATH=. $(BIN)/python -m bench.convergence

bench-encodings: install ## compare what encodings and overlap cost in loss
	PYTHONPATH=. $(BIN)/python -m bench.encodings

bench-engine: install ## compare a step of training with transformers' own: time and memory
	PYTHONPATH=. $(BIN)/python -m bench.engine

bench-memory: install ## take a step of the 2B preset on this CPU (20 GB), and compare its memory with the plan
	PYTHONPATH=. $(BIN)/python -m bench.memory

bench-method: install ## compare SPES with ordinary training, full copies, DiLoCo and a node alone (half an hour on two cores)
	PYTHONPATH=. $(BIN)/python -m bench.method

bench-recovery: install ## kill and stop nodes in every phase of a round: what it costs the others (12 minutes)
	PYTHONPATH=. $(BIN)/python -m bench.recovery

bench-sync: install ## compare a synchronisation with a parameter server's round, behind slow lines (root) and on loopback
	PYTHONPATH=. $(BIN)/python -m bench.sync

bench-scale: install ## count what a swarm on this box costs each of its nodes, and compute it for larger ones
	PYTHONPATH=. $(BIN)/python -m bench.scale_model
	PYTHONPATH=. $(BIN)/python -m bench.scale

bench-unequal: install ## see what one weak line costs the others (root)
	PYTHONPATH=. $(BIN)/python -m bench.unequal

bench-variants: install ## try what might close the gap between SPES and ordinary training (an hour on two cores)
	PYTHONPATH=. $(BIN)/python -m bench.variants

clean: ## remove .venv and everything else that was built
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
