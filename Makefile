# Everything a contributor runs. `make help` lists it.
#
# Needed: Python 3.11 or later (with venv), cargo, a C compiler. Everything else comes into .venv and
# target/. Stamps record what was done and from what, so nothing is done twice.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules

# The interpreter that makes .venv.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
STAMPS := $(VENV)/stamps
BIN := $(VENV)/bin
CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR
# PyO3 asks an interpreter for its version: this one, whatever else is on PATH.
export PYO3_PYTHON := $(BIN)/python

# A directory's own time changes when a file in it is removed, so directories count as inputs too.
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml \
	$(shell find crates -path '*/tests' -prune -o \( -type d -o -name '*.rs' -o -name '*.cu' -o -name '*.cuh' -o -name '*.json' -o -name Cargo.toml \) -print)
LOOM_MODELS := $(patsubst crates/fabric/tests/%.rs,--test %,$(wildcard crates/fabric/tests/loom_*.rs))

FABRIC_BENCH := $(CARGO_TARGET_DIR)/release/weft-bench-fabric
SIM_BENCH := $(CARGO_TARGET_DIR)/release/weft-bench-sim
PEERS_VENV ?= $(CURDIR)/.venv-peers

say = @printf '\033[1m== %s\033[0m\n' '$(1)'

.PHONY: help
help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: build ## Train a small MoE classifier and run it over four processes
	$(call say,Running the demonstration)
	@$(BIN)/weft demo

.PHONY: build
build: $(STAMPS)/native ## Make .venv and build the native module into it

.PHONY: test
test: lint test-rust test-loom test-python ## Run the checks that every change must pass

.PHONY: test-rust
test-rust: $(STAMPS)/requirements ## Run the Rust tests
	$(call say,Rust tests)
	@cargo test --locked --workspace --quiet

# A run costs about ten times as much in the MoE suite as in the fabric's, so it gets a tenth of them.
SEEDS ?= 1000000
RECORD := python3 benchmarks/record.py

.PHONY: seeds
seeds: ## Run SEEDS random simulations of both suites, and record the outcome
	$(call say,$(SEEDS) seeds)
	@WEFT_SEEDS=$$(($(SEEDS) * 7 / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-fabric --test sim -- --nocapture random_traffic
	@WEFT_SEEDS=$$(($(SEEDS) / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-fabric --test sim -- --nocapture a_loss_costs
	@WEFT_SEEDS=$$(($(SEEDS) / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-fabric --test sim -- --nocapture a_window_of_rounds
	@WEFT_SEEDS=$$(($(SEEDS) / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-moe --test sim -- --nocapture every_run

.PHONY: loss
loss: build ## Kill a rank 100 times and stop one 50 times on each transport, and record the outcome
	$(call say,Killing and stopping ranks)
	@WEFT_TEST_KILLS=100 WEFT_TEST_STOPS=50 $(RECORD) loss $(BIN)/python -m pytest -q -s tests/test_loss.py

FUZZ_SECONDS ?= 60

.PHONY: fuzz
fuzz: ## Fuzz every parser for FUZZ_SECONDS, and record the outcome (needs cargo-fuzz and nightly)
	$(call say,Fuzzing)
	@$(RECORD) fuzz fuzz/run.sh $(FUZZ_SECONDS)

# $(call nightly-with,COMPONENT): stops unless nightly Rust is there with it.
nightly-with = @rustup component list --toolchain nightly --installed 2>/dev/null | grep '^$(1)' >/dev/null \
	|| { echo 'No nightly Rust with $(1): rustup toolchain install nightly -c miri -c rust-src' >&2; exit 1; }

.PHONY: test-miri
test-miri: ## Interpret what miri can of the Rust tests, and record the outcome (needs nightly)
	$(call nightly-with,miri)
	$(call nightly-with,rust-src)
	$(call say,Miri)
	@$(RECORD) sanitisers crates/sanitise.sh miri

.PHONY: test-tsan
test-tsan: ## Run the Rust tests under ThreadSanitizer, and record the outcome (needs nightly)
	$(call nightly-with,rust-src)
	$(call say,ThreadSanitizer)
	@$(RECORD) sanitisers crates/sanitise.sh tsan

# A target directory of its own: other flags in a shared one would rebuild everything each time.
.PHONY: test-loom
test-loom: ## Check the models of the lock-free parts in every interleaving
	$(call say,Loom models)
	@CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/loom RUSTFLAGS='--cfg loom' CARGO_PROFILE_RELEASE_LTO=off \
		cargo test --locked --release --quiet -p weft-fabric $(or $(LOOM_MODELS),--lib loom)

.PHONY: test-python
test-python: build ## Run the Python tests that need no PyTorch
	$(call say,Python tests)
	@$(BIN)/python -m pytest -q -m 'not torch'

.PHONY: test-torch
test-torch: build $(STAMPS)/torch ## Run the Python tests that need PyTorch
	$(call say,Python tests with PyTorch)
	@$(BIN)/python -m pytest -q -m torch

# Debian's libfabric is 1.17; the wheel has 2.5.1, with its providers as files of their own.
LIBFABRIC := $(CARGO_TARGET_DIR)/libfabric/unpacked/mpich-5.0.2.data/data/lib/mpich

.PHONY: libfabric
libfabric: $(LIBFABRIC) ## Download libfabric 2.5 for test-libfabric

.PHONY: test-libfabric
test-libfabric: $(LIBFABRIC) $(STAMPS)/requirements ## Run the Rust tests of ofi with libfabric 2.5 (x86-64, glibc 2.28)
	$(call say,Rust tests with libfabric 2.5)
	@export WEFT_LIBFABRIC=$(LIBFABRIC)/libfabric.so.1 FI_PROVIDER_PATH=$(LIBFABRIC)/libfabric \
		LD_LIBRARY_PATH=$(LIBFABRIC); \
		cargo test --locked --quiet -p weft-fabric --test ofi && \
		cargo test --locked --quiet -p weft-fabric --test conformance ofi

# Nothing is run, so no cross compiler is needed: only Rust's own libraries for that target.
.PHONY: check-aarch64
check-aarch64: ## Compile for aarch64 (needs the target: rustup target add aarch64-unknown-linux-gnu)
	$(call say,Compiling for aarch64)
	@PYO3_CROSS=1 PYO3_CROSS_PYTHON_VERSION=3.11 cargo check --locked --workspace --quiet \
		--target aarch64-unknown-linux-gnu

.PHONY: lint
lint: $(STAMPS)/requirements ## Check formatting, lints and types
	$(call say,Rust formatting and lints)
	@cargo fmt --all --check
	@cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
	$(call say,Python formatting and types)
	@$(BIN)/ruff format --quiet --check
	@$(BIN)/ruff check --quiet
	@$(BIN)/mypy --no-error-summary

.PHONY: format
format: $(STAMPS)/requirements ## Format the sources
	@cargo fmt --all
	@$(BIN)/ruff format --quiet
	@$(BIN)/ruff check --quiet --fix

.PHONY: bench
bench: bench-transfer bench-moe bench-host bench-planner ## Measure everything that docs/speed.md shows (half an hour)

.PHONY: bench-transfer
bench-transfer: $(FABRIC_BENCH) ## Measure transfers beside bare memory, sockets and other libraries
	$(call say,Transfers)
	@benchmarks/peers/build.sh $(CARGO_TARGET_DIR)/peers
	@$(PYTHON) benchmarks/transfer.py --fabric $(FABRIC_BENCH) \
		--programs $(CARGO_TARGET_DIR)/peers --peers-python $(PEERS_VENV)/bin/python \
		--rounds $(or $(ROUNDS),15)

.PHONY: bench-ofi
bench-ofi: $(FABRIC_BENCH) ## Measure transfers over libfabric beside its bare loop (LIBFABRIC=FILE: another library)
	$(call say,Transfers over libfabric)
	@benchmarks/peers/build.sh $(CARGO_TARGET_DIR)/peers
	@$(PYTHON) benchmarks/transfer.py --fabric $(FABRIC_BENCH) \
		--programs $(CARGO_TARGET_DIR)/peers --peers-python $(PEERS_VENV)/bin/python \
		--paths ofi-tcp,ofi-shm --rounds $(or $(ROUNDS),15) $(if $(LIBFABRIC),--libfabric $(LIBFABRIC)) \
		--sizes 8,64,512,4096,32768,65536,262144,2097152,16777216,67108864

.PHONY: bench-moe
bench-moe: build $(STAMPS)/torch ## Measure MoE dispatch and combine beside gloo (installs PyTorch)
	$(call say,MoE dispatch and combine)
	@$(BIN)/python benchmarks/moe.py

.PHONY: bench-host
bench-host: $(FABRIC_BENCH) ## Measure idle ranks, and more ranks than cores
	$(call say,Ranks of one host)
	@$(PYTHON) benchmarks/host.py --fabric $(FABRIC_BENCH)

.PHONY: bench-threads
bench-threads: $(FABRIC_BENCH) ## Measure threads that share a communicator OVER shm or tcp, and record it
	$(call say,Threads of a rank)
	@$(RECORD) threads $(FABRIC_BENCH) threads --json --path $(or $(OVER),shm)

.PHONY: bench-pairs
bench-pairs: $(FABRIC_BENCH) ## Measure pair groups: forming, many idle ones, a burst of processes
	$(call say,Pair groups)
	@$(RECORD) pairs $(FABRIC_BENCH) pairs --path shm --json
	@$(RECORD) pairs $(FABRIC_BENCH) pairs --path tcp --json

.PHONY: bench-planner
bench-planner: ## Measure the planners of MoE dispatch
	$(call say,Planners)
	@$(PYTHON) benchmarks/planner.py --target $(CARGO_TARGET_DIR)

.PHONY: bench-sim
bench-sim: $(SIM_BENCH) ## Measure the simulator, and compare it with SimGrid if that is installed
	$(call say,The simulator)
	@$(PYTHON) benchmarks/simulator.py --program $(SIM_BENCH) --simgrid $(CARGO_TARGET_DIR)/simgrid \
		--rounds $(or $(ROUNDS),5)

.PHONY: bench-paths
bench-paths: ## Measure how long a route takes, and record it
	$(call say,Routes)
	@$(RECORD) paths cargo run --locked --release --quiet -p weft-topology --example path_speed

# Schedules that were damaged at random; a test run makes a seventh of them, and each in fewer orders.
.PHONY: mutants
mutants: ## Prove and run 100,000 damaged schedules, and record the outcome
	$(call say,Damaged schedules)
	@WEFT_MUTANTS=130000 WEFT_MUTANT_SEEDS=200 $(RECORD) mutants cargo test --locked --release --quiet \
		-p weft-collectives --test mutations -- --nocapture mutations_that

.PHONY: bench-instructions
bench-instructions: $(FABRIC_BENCH) ## Count instructions and compare with those committed (needs valgrind)
	$(call say,Instructions)
	@$(PYTHON) benchmarks/instructions.py --fabric $(FABRIC_BENCH)

.PHONY: bench-soak
bench-soak: $(FABRIC_BENCH) ## Write for DURATION (600 s) OVER shm or tcp, all of it checked, and record it
	$(call say,Soak)
	@$(RECORD) soak $(FABRIC_BENCH) soak --json --seconds $(or $(DURATION),600) --path $(or $(OVER),shm)

.PHONY: bench-peers
bench-peers: ## Install the Python packages of other libraries into .venv-peers
	$(call say,Installing NIXL and Mooncake)
	@$(PYTHON) -m venv $(PEERS_VENV)
	@$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--only-binary :all: --require-hashes -r benchmarks/peers/requirements.txt

.PHONY: bench-eflops
bench-eflops: build ## Simulate the EFLOPS article, and make the tables and pictures of docs/eflops.md
	$(call say,The EFLOPS article)
	@$(BIN)/weft sim eflops --out $(CARGO_TARGET_DIR)/eflops
	@cp $(CARGO_TARGET_DIR)/eflops/eflops.json benchmarks/results
	@cp $(CARGO_TARGET_DIR)/eflops/*.svg docs/images
	@$(BIN)/python benchmarks/eflops_page.py --write

.PHONY: bench-articles
bench-articles: build ## Simulate published MoE and DLRM figures, and make docs/perplexity.md and docs/dlrm.md
	$(call say,MoE on ConnectX-7 and EFA; a recommendation model)
	@$(BIN)/weft sim perplexity --out $(CARGO_TARGET_DIR)/articles
	@$(BIN)/weft sim dlrm --out $(CARGO_TARGET_DIR)/articles
	@cp $(CARGO_TARGET_DIR)/articles/*.json benchmarks/results
	@cp $(CARGO_TARGET_DIR)/articles/*.svg docs/images
	@$(BIN)/python benchmarks/sim_pages.py --write

# On a machine with GPUs: WEFT_PYTHON can import weft and torch, and nothing is built.
.PHONY: gpu-test
gpu-test: ## Run the tests that need a GPU with WEFT_PYTHON (python3)
	$(call say,Tests on GPUs)
	@benchmarks/gpu/run.sh test

.PHONY: gpu-bench
gpu-bench: ## Measure on GPUs with WEFT_PYTHON (python3), in at most BUDGET (1800) seconds
	$(call say,Dispatch and combine on GPUs)
	@benchmarks/gpu/run.sh bench --budget $(or $(BUDGET),1800)

.PHONY: bench-gpu-page
bench-gpu-page: build ## Make the tables and the picture of docs/gpu.md from the result file
	@$(BIN)/python benchmarks/gpu_page.py --write

.PHONY: bench-page
bench-page: ## Make the tables of docs/speed.md from the result files
	@$(PYTHON) benchmarks/table.py --write

.PHONY: requirements
requirements: ## Pin the newest releases that pyproject.toml allows (needs uv)
	$(call say,Pinning requirements)
	@uv pip compile $(PIN) --extra dev --extra demo --extra bench pyproject.toml -o requirements/dev.txt
	@uv pip compile $(PIN) --extra torch --extra layer -c requirements/dev.txt pyproject.toml -o requirements/torch.txt

PIN := --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url

.PHONY: clean
clean: ## Remove everything that was made here
	@rm -rf $(VENV) $(PEERS_VENV) $(CARGO_TARGET_DIR) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -f python/weft/_native*.so
	@find python tests -name __pycache__ -prune -exec rm -rf {} +

# ---- what the targets above stand on

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--only-binary :all: --require-hashes

$(BIN)/python:
	$(call say,Making .venv)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Weft needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ": say `make PYTHON=python3.11`")'
	@$(PYTHON) -m venv $(VENV)

$(STAMPS)/requirements: requirements/dev.txt | $(BIN)/python
	$(call say,Installing the pinned Python packages)
	@$(PIP_INSTALL) -r $<
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: requirements/torch.txt $(STAMPS)/requirements
	$(call say,Installing PyTorch (about 3 GB))
	@$(PIP_INSTALL) -r $<
	@touch $@

$(LIBFABRIC): requirements/libfabric.txt | $(BIN)/python
	$(call say,Downloading libfabric 2.5)
	@rm -rf $(CARGO_TARGET_DIR)/libfabric
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--require-hashes -r $< -d $(CARGO_TARGET_DIR)/libfabric
	@$(BIN)/python -m zipfile -e $(CARGO_TARGET_DIR)/libfabric/*.whl $(CARGO_TARGET_DIR)/libfabric/unpacked
	@touch $@

$(FABRIC_BENCH): $(NATIVE_SOURCES) $(wildcard benchmarks/fabric/Cargo.toml benchmarks/fabric/src/*.rs \
		benchmarks/fabric/src/*/*.rs)
	$(call say,Building the benchmarks)
	@cargo build --locked --release --quiet -p weft-bench-fabric
	@touch $@

$(SIM_BENCH): $(NATIVE_SOURCES) $(wildcard benchmarks/sim/Cargo.toml benchmarks/sim/src/*.rs)
	$(call say,Building the benchmark of the simulator)
	@cargo build --locked --release --quiet -p weft-bench-sim
	@touch $@

$(STAMPS)/native: $(NATIVE_SOURCES) $(STAMPS)/requirements
	$(call say,Building the native module)
	@PIP_QUIET=1 VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop --release --quiet
	@touch $@
