# Two commands matter: `make demo` and `make test`. Both install what is missing into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-core lint fuzz-decoder clean

demo: $(INSTALLED)
	$(BIN)/phalanx demo

test: $(INSTALLED) lint
	$(BIN)/python -m pytest

test-core: $(INSTALLED) lint
	$(BIN)/python -m pytest --ignore=tests/network

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# A million mutated messages; the suite runs a share of them.
fuzz-decoder: $(INSTALLED)
	$(BIN)/python tests/core/fuzz_decoder.py --messages 1000000

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Phalanx needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[network,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
