# make demo: set up, record a run, print its diagnosis.   make test: set up, run every check.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYVER  := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
LOCK   := $(wildcard lock/py$(PYVER).txt)
READY  := $(VENV)/.ready

.PHONY: demo test lint types unit slow accuracy bench-traces lowest clean

demo: $(READY)
	@$(BIN)/python tests/demo.py

test: lint types unit

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Hundreds of kills at random moments, long runs: ten minutes.
slow: $(READY)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# What diagnose says of the recorded stalls, against the truth; every figure goes to accuracy.json.
accuracy: $(READY)
	PYTHONPATH=tests $(BIN)/python -m stalls.accuracy fixtures/stalls --json accuracy.json

# Figures, side by side in one run; HolisticTraceAnalysis is installed into a place of its own.
bench-traces: $(READY)
	PYTHONPATH=tests $(BIN)/python -m bench.bench_traces $(TRACES)

# The lower bounds of pyproject.toml, tried.
lowest:
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install -q --upgrade pip uv
	$(VENV)-lowest/bin/uv pip install -q --python $(VENV)-lowest/bin/python \
	  --resolution lowest-direct -e '.[dev]'
	$(VENV)-lowest/bin/python -m pytest -q $(PYTEST_ARGS)

$(READY): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { echo 'whyidle needs Python 3.10 or newer as python3; or run: make PYTHON=python3.11' >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo 'python3 cannot make a virtual environment; install its venv package (python3-venv)' >&2; exit 2; }
	$(BIN)/python -m pip install -q --disable-pip-version-check $(if $(LOCK),-c $(LOCK)) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest
