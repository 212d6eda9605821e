# Targets for contributors. `make help` lists them. Measurements are in benchmarks/Makefile.
#
# Requirements: Python 3.11 or later (with venv), cargo, a C compiler. All other dependencies are
# installed into .venv and target/. Stamp files record completed steps and their inputs.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules

# Interpreter that creates .venv.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
STAMPS := $(VENV)/stamps
BIN := $(VENV)/bin
CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR
# PyO3 queries this interpreter's version, independently of PATH.
export PYO3_PYTHON := $(BIN)/python

# Directories are inputs too: their modification time changes when a file is removed.
NATIVE_SOURCES := Cargo.toml Cargo.lock rust-toolchain.toml pyproject.toml \
	$(shell find crates -path '*/tests' -prune -o \( -type d -o -name '*.rs' -o -name '*.cu' -o -name '*.cuh' -o -name '*.json' -o -name Cargo.toml \) -print)
LOOM_MODELS := $(patsubst %.rs,--test %,$(notdir $(wildcard crates/fabric/tests/loom_*.rs crates/gpu/tests/loom_*.rs)))

step = @printf '\033[1m== %s\033[0m\n' '$(1)'

# Appends JSON lines of a program to benchmarks/results.
RECORD := python3 benchmarks/record.py

list = @awk -F ':.*\#\# ' '/^[a-z0-9-]+:.*\#\# /{printf "  make %-20s %s\n", $$1, $$2}' $(1)

.PHONY: help
help: ## This list
	$(call list,Makefile)

.PHONY: help-benchmarks
help-benchmarks: ## Benchmarks, ranks that are lost, soaks and random simulations
	$(call list,benchmarks/Makefile)

.PHONY: demo
demo: build ## Small MoE classifier, trained and run over four processes
	$(call step,Running the demonstration)
	@$(BIN)/weft demo

.PHONY: build
build: $(STAMPS)/native ## Create .venv and build the native module into it

.PHONY: wheel
wheel: build $(STAMPS)/torch ## Wheel in dist/, with the backend for the torch of `make test-torch`
	$(call step,Building a wheel)
	@$(BIN)/python -m weft.torch --prebuild
	@$(BIN)/maturin build --release --quiet --out dist

# CHECKED=1: `make check` has just passed, as in .ci/run.
.PHONY: test
test: $(if $(CHECKED),,check) stubs ## All checks required before a commit
	@tools/beside.sh $(STAMPS)/compiled.log '$(MAKE) build-rust-tests test-loom' '$(MAKE) test-python'
	@$(MAKE) test-rust

.PHONY: build-rust-tests
build-rust-tests: $(STAMPS)/requirements ## Rust tests, compiled only
	@cargo test --locked --workspace --quiet --no-run

# Source, page and tool tests: they import no native module, so they run before it is built.
SOURCE_TESTS := tests/sources

.PHONY: check
check: lint-sources ## Lints and quick tests, without the native module; minutes
	$(call step,Tests of sources and tools)
	@$(BIN)/python -m pytest -q --noconftest $(SOURCE_TESTS)

# JUnit records from the last pytest runs, for `make slowest`.
REPORTS := $(CARGO_TARGET_DIR)/reports

.PHONY: slowest
slowest: ## Ten slowest files in the last Python tests
	@python3 tools/slowest.py $(REPORTS)/*.xml

# Most tests wait rather than compute: at least four run at a time.
.PHONY: test-rust
test-rust: export RUST_TEST_THREADS ?= $(shell cores=$$(nproc); echo $$((cores > 4 ? cores : 4)))
test-rust: $(STAMPS)/requirements ## Rust tests
	$(call step,Rust tests)
	@cargo test --locked --workspace --quiet

FUZZ_SECONDS ?= 60

.PHONY: fuzz
fuzz: ## Every parser fuzzed for FUZZ_SECONDS, recorded (needs cargo-fuzz and nightly)
	$(call step,Fuzzing)
	@$(RECORD) fuzz fuzz/run.sh $(FUZZ_SECONDS)

# $(call nightly-with,COMPONENT): fails unless nightly Rust is installed with the component.
nightly-with = @rustup component list --toolchain nightly --installed 2>/dev/null | grep '^$(1)' >/dev/null \
	|| { echo 'No nightly Rust with $(1): rustup toolchain install nightly -c miri -c rust-src' >&2; exit 1; }

.PHONY: test-miri
test-miri: ## Rust tests under miri, recorded (needs nightly)
	$(call nightly-with,miri)
	$(call nightly-with,rust-src)
	$(call step,Miri)
	@$(RECORD) sanitisers crates/sanitise.sh miri

.PHONY: test-tsan
test-tsan: ## Rust tests under ThreadSanitizer, recorded (needs nightly)
	$(call nightly-with,rust-src)
	$(call step,ThreadSanitizer)
	@$(RECORD) sanitisers crates/sanitise.sh tsan

# Separate target directory: other flags in a shared one would rebuild everything each time.
.PHONY: test-loom
test-loom: ## Loom models for the lock-free parts, all interleavings
	$(call step,Loom models)
	@CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/loom RUSTFLAGS='--cfg loom' CARGO_PROFILE_RELEASE_LTO=off \
		cargo test --locked --release --quiet -p weft-fabric -p weft-gpu $(or $(LOOM_MODELS),--lib loom)

.PHONY: test-python
test-python: build ## Python tests without PyTorch
	$(call step,Python tests)
	@$(BIN)/python -m pytest -q -m 'not torch' --junitxml=$(REPORTS)/python.xml

# Tests that compile or compute: at a lower priority, they use the cores while the others wait.
PATIENT := $(addprefix tests/,collectives cuda fused triton)

.PHONY: test-torch
test-torch: build $(STAMPS)/torch ## Python tests with PyTorch, without `make test-long`
	$(call step,Python tests with PyTorch)
	@tools/beside.sh $(STAMPS)/patient.log \
		'$(BIN)/python -m pytest -q -m "torch and not long" -p no:cacheprovider $(PATIENT) --junitxml=$(REPORTS)/torch-patient.xml' \
		'$(BIN)/python -m pytest -q -m "torch and not long" $(PATIENT:%=--ignore=%) --junitxml=$(REPORTS)/torch.xml'

.PHONY: test-long
test-long: build $(STAMPS)/torch ## Python tests with PyTorch that compile or compute for minutes each
	$(call step,Long Python tests with PyTorch)
	@$(BIN)/python -m pytest -q -m long -p no:cacheprovider --junitxml=$(REPORTS)/long.xml

.PHONY: test-torch-suite
test-torch-suite: build $(STAMPS)/torch ## torch's own torch.distributed tests over Weft; four minutes
	$(call step,Tests of PyTorch for any backend)
	@$(BIN)/python -m tests.backend.torch_suite

# Debian's libfabric is 1.17; the wheel has 2.5.1, with its providers in separate files.
LIBFABRIC_FOLDER := $(CARGO_TARGET_DIR)/libfabric/unpacked/mpich-5.0.2.data/data/lib/mpich

.PHONY: libfabric
libfabric: $(LIBFABRIC_FOLDER) ## libfabric 2.5 for test-libfabric, downloaded

.PHONY: test-libfabric
test-libfabric: $(LIBFABRIC_FOLDER) $(STAMPS)/requirements ## Rust ofi tests with libfabric 2.5 (x86-64, glibc 2.28)
	$(call step,Rust tests with libfabric 2.5)
	@export WEFT_LIBFABRIC=$(LIBFABRIC_FOLDER)/libfabric.so.1 FI_PROVIDER_PATH=$(LIBFABRIC_FOLDER)/libfabric \
		LD_LIBRARY_PATH=$(LIBFABRIC_FOLDER); \
		cargo test --locked --quiet -p weft-fabric --test ofi && \
		cargo test --locked --quiet -p weft-fabric --test conformance ofi

.PHONY: loadgen
loadgen: build ## MLPerf's LoadGen as a library, downloaded and compiled into the cache
	$(call step,Building LoadGen)
	@$(BIN)/python -m weft.loadgen

.PHONY: test-loadgen
test-loadgen: build ## LoadGen and weft qdl tests (downloads its sources, needs a C++ compiler)
	$(call step,Tests of LoadGen)
	@WEFT_LOADGEN=$$($(BIN)/python -m weft.loadgen) && export WEFT_LOADGEN && \
		cargo test --locked --quiet -p weft-loadgen
	@TEST_LOADGEN=1 $(BIN)/python -m pytest -q tests/qdl/test_qdl_loadgen.py

# cargo check needs Rust's libraries for the target, and a cross compiler for the C sources of ring.
.PHONY: check-aarch64
check-aarch64: ## Compilation for aarch64 (needs rustup target add aarch64-unknown-linux-gnu, gcc-aarch64-linux-gnu)
	$(call step,Compiling for aarch64)
	@PYO3_CROSS=1 PYO3_CROSS_PYTHON_VERSION=3.11 cargo check --locked --workspace --quiet \
		--target aarch64-unknown-linux-gnu

# Oldest Rust that compiles Weft.
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

.PHONY: check-msrv
check-msrv: $(BIN)/python ## Compilation by the oldest supported Rust, which rustup installs
	$(call step,Compiling with Rust $(MSRV))
	@if cargo +$(MSRV) --version > /dev/null 2>&1 || \
			timeout 180 rustup toolchain install $(MSRV) --profile minimal > /dev/null 2>&1; then \
		CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/msrv cargo +$(MSRV) check --locked --workspace --quiet; \
	else \
		echo '>> skipped make check-msrv: rustup toolchain install $(MSRV) fails here'; \
	fi

.PHONY: deny
deny: ## Licences, sources and advisories of crates, by cargo-deny if it is installed
	$(call step,Crates)
	@if ! command -v cargo-deny > /dev/null; then \
		echo '>> skipped make deny: cargo install --locked cargo-deny (the tests compare licences without it)'; \
		exit 0; \
	fi; \
	cargo deny --locked check bans licenses sources; \
	if timeout 120 cargo deny fetch db > /dev/null 2>&1; then \
		cargo deny --locked check --disable-fetch advisories; \
	else \
		echo '>> skipped advisories: their database cannot be fetched here'; \
	fi

AUDIT_VENV := $(CURDIR)/.venv-audit

.PHONY: audit
audit: ## Known vulnerabilities of the pinned Python packages, by pip-audit in .venv-audit
	$(call step,Pinned Python packages)
	@if $(MAKE) --no-print-directory $(AUDIT_VENV)/stamp; then \
		python3 tools/audit.py $(AUDIT_VENV)/bin/pip-audit requirements/*.txt benchmarks/peers/requirements.txt; \
	else \
		echo '>> skipped make audit: pip-audit cannot be installed here'; \
	fi

.PHONY: lint
lint: lint-sources stubs ## Formatting, lints, types, wording and the stub of the native module

.PHONY: lint-sources
lint-sources: $(STAMPS)/requirements ## Lint parts that need no native module
	$(call step,Rust formatting and lints)
	@cargo fmt --all --check
	@cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
	$(call step,Python formatting and types)
	@$(BIN)/ruff format --quiet --check
	@$(BIN)/ruff check --quiet
	@$(BIN)/mypy --no-error-summary
	$(call step,Wording)
	@$(BIN)/python tools/language.py --check

.PHONY: stubs
stubs: build ## Stub of the native module, compared with the module
	$(call step,Stub of the native module)
	@$(BIN)/python -m mypy.stubtest weft._native --allowlist tools/stubtest.txt --ignore-unused-allowlist

.PHONY: format
format: $(STAMPS)/requirements ## Formatted sources
	@cargo fmt --all
	@$(BIN)/ruff format --quiet
	@$(BIN)/ruff check --quiet --fix

.PHONY: rdma-kernel
rdma-kernel: $(BIN)/python ## rdma-lab guest kernel, compiled into the cache (Debian 12; 8 minutes of processor time, once)
	$(call step,Building the kernel of the guests)
	@$(BIN)/python -m lab.rdma kernel

.PHONY: rdma-lab
rdma-lab: rdma-kernel $(STAMPS)/native ## Tests over rxe devices (Soft-RoCE) between guests
	$(call step,Soft-RoCE between guests)
	@cargo test --locked --quiet -p weft-fabric --test conformance --test ofi --test verbs --test pairs --no-run
	@cargo test --locked --quiet -p weft-gpu --test proxy_ranks --no-run
	@run() { TEST_RDMA_LAB=1 $(BIN)/python -m pytest -q tests/lab/test_rdma_lab.py tests/lab/test_rdma_ofi.py \
			tests/lab/test_rdma_verbs.py 2>&1 | tee $(STAMPS)/rdma-lab.log; }; \
		run || { grep -q fatal_sigsegv $(STAMPS)/rdma-lab.log && \
			echo '>> a guest'"'"'s own kernel crashed (fatal_sigsegv): once more' && run; }

# On a machine with GPUs: WEFT_PYTHON can import weft and torch, without a build.
.PHONY: gpu-test
gpu-test: ## GPU tests with WEFT_PYTHON (python3)
	$(call step,Tests on GPUs)
	@benchmarks/gpu/run.sh test

.PHONY: api
api: ## Public Rust items in docs/api, renewed
	@python3 tools/rust_api.py --write

.PHONY: pages
pages: build ## Generated tables and pictures of docs/ (PAGE=NAME: one page)
	@$(BIN)/python benchmarks/pages.py --write $(PAGE)

.PHONY: requirements
requirements: ## Newest releases as pins that pyproject.toml allows (needs uv)
	$(call step,Pinning requirements)
	@uv pip compile $(PIN) -c requirements/constraints.in \
		--extra dev --extra demo --extra bench pyproject.toml -o requirements/dev.txt
	@uv pip compile $(PIN) --extra torch --extra layer --extra suite \
		-c requirements/constraints.in -c requirements/dev.txt pyproject.toml -o requirements/torch.txt
	@echo pip-audit | uv pip compile $(PIN) - -o requirements/audit.txt
	@sed -i '1i # Generated by `make requirements`.' requirements/dev.txt requirements/torch.txt requirements/audit.txt

PIN := --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url

.PHONY: clean
clean: ## Removes all build products
	@rm -rf $(VENV) $(PEERS_VENV) $(DEEPSPEED_VENV) $(AUDIT_VENV) $(CARGO_TARGET_DIR) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -rf python/weft/_native*.so python/weft/torch/prebuilt
	@find python tests -name __pycache__ -prune -exec rm -rf {} +

include benchmarks/Makefile

# ---- prerequisites of the targets above

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--only-binary :all: --require-hashes

$(BIN)/python:
	$(call step,Making .venv)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) " + sys.version.split()[0] + ": Weft needs Python 3.11 or later; run `make PYTHON=python3.11`")'
	@$(PYTHON) -m venv $(VENV)

$(STAMPS)/requirements: requirements/dev.txt | $(BIN)/python
	$(call step,Installing the pinned Python packages)
	@$(PIP_INSTALL) -r $<
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: requirements/torch.txt $(STAMPS)/requirements
	$(call step,Installing PyTorch (about 3 GB))
	@$(PIP_INSTALL) -r $<
	@touch $@

$(AUDIT_VENV)/stamp: requirements/audit.txt
	@$(PYTHON) -m venv $(AUDIT_VENV)
	@$(AUDIT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: \
		--require-hashes -r $<
	@touch $@

$(LIBFABRIC_FOLDER): requirements/libfabric.txt | $(BIN)/python
	$(call step,Downloading libfabric 2.5)
	@rm -rf $(CARGO_TARGET_DIR)/libfabric
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--require-hashes -r $< -d $(CARGO_TARGET_DIR)/libfabric
	@$(BIN)/python -m zipfile -e $(CARGO_TARGET_DIR)/libfabric/*.whl $(CARGO_TARGET_DIR)/libfabric/unpacked
	@touch $@

$(STAMPS)/native: $(NATIVE_SOURCES) $(STAMPS)/requirements
	$(call step,Building the native module)
	@PIP_QUIET=1 VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop --release --quiet
	@touch $@
