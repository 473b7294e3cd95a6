# The two commands of the README are `make demo` and `make test`; both need only Python ≥ 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check package format bench docs clean

demo: $(STAMP)            ## install, then show the blind spot on this machine
	$(BIN)/loopscope quickstart

test: $(STAMP)            ## the whole test suite, a file at a time on every core, the longest files first
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

check: $(STAMP)           ## style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

package: $(STAMP)         ## build wheel and sdist, check both, and use the wheel in an empty environment; into dist/
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir dist .
	LOOPSCOPE_DIST=dist $(BIN)/python -m pytest --durations 5 tests/test_installation.py

format: $(STAMP)          ## bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)           ## every claim of speed and of safety, measured; BENCH="loss monitor" runs some; writes benchmarks/README.md
	$(BIN)/python benchmarks/bench.py $(BENCH)

docs: $(STAMP)            ## rewrite the pages that are generated from the code
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache

# Every install goes through constraints.txt: a known-good set with a torch that fits.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("loopscope needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check --quiet --editable '.[dev]'
	touch $(STAMP)
