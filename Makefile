# `make demo` and `make test` need python3 (3.11 or newer) with venv, make and a package index; root or not.
# Each step leaves a stamp in .venv that carries the digest of what it was made from, so that a second call is instantaneous.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
CACHE := $(or $(FOREBAY_CACHE),$(HOME)/.cache/forebay)

VENV := .venv
BIN := $(VENV)/bin
# What the stamp covers: the lock, the package's own metadata (not the settings of tools, which follow it), and the folder,
# since scripts in a venv name it.
digest = $(shell { cat $(1); sed '/^\[tool.mypy\]/,$$d' pyproject.toml; echo '$(CURDIR)'; } | sha256sum | cut -c1-16)
RUNTIME := $(VENV)/.runtime-$(call digest,requirements.lock)
DEV := $(VENV)/.dev-$(call digest,requirements-dev.lock)
PIP := PIP_CACHE_DIR='$(CACHE)/pip' PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
# Nothing outside the lock is fetched: the build back end is in the lock too.
install = $(PIP) install --quiet --require-hashes -r $(1) && $(PIP) install --quiet --no-deps --no-build-isolation -e .
TYPED := $(wildcard tests perf)
LINTED := $(wildcard src appliance client dpu connectors tests perf)

.PHONY: help venv demo serve test test-long test-spdk lint fuzz soak bench proto lock clean

help: ## print the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'forebay needs python3 3.11 or newer; name one with `make PYTHON=...`' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo 'this python3 makes no virtual environments: apt-get install python3-venv' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(RUNTIME): | $(BIN)/python
	@echo 'installing what forebay needs into $(VENV)'
	@$(call install,requirements.lock)
	@rm -f $(VENV)/.runtime-*
	@touch $@

$(DEV): | $(BIN)/python
	@echo 'installing what forebay and its tests need into $(VENV)'
	@$(call install,requirements-dev.lock)
	@rm -f $(VENV)/.runtime-* $(VENV)/.dev-*
	@touch $(RUNTIME) $@

venv: $(DEV) ## install everything that work on forebay needs
	@:

demo: $(RUNTIME) ## run the main job on a node in a temporary directory (ARGS='--help' shows more)
	@$(BIN)/forebay demo $(ARGS)

serve: $(RUNTIME) ## start a node (ARGS='--data DIR --capacity SIZE')
	@$(BIN)/forebay serve $(ARGS)

test: lint redis compiler torch ## lint, types and tests; says what was not run and why
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

test-long: export FOREBAY_TEST_PROFILE := long
test-long: lint redis compiler torch vllm ## the same with the large profiles
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

test-spdk: export FOREBAY_TEST_TARGET := spdk
test-spdk: $(DEV) ## tests of whole nodes, with SPDK's target (FOREBAY_SPDK_TGT names it)
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/spdk tests/client tests/appliance/control tests/appliance/http \
	    tests/appliance/test_daemon.py tests/cli tests/kill tests/fencing tests/disks tests/pressure tests/e2e $(PYTEST_ARGS)

lint: $(DEV) ## style, formatting and types
	@$(BIN)/ruff check $(LINTED)
	@$(BIN)/ruff format --check $(LINTED)
	@$(BIN)/mypy src $(TYPED)

# The peer that perf compares with. Without it those comparisons are skipped, and say so.
.PHONY: redis
redis:
	@command -v redis-server >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing redis-server, which perf compares with'; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends redis-server; } >/dev/null \
	    || echo 'redis-server could not be installed; comparisons with it will be skipped' >&2; \
	fi

# What tests that break storage and the network under a process are compiled with. Without it they are skipped, and say so.
.PHONY: compiler
compiler:
	@command -v $${CC:-cc} >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing a C compiler, which tests of power loss and failing drives need'; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends gcc libc6-dev; } >/dev/null \
	    || echo 'a C compiler could not be installed; the tests that need one will be skipped' >&2; \
	fi

# What the test of a real computation runs in: an environment of its own in the cache, made once.
.PHONY: torch
torch: $(DEV)
	@FOREBAY_CACHE='$(CACHE)' $(BIN)/python -m tests.envs torch

# What the tests of the connector run in. Without it they are skipped, and say so.
.PHONY: vllm
vllm: $(DEV) ## install vLLM for CPUs (2.4 GB, some minutes), with which `make test` tests the connector too
	@FOREBAY_CACHE='$(CACHE)' $(BIN)/python -m tests.envs vllm

.PHONY: demo-vllm
demo-vllm: vllm ## two vLLM engines, and a node that is killed between them
	@FOREBAY_CACHE='$(CACHE)' $(BIN)/python -m tests.connectors.demo

# Other stores that perf compares with. Without them those comparisons are skipped, and say so.
.PHONY: peers
peers: $(DEV) redis
	@command -v nbdkit >/dev/null && /usr/bin/python3 -c 'import nbd' 2>/dev/null \
	  || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing nbdkit and libnbd, which perf compares with'; \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends nbdkit python3-libnbd; } >/dev/null \
	    || echo 'nbdkit could not be installed; comparisons with it will be skipped' >&2; \
	fi
	@FOREBAY_CACHE='$(CACHE)' $(BIN)/python -m tests.envs mooncake lmcache

SECONDS ?= 60
fuzz: $(DEV) ## fuzz codec, both ends, control calls and files, guided by coverage (SECONDS=60 for all; ARGS='--help' shows more)
	@FOREBAY_CACHE='$(CACHE)' $(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

HOURS ?= 0.25
soak: $(DEV) ## load and random faults on a node, every byte verified (HOURS=0.25; ARGS='--help' shows more)
	@$(BIN)/python -m tests.soak --hours $(HOURS) $(ARGS)

bench: export FOREBAY_CACHE := $(CACHE)
bench: peers ## measure the ratios of docs/design.md §9 (ARGS='--help' shows more)
	@$(BIN)/python -m perf $(ARGS)

proto: $(DEV) ## generate the gRPC code again
	@$(BIN)/python -m grpc_tools.protoc -I src --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=src --grpc_python_out=src --mypy_out=src --mypy_grpc_out=src $(wildcard src/forebay/proto/*.proto)

COMPILE := CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras \
  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links
# What builds the package itself, where it is installed.
BUILD := --build-deps-for=editable

# What vLLM asks for and the tests do not need: 400 MB of it, and builds that do not go with torch's build without CUDA.
NOT_OF_VLLM := torchaudio torchcodec torchvision triton

# Torch's build without CUDA is not on PyPI: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu where it is not at hand.
# With the oldest Python, so that every version chosen serves the newer ones too. The development lock comes first:
# the code generator limits protobuf.
lock: $(DEV) ## choose the newest versions again
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo 'make lock needs Python 3.11' >&2; exit 1; }
	@$(COMPILE) $(BUILD) --extra dev -o requirements-dev.lock pyproject.toml
	@$(COMPILE) $(BUILD) -c requirements-dev.lock -o requirements.lock pyproject.toml
	@$(COMPILE) --no-emit-options -c requirements.lock -o requirements-torch.lock pyproject.toml tests/e2e/requirements.in
	@$(COMPILE) --no-emit-options --no-allow-unsafe $(addprefix --unsafe-package ,$(NOT_OF_VLLM)) -o requirements-vllm.lock \
	  pyproject.toml tests/connectors/requirements.in
	@$(COMPILE) --no-emit-options -o requirements-mooncake.lock perf/requirements-mooncake.in
	@$(COMPILE) --no-emit-options -c requirements.lock -o requirements-fuzz.lock pyproject.toml tests/fuzz/requirements.in

clean: ## remove what can be made again
	@rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find $(LINTED) -name __pycache__ -prune -exec rm -rf {} +
