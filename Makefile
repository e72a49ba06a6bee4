# Everything here sets up what it needs: only Python >= 3.10 must be there.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-fast test-slow test-all test-oldest test-newest opinfo sweeps faults lint format bench docs gpu clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# The stamp is older than the files that decide what is installed only if one of them changed.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/.installed  ## train a small Llama on two ranks, beside one process
	$(BIN)/weft demo

test: .venv/.installed  ## the tests, 10 to 14 minutes on two cores
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow and not sweep and not gpu'

test-slow: .venv/.installed  ## those of five seconds and more, half an hour; CI runs them too
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'slow and not sweep and not gpu'

test-fast: .venv/.installed  ## some tests of every room, two minutes on two quiet cores
	$(BIN)/python tests/fast.py -q -n 2 --dist loadfile

test-all: .venv/.installed  ## the tests and the long sweeps over random shapes (hours)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not gpu'

# constraints.txt has the versions between; these have environments of their own, in the user's cache.
LANE = PYTHON=$(PYTHON) tools/lane.sh $(1) -m pytest -q -n 2 --dist loadfile -m 'not sweep and not gpu' $(ARGS)

test-oldest:  ## the tests with the oldest torch and Triton that weft works with
	$(call LANE,oldest)

test-newest:  ## the tests with the newest ones that it is tested with
	$(call LANE,newest)

opinfo: .venv/.installed  ## count the ops of torch's database that are right on DTensors
	$(BIN)/python tests/opinfo.py --out out/opinfo.json

lint: .venv/.installed  ## ruff, ruff format, mypy --strict, of tests too that only a GPU runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p weft -p tools
	MYPYPATH=$$(echo tests tests/*/ | tr ' ' :) $(BIN)/mypy --follow-imports silent tests/weft/test_gpu.py tests/dtensor/test_gpu_dtensor.py tests/sim/test_sim_gpu.py

format: .venv/.installed  ## rewrite the sources as ruff formats them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.installed  ## all suites (15 minutes), into bench/results and the README
	$(BIN)/weft bench calibrate
	$(BIN)/weft bench mlp --seconds 6 --out out/bench
	$(BIN)/weft bench ops collectives dispatch redistribute loss layers experts attention scaling model --out out/bench
	cp out/bench/*.json out/bench/*.md bench/results/
	$(BIN)/python -m tools.readme

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# In the path, as signatures are written as ruff formats them. The warning tells of other builders.
docs: .venv/.docs  ## the site, into out/docs; a link that leads nowhere is an error
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A GPU machine's own torch, if it is complete, knows its drivers best, and needs no network.
# Without rich and pytest-benchmark it has no bars and no report: nothing that is needed here.
OWN_TORCH := import torch, triton, numpy; 1 / torch.cuda.is_available()

gpu:  ## proofs and figures on GPUs, in slices: ARGS="--minutes 9 --out DIR", then --resume DIR
	@if $(PYTHON) -c '$(OWN_TORCH)' 2>/dev/null; then $(PYTHON) -m tools.gpu $(ARGS); \
	else $(MAKE) --quiet .venv/.installed && $(BIN)/python -m tools.gpu $(ARGS); fi

sweeps: .venv/.installed  ## docs/sweeps.md: 2,000 interleavings of every kernel (an hour; goes on where it was)
	$(BIN)/python tests/sweeps.py --page docs/sweeps.md

faults: .venv/.installed  ## docs/reliability.md: ranks killed and stopped, disks full, bits flipped, .. (15 minutes)
	$(BIN)/python tests/faults/campaign.py --page docs/reliability.md $(ARGS)

clean:  ## remove what the other targets made
	rm -rf .venv out build dist *.egg-info .mypy_cache .ruff_cache .benchmarks
