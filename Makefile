# One target per task; CI runs the same targets. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -q
# protoc of an old generator: code from it loads on every protobuf runtime from 5.29 on
PROTOC := $(BIN)/uv run --quiet --no-project --isolated --python $(BIN)/python --with grpcio-tools==1.71.2 python -m grpc_tools.protoc
PROTOS := kvist_epp/extproc/pb kvist_epp/http2/pb kvist_epp/replicas/pb

# Container images often set this. Every process of a test would then compile all that it imports: 20 of a vLLM's 30 seconds.
export PYTHONDONTWRITEBYTECODE :=

# Real processes on a busy machine: files with a failed test run once more, one by one. Both runs are shown and `make reruns` counts the
# files; a test that needs a second run is a defect.
again = $(1) || { echo "make: running again, one by one, the files in which a test failed above"; $(BIN)/python -m tests.reruns $@; $(1) -n 0 --failed-files; }

# folders of tests that have targets of their own
TIERS  := data_plane monitoring engine cluster http2 charts images e2e browser website

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit coverage reruns test-data-plane test-engine test-cluster test-charts test-e2e test-http2 test-browser test-monitoring test-site fuzz bench-fuzz test-all site site-serve check fmt lint prose types imports proto check-proto docs models bench-epp bench-guard bench-index bench-chaos bench-soak bench-queue bench-prewarm bench-handover bench-routers bench-operator bench-alerts bench-disk bench-tiers bench-pd bench-properties golden lock build clean

help:  ## list these targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or newer, or set PYTHON=…"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11: set PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5,<1'
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]'
	@touch $@

setup: $(READY)  ## create .venv with all dependencies (every other target does this if needed)

demo: $(READY)  ## real Envoy, the picker and simulated engines under load, compared with round robin
	$(BIN)/kvist demo

test: test-unit test-data-plane  ## unit, property and data-plane tests

UNIT := tests $(TIERS:%=--ignore=tests/%)
test-unit: $(READY)
	$(PYTEST) -n auto --dist worksteal $(UNIT)

coverage: $(READY)  ## unit tests, with the share of lines and branches that they run
	$(PYTEST) -n auto --dist worksteal --cov --cov-report=term:skip-covered $(UNIT)

reruns: $(READY)  ## how many test files were run again after a failure, and which
	@$(BIN)/python -m tests.reruns

test-data-plane: $(READY)  ## real Envoy, both transports, both modes
	$(call again,$(PYTEST) -n 4 --dist worksteal tests/data_plane)

test-engine: $(READY)  ## real vLLM on CPU (downloaded once into a cache folder, about 7 GB; needs root for a small volume)
	$(call again,$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder --timeout 600 -rP tests/engine)

test-monitoring: $(READY)  ## dashboards and alerts: promtool, and every metric that they name (Prometheus from Debian's package)
	$(BIN)/python -m tests.monitoring.binaries
	$(PYTEST) -n 2 --dist worksteal tests/monitoring

test-cluster: $(READY)  ## real control plane, pods as processes (built from Go modules once, about 6 minutes; needs root)
	$(BIN)/python -m tests.cluster.binaries
	$(BIN)/python -m tests.monitoring.binaries
	$(call again,$(PYTEST) -n 3 --dist loadfile -rP tests/cluster)

test-charts: $(READY)  ## the chart with helm 3 and 4 on a real API server; the steps of the Dockerfiles, without Docker (needs root)
	$(BIN)/python -m tests.charts.binaries
	$(call again,$(PYTEST) -n 2 --dist loadfile -rP tests/charts tests/images)

test-e2e: $(READY)  ## from helm install to uninstall, with a real Envoy Gateway and a real Istio (built from their Go modules once, about 20 minutes; needs root)
	$(BIN)/python -m tests.e2e.binaries
	$(call again,$(PYTEST) -rP tests/e2e)

bench-operator: $(READY)  ## 500 pools: time to create them, load at rest (about 5 minutes)
	$(BIN)/python -m tests.cluster.binaries
	$(BIN)/python -m tests.cluster.many_pools

bench-alerts: $(READY)  ## the runbooks that take longer, on the cluster tier (about 14 minutes)
	$(BIN)/python -m tests.cluster.binaries
	$(BIN)/python -m tests.monitoring.binaries
	$(PYTEST) -n 0 -rP tests/cluster/runbooks_of_*.py

bench-pd: $(READY)  ## 300 requests and faults with prefill and decode on two real engines (about 13 minutes)
	$(BIN)/python -m tests.engine.disaggregation_bench

bench-disk: $(READY)  ## the disk cleaner beside a process that overflows its folder for ten minutes, then a pool with memory, disk and a shared claim in a whole cluster (needs root)
	KVIST_DISK_SECONDS=600 $(PYTEST) -n 0 -rP --timeout 900 tests/epp/sidecars/test_disk_cleaner.py -k ten_minutes
	$(BIN)/python -m tests.cluster.binaries
	KVIST_DISK_SECONDS=600 $(PYTEST) -n 0 -s tests/cluster/test_e2e_disk.py -k shared_claim

bench-tiers: $(READY)  ## 300 mixed requests on host memory and a shared folder, and on LMCache's server, real vLLM: predictions by source; faults of tiers one after another, an engine and a server of LMCache that restart (needs root)
	KVIST_TIER_REQUESTS=300 KVIST_LMCACHE_REQUESTS=300 $(PYTEST) -n 0 -rP tests/engine/tiers -k predictions
	$(BIN)/python -m tests.engine.tiers.tier_faults
	$(BIN)/python -m tests.engine.tiers.lmcache_faults

test-http2: $(READY)  ## h2spec, grpc-go and grpcio against the HTTP/2 server (Go tools built once, half a minute)
	$(BIN)/python -m tests.http2.binaries
	$(PYTEST) -rP tests/http2

BROWSER := $(VENV)/.browser
$(BROWSER): $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[browser]'
	@touch $@

test-browser: $(BROWSER)  ## the live page in a real Chromium (Debian's package; installs it as root), two minutes
	$(BIN)/python -m tests.browser.binaries
	$(call again,$(PYTEST) -rP tests/browser)

SITE := $(VENV)/.site
$(SITE): $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[docs]'
	@touch $@

# NO_MKDOCS_2_WARNING: the theme installs MkDocs 1.6, too, and its advice to move on has been followed
MKDOCS := NO_MKDOCS_2_WARNING=true $(BIN)/python -m properdocs
site: $(SITE)  ## the documents as a site for any static host, in build/site (needs npm once, for the pictures)
	@$(BIN)/python -m tests.website.mermaid >/dev/null
	$(MKDOCS) build --strict --clean -f mkdocs.yml

site-serve: $(SITE)  ## the site on localhost:8000, built again when a page changes
	$(MKDOCS) serve -f mkdocs.yml

test-site: site $(BROWSER)  ## every link, anchor and picture of the site, also in a real Chromium; nothing is loaded from elsewhere
	$(BIN)/python -m tests.browser.binaries
	$(PYTEST) -n 0 tests/website

FUZZER := $(VENV)/.fuzzer
$(FUZZER): $(READY)
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[fuzz]' || { echo "make: cannot install atheris: it has wheels for x86-64 Linux and CPython 3.11 to 3.14"; exit 1; }
	@touch $@

EXAMPLES ?= 2000
bench-properties: $(READY)  ## property tests with EXAMPLES=2000 examples each, where they do not set their number; 100 in CI
	KVIST_EXAMPLES=$(EXAMPLES) $(PYTEST) -n auto --dist worksteal --timeout 3600 -m hypothesis $(UNIT)

SECONDS ?= 7200
fuzz: $(FUZZER)  ## coverage-guided fuzzing of input from gateways, one minute
	$(BIN)/python -m tests.fuzz.run --seconds 60

bench-fuzz: $(FUZZER)  ## coverage-guided fuzzing for SECONDS=7200 in all
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS)

test-all: demo test test-http2 test-browser test-monitoring test-site fuzz test-cluster test-charts test-e2e test-engine  ## every tier of tests, as CI runs them

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

prose: $(READY)  ## list every finding of the prose lint: documents, docstrings, strings that users read
	$(BIN)/python -m tests.prose --full

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-cache

proto: $(READY)  ## regenerate the protobuf code
	$(PROTOC) -Iprotos --python_out=epp --pyi_out=epp $(PROTOS:%=protos/%/*.proto)

check-proto: $(READY)
	@rm -rf build/proto && mkdir -p build/proto
	@$(PROTOC) -Iprotos --python_out=build/proto --pyi_out=build/proto $(PROTOS:%=protos/%/*.proto)
	@for folder in $(PROTOS); do \
	  diff -r build/proto/$$folder epp/$$folder -x __init__.py -x __pycache__ || { echo "generated code is stale: run 'make proto'"; exit 1; }; \
	done

docs: $(READY)  ## regenerate the generated parts of docs/, examples/ and charts/
	$(BIN)/python -m tests.docs
	$(BIN)/python -m tests.reference.generate
	$(BIN)/python -m tests.charts.generate

golden: $(READY)  ## regenerate the expected plans, objects and conditions of the operator's tests; review the diff
	$(BIN)/python -m tests.operator.golden
	$(BIN)/python -m tests.operator.manifested
	$(BIN)/python -m tests.operator.broken
	$(BIN)/python -m tests.operator.sizing_sweep
	$(BIN)/python -m tests.operator.catalogue_page

LOCK := $(BIN)/uv pip compile --quiet pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
lock: $(READY)  ## resolve the images' dependencies, with hashes
	$(LOCK) --extra operator -o docker/operator.lock
	$(LOCK) --extra epp -o docker/picker.lock

models: $(READY)  ## retrain the simulator's vocabulary
	$(BIN)/python -m kvist_sim.model.train sim/kvist_sim/model

bench-epp: $(READY)  ## CPU and latency of the picker behind Envoy (about 10 minutes)
	$(BIN)/kvist bench epp

bench-guard: $(READY)  ## CPU of the picker beside the best revision so far; refuses on a busy machine (about 2 minutes)
	$(BIN)/kvist bench epp --quick --guard

bench-index: $(READY)  ## the byte index: ingest, removal, match, memory
	$(BIN)/kvist bench index

bench-chaos: $(READY)  ## failures of engines, pickers, events, links and certificates under load (about 9 minutes)
	$(BIN)/kvist bench chaos

bench-soak: $(READY)  ## memory during and after a long load (about 21 minutes)
	$(BIN)/kvist bench soak

bench-queue: $(READY)  ## 50,000 requests queued in one picker: memory, fairness, limits (about 3 minutes)
	$(BIN)/kvist bench queue

bench-prewarm: $(READY)  ## a rolling update with and without prewarming, in virtual time and over sockets (about 40 minutes)
	$(BIN)/kvist bench prewarm

bench-handover: bench-prewarm

bench-routers: $(READY)  ## the same traffic through other projects' routers (downloaded once, about 10 minutes)
	$(BIN)/kvist bench routers

build: $(READY)  ## build sdist and wheel
	$(BIN)/python -m build --installer uv

clean:  ## remove all generated files, the virtual environment included
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
