# make demo    the main job on a small scale: train, save through three tiers, kill, resume, load from S3 alone
# make test    everything that the tests need, servers included, then all tests
# make check   linter, formatter, types
# make bench   the benchmarks, against the peers: 45 minutes at most; ARGS=--short: some; ARGS="--only save,load"
# make reference    docs/reference/api.md, from the docstrings
#
# Needs Python 3.10 or newer and make. Set PYTHON to choose the interpreter, VENV for the environment's place.

PYTHON ?= python3
VENV ?= .venv
# What pip is held to; empty for the newest of everything.
CONSTRAINTS ?= constraints.txt
# Where CPU builds of torch come from when the package index has only CUDA builds (gigabytes); empty: never look there.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Parallel test processes: more than cores, for many tests wait. One file's tests stay together, because they share a server.
JOBS ?= 3
# More for pytest, e.g. make test ARGS="-k promote" or ARGS=--long
ARGS ?=

# Python keeps what it compiles, whatever the caller's shell says: else each of the tests' processes compiles tierstore, and each worker all
# tests, anew, which is half a minute a worker. pip compiles nothing: of 20,000 modules the tests import a quarter.
export PYTHONDONTWRITEBYTECODE :=
export PIP_COMPILE := no

bin := $(VENV)/bin
python := $(bin)/python
pip := $(python) -m pip install -qq --disable-pip-version-check -c $(VENV)/constraints.txt
project := pyproject.toml $(CONSTRAINTS) tools/make_venv.py

.PHONY: demo test check bench reference clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,7s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.demo
	$(bin)/tierstore demo $(ARGS)

# OMP_NUM_THREADS: of small tensors torch's second thread only spins, and here other processes want the core.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(python) -m pytest $(if $(JOBS),-n $(JOBS) --dist loadfile --no-loadscope-reorder) $(ARGS)

check: $(VENV)/.dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

# Peers that can't be installed are listed with the reason; they and what the plots need are never in the way of the benchmarks.
bench: $(VENV)/.dev
	@$(pip) -e '.[bench]' || echo "make: not all of the benchmarks' own packages could be installed"
	@$(python) benchmarks/peers/installed.py || true
	@$(python) benchmarks/run.py $(ARGS)

reference:
	$(PYTHON) tools/api_reference.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis tierstore-demo

# The environment, with torch in it; made anew only if it is not there.
$(VENV)/.torch: $(project)
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "make: there is no '$(PYTHON)': install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: '$(PYTHON)' is $$($(PYTHON) --version 2>&1), tierstore needs 3.10 or newer: make PYTHON=/path/to/python3.10" >&2; exit 1; }
	@$(PYTHON) tools/make_venv.py "$(VENV)" --constraints "$(CONSTRAINTS)" --torch-index "$(TORCH_INDEX)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch
	@echo "installing tierstore and what the demo needs"
	@$(pip) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch
	@echo "installing tierstore, its tests and tools"
	@$(pip) -e '.[dev]'
	@$(pip) --no-deps datasets torchtitan
	@touch $@ $(VENV)/.demo
