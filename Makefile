# Two commands do all on a machine with Python >= 3.11, git and make: `make verify` and `make test`. `make help` lists the others.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
CHECKPOINT := out/tiny-qwen3
TORCH_CPU := torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
GPU ?= $(shell if [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; then echo 1; else echo 0; fi)
INSTALLED := $(VENV)/.installed-$(if $(filter 1,$(GPU)),gpu,cpu)

.PHONY: help install verify test lint figures clean

help:
	@echo "make verify    installs into .venv, makes a small Qwen3 checkpoint, climbs the ladder on whatever device there is"
	@echo "make test      runs the tests; those that need a GPU join in where there is one"
	@echo "make install   installs into .venv and does nothing else"
	@echo "make lint      ruff, mypy and the rules of the house"
	@echo "make figures   draws docs/idea.svg and docs/cost.svg again, the second from benchmarks/results"
	@echo "make clean     removes .venv and everything that was built"
	@echo "GPU=0 or GPU=1 overrides the search for a GPU; PYTHON=python3.12 names another interpreter."

install: $(INSTALLED)

verify: $(INSTALLED)
	rm -rf $(CHECKPOINT)
	$(BIN)/weights-tools make-tiny qwen3 $(CHECKPOINT)
	$(BIN)/zoo verify qwen3 --checkpoint $(CHECKPOINT)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -q

lint: $(INSTALLED)
	@status=0; set -x; $(BIN)/ruff check . || status=1; $(BIN)/ruff format --check . || status=1; $(BIN)/mypy || status=1; \
		$(BIN)/zoo lint || status=1; exit $$status

figures: $(INSTALLED)
	$(BIN)/python -m benchmarks.figures

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "no Python >= 3.11 with venv and pip was found (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-gpu: $(BIN)/python pyproject.toml constraints/cuda.txt
	@echo "GPU found: installing torch's CUDA build and the GPU extras (several GB)"
	$(PIP) -c constraints/cuda.txt -e '.[dev,flash-attn,deep-gemm,flashmla]'
	@rm -f $(VENV)/.installed-* && touch $@

# The registry's Linux wheel of torch is a CUDA build of several GB, so the CPU build comes from PyTorch's own index.
# triton's pin is dropped with the CUDA build, which names its own. On macOS (untested) the registry's wheel is a CPU build.
$(VENV)/.installed-cpu: $(BIN)/python pyproject.toml constraints/cpu.txt
	@echo "no GPU found: installing torch's CPU build"
	@cp constraints/cpu.txt $(VENV)/constraints.txt
	@if [ "$$(uname -s)" = Darwin ]; then \
		$(PIP) -c $(VENV)/constraints.txt $(TORCH_CPU); \
	elif $(PIP) --no-deps --retries 0 --timeout 15 --index-url $(CPU_INDEX) $(TORCH_CPU); then :; else \
		echo "$(CPU_INDEX) can't be used: taking the registry's build of torch, which may bring CUDA (several GB)"; \
		grep -v '^triton==' constraints/cpu.txt > $(VENV)/constraints.txt; \
		$(PIP) -c $(VENV)/constraints.txt $(TORCH_CPU); \
	fi
	$(PIP) -c $(VENV)/constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-* && touch $@
