# Two commands on a fresh machine: `make demo` and `make test`. Everything else is here to be looked up.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# The oldest Python and torch we support; any python3 will do where there is no 3.10.
OLDEST_PYTHON ?= $(shell python3.10 -c 'print("python3.10")' 2>/dev/null || echo $(PYTHON))
OLDEST_VENV   := .venv-oldest
OLDEST_STAMP  := $(OLDEST_VENV)/.installed

# The newest torch we test on; NEWEST_TORCH=2.14.1 is another one, in an environment of its own.
NEWEST_TORCH  ?=
NEWEST_VENV   := .venv-$(or $(NEWEST_TORCH),newest)
NEWEST_STAMP  := $(NEWEST_VENV)/.installed

.PHONY: help setup demo test test-all faults docs docs-serve lint format test-oldest test-newest bench release clean

help:           ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1 # /p' $(MAKEFILE_LIST) | awk -F' # ' '{printf "make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## .venv with the package and everything its development needs

$(STAMP): pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e ".[dev]"
	@touch $@

demo: setup     ## every trainer once on this machine, the summary, and out/demo/report.html
	$(BIN)/python examples/demo.py

test: setup     ## the tests, in about six minutes on two cores
	$(BIN)/python -m pytest -n 2 -m "not long"

test-all: test  ## and the long ones: real workers, ranks, trackers, kills, other trainers
	# what a file has started is started once; most of these tests wait for processes of their own
	$(BIN)/python -m pytest -n 4 --dist loadfile -m long

faults: setup   ## every attack of the fault suite, in about six minutes; FAULTS="--seed 1" for others
	$(BIN)/python -W ignore -m faults $(FAULTS)

docs: setup     ## the documentation site in out/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: setup ## the same at http://127.0.0.1:8000, built again when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lint: setup     ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup   ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-oldest: $(OLDEST_STAMP) ## the tests on the oldest torch we support
	$(OLDEST_VENV)/bin/python -m pytest -n 2

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt
	test -x $(OLDEST_VENV)/bin/python || $(OLDEST_PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --upgrade pip  # that of Python 3.10 does not resolve these
	$(OLDEST_VENV)/bin/python -m pip install --quiet -c constraints-oldest.txt -e ".[dev]"
	@touch $@

test-newest: $(NEWEST_STAMP) ## the tests on the newest torch we support, or on NEWEST_TORCH=2.14.1
	$(NEWEST_VENV)/bin/python -m pytest -n 2

$(NEWEST_STAMP): pyproject.toml constraints-newest.txt
	test -x $(NEWEST_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_VENV)
	sed '$(if $(NEWEST_TORCH),s/^torch==.*/torch==$(NEWEST_TORCH)/)' constraints-newest.txt > $(NEWEST_VENV)/constraints.txt
	$(NEWEST_VENV)/bin/python -m pip install --quiet -c $(NEWEST_VENV)/constraints.txt -e ".[dev]"
	@touch $@

bench: setup    ## the figures of docs/accuracy.md; other figures name their script
	for script in benchmarks/flops_*.py; do $(BIN)/python $$script || exit 1; done

release: setup  ## sdist, wheel and notes, built and checked, nothing uploaded; RELEASE=--draft rehearses
	$(BIN)/python tools/release.py $(RELEASE)

clean:          ## remove what was built and written, environments included
	rm -rf $(VENV) .venv-* out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.egg-info' -type d -prune -exec rm -rf {} +
