# make demo    the job that is stopped in mid-epoch and resumed, on this machine (see README)
# make test    lint, types and every test
# make help    the rest
#
# Settings, as in `make demo PYTHON=python3.12`:
#   PYTHON            the interpreter that .venv is made from (3.10 to 3.14)
#   TORCH_INDEX_URL   where to take torch from, if not from where pip looks anyway (e.g. torch's own CPU index)
#   PIP_ARGS          further arguments for every `pip install`
#   PYTEST_ARGS       further arguments for pytest, as in `make fast PYTEST_ARGS="-k catalog"`

PYTHON ?= python3
TORCH_INDEX_URL ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
DRILL_ARGS ?=
SCHEDULES ?= 100000
PROGRAMS ?= 200
RANKS ?= 1
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
INSTALL := $(PIP) install --quiet $(PIP_ARGS)
# In the order of the files: the files of few tests, which would come last, are those that take longest. Three on two
# cores: jobs wait for each other a quarter of the time.
IN_PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# A test starts many processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

# .venv is made once: another PYTHON= would be passed over in silence.
ifeq ($(origin PYTHON),command line)
ifneq ($(wildcard $(BIN)/python),)
WHICH := -c 'import os, sys; print(os.path.realpath(sys._base_executable), *sys.version_info[:3])'
ifneq ($(shell $(PYTHON) $(WHICH)),$(shell $(BIN)/python $(WHICH)))
$(error $(VENV) is there and was not made from PYTHON=$(PYTHON). To use it, remove $(VENV) first; to keep $(VENV), leave PYTHON= out)
endif
endif
endif

.PHONY: help venv wheel demo test lint types pytest fast drill mutants simulation fuzz trainers packages format proto bench docs clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile
	@echo "make venv     .venv with the pinned torch"
	@echo "make wheel    dist/: the wheel, and ma_pre_start.sh beside it"
	@echo "make lint     ruff and shellcheck;  make format  lets ruff rewrite what it can"
	@echo "make types    mypy, strict"
	@echo "make pytest   every test but further cases (marker drill);  make fast  without those marked slow"
	@echo "make drill    the marker drill, and random faults on real jobs: all exact? DRILL_ARGS='--faults 200 --seed 1'"
	@echo "make mutants  changes one line of the engine at a time: do the tests of its room notice? MUTANTS='persist start' for some rooms"
	@echo "make simulation  stops, agents, recoveries in place, clusters and files of simulated jobs, and defects put back: SCHEDULES=100000 JOBS=2"
	@echo "make fuzz     training scripts made by chance, each stopped and killed by chance: equal, told, or WRONG? PROGRAMS=200 RANKS=1 JOBS=2 SYSTEM=model"
	@echo "make trainers installs Lightning, Accelerate and Transformers into .venv and runs all tests with them"
	@echo "make packages installs about 100 packages of others into .venv-packages and prints what docs/trainers.md sums up"
	@echo "make proto    the Python code of platforms/strategy.proto, which is checked in"
	@echo "make bench    the benchmarks, one after another"
	@echo "make docs     the pages under docs/ as a site in site/; links are checked"
	@echo "make clean    removes what was built (not .venv)"

# --- what is installed in .venv; a file in $(DONE) stands for each part ---

$(DONE)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' || { \
	  echo "make: PYTHON=$(PYTHON) is not Python 3.10 to 3.14; give another, as in: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments; install Debian's python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(DONE) && touch $@

# torch alone and first, in the exact version: what comes later finds it there and does not fetch a CUDA build.
$(DONE)/torch: requirements/torch-cpu.txt | $(DONE)/venv
	$(INSTALL) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) -r $<
	@touch $@

venv: $(DONE)/torch

# The package's own files, as the tests and tools see them: the working tree itself.
$(DONE)/dev: pyproject.toml $(DONE)/torch
	$(INSTALL) -e '.[dev]'
	@touch $@

# --- the wheel ---

# What builds it, as pyproject.toml asks for it: no torch.
$(DONE)/build: pyproject.toml | $(DONE)/venv
	$(INSTALL) 'setuptools>=77' wheel
	@touch $@

# Built each time, since a module that was taken away leaves no newer file. build/ is removed first: setuptools would pack
# such a module from there. The fixed date makes the wheel a function of the source, so that an unchanged one is known
# again by its digest and not installed anew.
wheel: $(DONE)/build
	@rm -rf build dist/mindx_elastic-*.whl
	SOURCE_DATE_EPOCH=946684800 $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@cp ma_pre_start.sh dist/ && ls dist

# --- the demo ---

# Installed as a platform would, by the script beside the wheel, in place of the working tree that `make test` installs.
demo: $(DONE)/torch wheel
	@rm -f $(DONE)/dev
	@export PYTHON=$(BIN)/python && source dist/ma_pre_start.sh && \
	  $(INSTALL) "$$(ls dist/mindx_elastic-*.whl)[examples]" && \
	  $(BIN)/python examples/resnet_cifar10/demo.py

# --- checks ---

test: lint types pytest

lint: $(DONE)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if [ -x $(BIN)/shellcheck ]; then set -x; $(BIN)/shellcheck ma_pre_start.sh .ci/run examples/*/*.sh deploy/*/*.sbatch; fi

format: $(DONE)/dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

types: $(DONE)/dev
	$(BIN)/mypy

pytest: $(DONE)/dev
	$(BIN)/python -m pytest $(IN_PARALLEL) $(PYTEST_ARGS)

fast: $(DONE)/dev
	$(BIN)/python -m pytest -m 'not slow and not drill' $(IN_PARALLEL) $(PYTEST_ARGS)

# Each part runs whatever became of the ones before; the last line says which failed.
drill: $(DONE)/dev
	@failed=(); \
	part() { echo "== $$*"; "$$@" || failed+=("$$* (exit code $$?)"); }; \
	part $(BIN)/python -m pytest $(IN_PARALLEL) -m drill $(PYTEST_ARGS); \
	part $(BIN)/python -m tests.drill $(DRILL_ARGS); \
	if (( $${#failed[@]} )); then printf 'drill: FAILED: %s\n' "$${failed[@]}" >&2; exit 1; fi; \
	echo "drill: both parts passed"

mutants: $(DONE)/dev
	$(BIN)/python -m tests.mutants $(MUTANTS)

simulation: $(DONE)/dev
	$(BIN)/python -m tests.simulation all --schedules $(SCHEDULES) --jobs $(JOBS)
	$(BIN)/python -m tests.mutants.defects

fuzz: $(DONE)/dev
	$(BIN)/python -m tests.fuzz.play --programs $(PROGRAMS) --ranks $(RANKS) --jobs $(JOBS) --system "$(SYSTEM)"

# Not in [dev]: decision 40. Once they are there, `make test` and `make drill` run their shares of these tests, too.
$(DONE)/trainers: pyproject.toml $(DONE)/dev
	$(INSTALL) -e '.[accelerate,lightning,transformers]' tensorboard
	@touch $@

trainers: $(DONE)/trainers
	$(BIN)/python -m pytest -m 'drill or not drill' $(IN_PARALLEL) $(PYTEST_ARGS) tests/integrations

# An environment that sees .venv: its torch stays the only one, and mypy does not see these packages.
$(DONE)/packages: requirements/packages.txt $(DONE)/dev
	$(BIN)/python -m venv --without-pip .venv-packages
	@for site in .venv-packages/lib/python3.*/site-packages; do \
	  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$site/base.pth; pwd >> $$site/base.pth; \
	  $(INSTALL) --no-deps --target $$site --upgrade -r $<; done
	@touch $@

packages: $(DONE)/packages
	OMP_NUM_THREADS=1 .venv-packages/bin/python -m tests.packages $(PACKAGES)

proto: $(DONE)/dev
	$(BIN)/python -m tests.platforms.generate_proto

bench: $(DONE)/dev
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

# --- the site ---

# Without torch and the package: the API is read from the source.
$(DONE)/docs: requirements/docs.txt | $(DONE)/venv
	$(INSTALL) -r $<
	@touch $@

docs: $(DONE)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

clean:
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-output
	find mindx_elastic tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
