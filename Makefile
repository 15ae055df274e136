# `make` alone prints the targets. Everything happens in one virtual environment, .venv, which every target builds first
# where it is missing or a lock has changed: `make demo` from requirements-training.lock, the others from
# requirements.lock, which adds what tests, lint, plots and export need.
#
#   PYTHON=python3.12   the interpreter that .venv is built with (3.10 or newer)
#   VENV=               (empty) no virtual environment: use $(PYTHON) and the packages it has, installing nothing. For GPU
#                       machines and clusters that bring their own torch: `make test-gpu VENV=`, `make demo VENV=`
#   ARGS='-k loader'    more arguments for pytest (`make test`, `make test-gpu`) or for the demo (`make demo`)
#   SLURM_ARGS=...      the same for `make test-slurm`

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SLURM_ARGS ?=
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-slurm test-gpu test-environments lint bench clean

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
STAMP :=
TRAINING_STAMP :=
else
RUN := $(VENV)/bin/python
# Copies of the locks that the environment was completely installed from. Both go away before an installation begins and
# come back, by renames, after it: an environment without any may be half installed, and is built from nothing.
STAMP := $(VENV)/installed.lock
TRAINING_STAMP := $(VENV)/installed-training.lock
endif

help:  ## these lines
	@echo "make TARGET [PYTHON=python3] [VENV=.venv] [ARGS=...]   (VENV= with nothing: this machine's own Python packages)"
	@sed -nE 's/^([a-z-]+):[^#]*##[[:space:]]*(.*)$$/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

setup: $(STAMP)  ## the virtual environment .venv, from requirements.lock

ifneq ($(STAMP),)
$(TRAINING_STAMP): requirements-training.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed and $(PYTHON) is %d.%d: name another, as in make setup PYTHON=python3.12" % sys.version_info[:2] or None)'
	@echo "Installing what $< lists into $(VENV) (once)"
	if [ ! -f $@ ] && [ ! -f $(STAMP) ]; then $(PYTHON) -m venv --clear $(VENV); fi
	rm -f $@ $(STAMP)
	$(RUN) -m pip install --disable-pip-version-check --quiet --requirement $<
	cp $< $@.new
	mv $@.new $@

$(STAMP): requirements.lock $(TRAINING_STAMP)
	@echo "Installing what $< lists into $(VENV) (once; about two minutes)"
	rm -f $@ $(TRAINING_STAMP)
	$(RUN) -m pip install --disable-pip-version-check --requirement $<
	cp requirements-training.lock $(TRAINING_STAMP)
	cp $< $@.new
	mv $@.new $@
endif

demo: $(TRAINING_STAMP)  ## stories, three tiny models, which of them learns what, and a page about it: all in demo_output/
	@$(RUN) demo.py $(ARGS)

check: lint  ## lint and the quick tests of every module, in under three minutes on two cores: before each commit
	$(RUN) -m pytest -n 2 --dist worksteal -m "not gpu and not slurm and not slow" $(ARGS)

# pytest comes last and bare: its summary line, which CI reads, is the last line of `make test`.
test: lint test-slurm  ## lint, then every test that this machine can run without a GPU
	$(RUN) -m pytest -n 2 --dist worksteal -m "not gpu and not slurm" $(ARGS)

# By themselves, since they wait for the clocks of SLURM; each worker starts a cluster of its own (see tests/conftest.py).
test-slurm: setup  ## the tests on a real SLURM, which they install (apt, as root) and start; elsewhere they say why not
	$(RUN) -m pytest -n 2 --dist loadfile -m slurm tests/test_slurm_*.py $(SLURM_ARGS)

test-gpu: setup  ## the tests that need a CUDA device
	@$(RUN) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make test-gpu needs a CUDA device, and torch %s sees none here" % torch.__version__)'
# Nothing in preprocessing or on the tests' SLURM touches a GPU, and those tests import packages that a GPU machine
# need not have.
	$(RUN) -m pytest -m gpu --ignore-glob='tests/test_preprocessing*' --ignore-glob='tests/test_slurm*' $(ARGS)

test-environments: setup  ## an exported folder in three fresh environments: transformers 5 and 4.57, sentence-transformers
	$(RUN) tests/environments/run.py $(ARGS)

lint: setup  ## ruff (lint and format) and pyright
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath "$$($(RUN) -c 'import sys; print(sys.executable)')"

bench: setup  ## every benchmark, one after the other: the first two for any machine, the others for CUDA, the last for several GPUs
	$(RUN) benchmarks/loader.py
	$(RUN) benchmarks/checkpoint.py
	$(RUN) benchmarks/throughput.py --parts
	$(RUN) benchmarks/attention.py
	$(RUN) benchmarks/optimizer.py
	$(RUN) benchmarks/scaling.py

clean:  ## remove caches and demo_output/ (.venv stays)
	rm -rf demo_output bench_output .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
