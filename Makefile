# One verb per job; CI runs the same verbs. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -q
# protoc of an old generator: code from it loads on every protobuf runtime from 5.29 on
PROTOC := $(BIN)/uv run --quiet --no-project --isolated --python $(BIN)/python --with grpcio-tools==1.71.2 python -m grpc_tools.protoc
PROTOS := kvist_epp/extproc/pb kvist_epp/http2/pb kvist_epp/replicas/pb

# Real processes on a busy machine: what failed is run once more, alone. Both runs are shown; a test that needs it is a defect.
again = $(1) || { echo "make: run once more, one by one: the files in which a test failed above"; $(1) -n 0 --failed-files; }

# folders of tests that have verbs of their own
TIERS  := data_plane engine cluster http2 charts images e2e

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-data-plane test-engine test-cluster test-charts test-e2e test-http2 fuzz bench-fuzz test-all check fmt lint prose types imports proto check-proto docs models bench-epp bench-index bench-chaos bench-soak bench-queue bench-handover bench-peers bench-operator golden lock build clean

help:  ## list these verbs
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

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
	$(PYTEST) -n auto --dist worksteal tests $(TIERS:%=--ignore=tests/%)

test-data-plane: $(READY)  ## real Envoy, both transports, both modes
	$(call again,$(PYTEST) -n 4 --dist worksteal tests/data_plane)

test-engine: $(READY)  ## real vLLM on CPU (fetched once into a cache folder, about 5 GB)
	$(call again,$(PYTEST) -rP tests/engine)

test-cluster: $(READY)  ## real control plane, pods as processes (built from Go modules once, about 6 minutes; needs root)
	$(BIN)/python -m tests.cluster.binaries
	$(call again,$(PYTEST) -n 2 --dist loadfile -rP tests/cluster)

test-charts: $(READY)  ## the chart by helm 3 and 4 on a real API server; what the Dockerfiles do, without Docker (needs root)
	$(BIN)/python -m tests.charts.binaries
	$(call again,$(PYTEST) -n 2 --dist loadfile -rP tests/charts tests/images)

test-e2e: $(READY)  ## helm install to uninstall, by a real Envoy Gateway (built from its Go module once, about 11 minutes; needs root)
	$(BIN)/python -m tests.e2e.binaries
	$(call again,$(PYTEST) -rP tests/e2e)

bench-operator: $(READY)  ## 500 pools: how fast they are made, what they cost at rest (about 5 minutes)
	$(BIN)/python -m tests.cluster.binaries
	$(BIN)/python -m tests.cluster.many_pools

test-http2: $(READY)  ## h2spec, grpc-go and grpcio against the HTTP/2 server (Go tools built once, half a minute)
	$(BIN)/python -m tests.http2.binaries
	$(PYTEST) -rP tests/http2

FUZZER := $(VENV)/.fuzzer
$(FUZZER): $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[fuzz]' || { echo "make: cannot install atheris: it has wheels for x86-64 Linux and CPython 3.11 to 3.14"; exit 1; }
	@touch $@

SECONDS ?= 7200
fuzz: $(FUZZER)  ## coverage-guided fuzzing of what gateways send, two minutes
	$(BIN)/python -m tests.fuzz.run --seconds 120

bench-fuzz: $(FUZZER)  ## the same for SECONDS=7200 in all
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS)

test-all: demo test test-http2 fuzz test-cluster test-charts test-e2e test-engine  ## every tier, as CI runs them

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
	$(BIN)/python -m tests.prose

prose: $(READY)  ## list every finding of the lint of prose: documents, docstrings, strings that users read
	$(BIN)/python -m tests.prose --full

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-cache

proto: $(READY)  ## generate the protobuf code again
	$(PROTOC) -Iprotos --python_out=epp --pyi_out=epp $(PROTOS:%=protos/%/*.proto)

check-proto: $(READY)
	@rm -rf build/proto && mkdir -p build/proto
	@$(PROTOC) -Iprotos --python_out=build/proto --pyi_out=build/proto $(PROTOS:%=protos/%/*.proto)
	@for folder in $(PROTOS); do \
	  diff -r build/proto/$$folder epp/$$folder -x __init__.py -x __pycache__ || { echo "generated code is stale: run 'make proto'"; exit 1; }; \
	done

docs: $(READY)  ## write the generated parts of docs/ again
	$(BIN)/python -m tests.docs
	$(BIN)/python -m tests.charts.generate

golden: $(READY)  ## write the expected plans, objects and conditions of the operator's tests again; read the diff
	$(BIN)/python -m tests.operator.golden
	$(BIN)/python -m tests.operator.manifested
	$(BIN)/python -m tests.operator.broken

LOCK := $(BIN)/uv pip compile --quiet pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
lock: $(READY)  ## the images' dependencies, with hashes
	$(LOCK) --extra operator -o docker/operator.lock
	$(LOCK) --extra epp -o docker/picker.lock

models: $(READY)  ## train the simulator's vocabulary again
	$(BIN)/python -m kvist_sim.model.train sim/kvist_sim/model

bench-epp: $(READY)  ## CPU and latency of the picker behind Envoy (about 10 minutes)
	$(BIN)/kvist bench epp

bench-index: $(READY)  ## the byte index: ingest, removal, match, memory
	$(BIN)/kvist bench index

bench-chaos: $(READY)  ## engines, pickers, events, links and certificates fail under load (about 9 minutes)
	$(BIN)/kvist bench chaos

bench-soak: $(READY)  ## memory under load for a long time, and what is left after it (about 21 minutes)
	$(BIN)/kvist bench soak

bench-queue: $(READY)  ## 50,000 requests wait in one picker: memory, fair shares, limits (about 3 minutes)
	$(BIN)/kvist bench queue

bench-handover: $(READY)  ## a rolling update with and without warm hand-over, in virtual time and over sockets (about 40 minutes)
	$(BIN)/kvist bench handover

bench-peers: $(READY)  ## the same traffic through other projects' routers (fetched once, about 10 minutes)
	$(BIN)/kvist bench routers

build: $(READY)  ## sdist and wheel
	$(BIN)/python -m build --installer uv

clean:  ## remove what was made here, the virtual environment too
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
