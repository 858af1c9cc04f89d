# `make` lists the targets. Every target that needs the environment makes it, in .venv, from the lock files.
PYTHON ?= python3
# The tests are spread over six processes, as they wait for much; PYTEST_ARGS="-x tests/unit" runs a part of them in one.
PYTEST_ARGS ?= -n 6 --dist loadfile --no-loadscope-reorder
# `make lock LOCK_ARGS=--upgrade` takes newer versions; without it, what is locked stays.
LOCK_ARGS ?=

BIN := .venv/bin
ENVIRONMENT := .venv/.complete
PIP := $(BIN)/pip --disable-pip-version-check install -qq
UV ?= $(firstword $(wildcard $(BIN)/uv) uv)
COMPILE = $(UV) pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -q \
	$(LOCK_ARGS)

# Some images set it, and each of the thousand processes that the tests start would then compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test chaos contract-real trainers-check check lock clean venv

help:
	@echo "make demo    the whole path on this machine: embedded Valkey, simulated server, example prompts"
	@echo "make test    the whole test suite; PYTEST_ARGS=\"...\" for a part of it"
	@echo "make chaos   faults thrown at a whole installation for MINUTES=3 by SEED=1, then the books are checked"
	@echo "make contract-real   the contract against a real SGLang, which SGLANG_CPU=... starts; see tests/contract"
	@echo "make trainers-check   an export in SpecForge's, speculators' and Model-Optimizer's own loaders; TRAINERS=\"specforge\" for one"
	@echo "make check   format, lint, types, import rules"
	@echo "make venv    only the environment, .venv; PYTHON=python3.12 chooses the interpreter"
	@echo "make lock    the lock files anew from pyproject.toml; LOCK_ARGS=--upgrade for newer versions"
	@echo "make clean   remove what these targets made; the output of runs stays"

demo: $(ENVIRONMENT)
	@$(BIN)/tokenmill demo

test: $(ENVIRONMENT)
	@$(BIN)/pytest $(PYTEST_ARGS)

SEED ?= 1
MINUTES ?= 3
# CHAOS_ARGS="--with binding --with flushall" throws these, too; --keep keeps files and logs.
CHAOS_ARGS ?=

chaos: $(ENVIRONMENT)
	@$(BIN)/python -m tests.faults.chaos.run --seed $(SEED) --minutes $(MINUTES) $(CHAOS_ARGS)

# What starts and stops a real server on this machine: `up MODEL PORT` and `down PORT`.
SGLANG_CPU ?= ../shared/sglang-cpu/sglang-cpu

contract-real: $(ENVIRONMENT)
	@PYTHON=$(BIN)/python SGLANG_CPU="$(SGLANG_CPU)" tests/contract/with-real-server $(BIN)/pytest tests/contract

TRAINERS ?= specforge speculators modelopt

trainers-check: $(ENVIRONMENT)
	@TOKENMILL=$(BIN)/tokenmill tests/trainers/check $(TRAINERS)

check: $(ENVIRONMENT)
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/ruff check --quiet
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

venv: $(ENVIRONMENT)
	@:

# --no-build-isolation: the build backend, too, is the one that the development lock pins.
$(ENVIRONMENT): requirements.lock requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "$(PYTHON) is missing or older than Python 3.11; install one (apt install python3 python3-venv), or name" \
			"another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make a virtual environment; install its venv module: apt install python3-venv" >&2; exit 1; }
	@echo "installing into .venv (once, a minute or two)" >&2
	@$(PYTHON) -m venv .venv
	@$(PIP) --require-hashes -r requirements.lock -r requirements-dev.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

lock:
	@command -v $(UV) >/dev/null || { echo "make lock needs uv; install it (pip install uv), or name it: make lock" \
		"UV=/path/to/uv" >&2; exit 1; }
	@$(COMPILE) -o requirements.lock pyproject.toml
	@$(COMPILE) -o requirements-dev.lock -c requirements.lock --group pyproject.toml:dev

clean:
	@rm -rf .venv .trainers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist demo-out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
