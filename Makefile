# make demo | test | check | bench | soak | conformance | pictures: each makes .venv first, once.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
ARGS ?=

# Real data, where it lies next to the checkout and nobody has said otherwise.
ifndef FXBATCH_DATA
ifneq ($(wildcard ../shared/data/.),)
export FXBATCH_DATA := $(abspath ../shared/data)
endif
endif

# A shell's PYTHONPATH or an activated environment must not leak in, nor that each process compiles all sources anew.
unexport PYTHONPATH VIRTUAL_ENV PYTHONHOME PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test processors test-slow package check format bench guard soak conformance pictures reference constraints clean

help:
	@echo "make demo         train the Tree-LSTM on the Stanford Sentiment Treebank (ARGS='--epochs 2')"
	@echo "make test         the test suite (ARGS='tests/data -k tree' for a part)"
	@echo "make processors   a part of it as older processors compute"
	@echo "make check        format, lint, types, import direction"
	@echo "make package      build the archives, and install and try them in clean environments"
	@echo "make bench        benchmarks           make soak         random models, for hours"
	@echo "make guard        refuse what is slower than another checkout (BASE=../other ARGS='--budget 60')"
	@echo "make conformance  PyTorch's operators  make pictures     the pictures of README and docs"
	@echo "make reference    docs/api, from the docstrings"

# The stamp is written last: an interrupted install is taken up again, a finished one is not repeated.
# What is compiled is made anew when its source is newer.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt fxbatch/codegen/native_table.py $(wildcard fxbatch/trace/*.[ch] fxbatch/trace/bare_parameters.py fxbatch/trace/places.py fxbatch/ragged/row_places.py fxbatch/ragged/segment_loops.py fxbatch/runtime/operands.py fxbatch/runtime/pool.py fxbatch/passes/*.py fxbatch/codegen/*.c)
	@test -n "$(PYTHON)" || { echo "no python3.11 or python3.12 found; set PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	@touch $@

venv: $(VENV)/.installed

demo: venv
	$(VENV)/bin/fxbatch demo $(ARGS)

# Two workers of one thread each: the suite is many small tensors.
test: venv
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

# As older processors compute: torch's loops, MKL's and ours. Half a minute where nothing else runs.
OLDER = tests/test_judge.py tests/test_oracle.py tests/codegen/test_native.py tests/codegen/test_native_special.py tests/trust/test_edges.py
processors: venv
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 FXBATCH_LOOPS=plain $(PY) -m pytest -q -n 2 $(OLDER) $(ARGS)
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 FXBATCH_LOOPS=avx2 $(PY) -m pytest -q -n 2 $(OLDER) $(ARGS)

test-slow: venv
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal --slow $(ARGS)

# What users install: the archives are built, installed where nothing else of this checkout is, and tried.
package: venv
	OMP_NUM_THREADS=1 $(PY) -m pytest --slow tests/install $(ARGS)

check: venv
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/test_imports.py

format: venv
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: venv
	$(PY) -m benchmarks $(ARGS)

guard: venv
	@test -n "$(BASE)" || { echo "make guard BASE=path/to/the/other/checkout" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.guard $(BASE) $(ARGS)

soak: venv
	$(PY) -m tests.soak $(ARGS)

conformance: venv
	$(PY) -m tests.conformance $(ARGS)

reference: venv
	$(PY) -m tools.api_reference $(ARGS)

pictures: venv
	$(PY) -m tools.pictures $(ARGS)

constraints: venv
	{ sed -n '/^#/p' constraints.txt; $(PY) -m pip freeze --exclude-editable | sed 's/+cpu//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
