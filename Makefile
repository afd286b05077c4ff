# Two commands matter: `make demo` and `make test`. Both install what is missing into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-core test-network lint fuzz fuzz-decoder experiments clean

demo: $(INSTALLED)
	$(BIN)/phalanx demo

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n auto

test-core: $(INSTALLED) lint
	$(BIN)/python -m pytest -n auto --ignore=tests/network

# Real processes over libp2p: everything, also what takes long. Some tests need root, for network namespaces.
test-network: $(INSTALLED)
	$(BIN)/python -m pytest -m 'long or not long' tests/network

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The long sweep: three thousand scenarios. The suite runs a selection, and every seed that ever failed.
fuzz: $(INSTALLED)
	$(BIN)/phalanx fuzz --seeds 0:3000 --jobs $$(nproc)

# What the README states about attacks on training, odds, Sybils and honest peers. Hours on two cores.
experiments: $(INSTALLED)
	$(BIN)/python experiments/attacks.py --jobs $$(nproc)
	$(BIN)/python experiments/attacks.py --task pysource --seeds 1 --attacks sign_flip alie --margin 0.02 --relative --jobs $$(nproc)
	$(BIN)/python experiments/conviction.py --runs 1000 --both --jobs $$(nproc)
	$(BIN)/python experiments/conviction.py --runs 200 --share 0.1 --both --jobs $$(nproc)
	$(BIN)/python experiments/sybils.py --runs 200 --jobs $$(nproc)
	$(BIN)/python experiments/honest.py --peer-steps 100000 --jobs $$(nproc)
	$(BIN)/python experiments/honest.py --peer-steps 100000 --tolerant --jobs $$(nproc)

# A million mutated messages; the suite runs a share of them.
fuzz-decoder: $(INSTALLED)
	$(BIN)/python tests/core/fuzz_decoder.py --messages 1000000

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Phalanx needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[network,images,albert,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
