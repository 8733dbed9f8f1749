# From a clean clone, with nothing but Python and make:
#   make train    two or more ranks train a network on real images
#   make test     lint, types and tests; no GPU needed
#   make gpu-check  on a machine with a GPU: the kernels against the CPU, byte for byte (CUDA=12 or CUDA=13)
# Also: make test-all (with the long tests), make lint, make bench, make clean. ARGS adds arguments (make train ARGS="-n 4"), PYTHON names the interpreter.

PYTHON ?= python3
BIN := .venv/bin
CUDA := 12
# One that crashes ends the run: to wait for what it had to do yet may take for ever.
WORKERS := -n 3 --dist loadfile --max-worker-restart 0

help:
	@sed -n '2,5s/^# *//p' Makefile

train: .venv/base.stamp
	$(BIN)/mgpu train image-classification $(ARGS)

test: lint
	$(BIN)/pytest -m "not slow" $(WORKERS) $(ARGS)

test-all: lint
	$(BIN)/pytest $(WORKERS) $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/mypy

bench: .venv/base.stamp
	$(BIN)/mgpu bench all_reduce -n 2 -b 8 -e 128M -f 4 $(ARGS)

gpu-check:
	@test -e /dev/nvidiactl -o -e /dev/dxg -o "$(findstring --sim,$(ARGS))" || { \
	  echo "gpu-check: there is no GPU here (neither /dev/nvidiactl nor /dev/dxg); nothing was checked"; exit 2; }
	@$(MAKE) --no-print-directory .venv/cuda$(CUDA).stamp
	$(BIN)/python -m bench.gpu_check --json gpu-check.json $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp newer than pyproject.toml: what that asks for is installed.
.venv/dev.stamp: EXTRA = [dev]
.venv/cuda$(CUDA).stamp: EXTRA = [cuda$(CUDA)]
.venv/base.stamp .venv/dev.stamp .venv/cuda$(CUDA).stamp: pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || { \
	    echo "mgpu needs Python 3.10 to 3.13, which $(PYTHON) is not; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv .venv >/dev/null 2>&1 || { \
	    echo "$(PYTHON) cannot make .venv: install its venv module (Debian, Ubuntu: the package python3-venv)" \
	      "or name another Python: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }; }
	@echo "Installing what mgpu$(EXTRA) needs into .venv, once; the log is .venv/pip.log" >&2
	@$(BIN)/python -m pip install --retries 2 --editable '.$(EXTRA)' >.venv/pip.log 2>&1 || { \
	  echo "pip could not install it; is the network there? Say make $(MAKECMDGOALS) again when it is." \
	    "Pip said: $$(grep -m 1 -o 'ERROR:.*' .venv/pip.log)" >&2; exit 1; }
	@touch .venv/base.stamp $@

.PHONY: help train test test-all lint bench gpu-check clean
