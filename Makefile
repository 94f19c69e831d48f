# One verb per job; CI runs the same verbs. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -q
# protoc of an old generator: code from it loads on every protobuf runtime from 5.29 on
PROTOC := $(BIN)/uv run --quiet --no-project --isolated --python $(BIN)/python --with grpcio-tools==1.71.2 python -m grpc_tools.protoc
PROTOS := protos/kvist_epp/wire/pb

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-data-plane test-engine test-all check fmt lint types imports proto check-proto docs models bench-epp bench-index build clean

help:  ## list these verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or newer, or say PYTHON=…"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11: say PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5,<1'
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]'
	@touch $@

setup: $(READY)  ## make .venv with everything in it (the others do this by themselves)

demo: $(READY)  ## real Envoy, the picker and simulated engines under load, beside round robin
	$(BIN)/kvist demo

test: test-unit test-data-plane  ## unit, property and data-plane tests

test-unit: $(READY)
	$(PYTEST) tests --ignore=tests/data_plane --ignore=tests/engine

test-data-plane: $(READY)  ## real Envoy, both transports, both modes
	$(PYTEST) tests/data_plane

test-engine: $(READY)  ## real vLLM on CPU (fetched once into a cache folder, about 5 GB)
	$(PYTEST) -rP tests/engine

test-all: test test-engine  ## every tier that exists

check: fmt-check lint types imports check-proto  ## format, lint, types, import contracts, generated files

.PHONY: fmt-check
fmt-check: $(READY)
	$(BIN)/ruff format --check --quiet .

fmt: $(READY)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/interrogate --quiet tests

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-cache

proto: $(READY)  ## generate the protobuf code again
	$(PROTOC) -Iprotos --python_out=epp --pyi_out=epp $(PROTOS)/*.proto

check-proto: $(READY)
	@rm -rf build/proto && mkdir -p build/proto
	@$(PROTOC) -Iprotos --python_out=build/proto --pyi_out=build/proto $(PROTOS)/*.proto
	@diff -r build/proto/kvist_epp/wire/pb epp/kvist_epp/wire/pb -x __init__.py -x __pycache__ || { echo "generated code is stale: run 'make proto'"; exit 1; }

docs: $(READY)  ## write the generated parts of docs/ again
	$(BIN)/python -m tests.docs

models: $(READY)  ## train the simulator's vocabulary again
	$(BIN)/python -m kvist_sim.model.train sim/kvist_sim/model

bench-epp: $(READY)  ## CPU and latency of the picker behind Envoy (about 10 minutes)
	$(BIN)/kvist bench epp

bench-index: $(READY)  ## the byte index: ingest, removal, match, memory
	$(BIN)/kvist bench index

build: $(READY)  ## sdist and wheel
	$(BIN)/python -m build --installer uv

clean:  ## remove what was made here, the virtual environment too
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
