# `make demo` and `make test` work right after `git clone`; both make their own .venv.
VENV    ?= .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
WORKERS ?= 2

# One BLAS thread a process: tests run in parallel workers, and one thread makes runs repeatable.
export OMP_NUM_THREADS      := 1
export OPENBLAS_NUM_THREADS := 1
export MKL_NUM_THREADS      := 1

.PHONY: demo test test-full lint install clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[nvshmem,dev]'
	touch $@

demo: $(READY)
	$(BIN)/megamoe demo --pes 4 --out demo_out

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow and not gpu'

test-full: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not gpu'

clean:
	rm -rf $(VENV) build dist demo_out .pytest_cache .mypy_cache .ruff_cache *.egg-info
