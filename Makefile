# Targets for contributors. `make help` lists them.
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
NATIVE_SOURCES := Cargo.toml Cargo.lock pyproject.toml \
	$(shell find crates -path '*/tests' -prune -o \( -type d -o -name '*.rs' -o -name '*.cu' -o -name '*.cuh' -o -name '*.json' -o -name Cargo.toml \) -print)
LOOM_MODELS := $(patsubst crates/fabric/tests/%.rs,--test %,$(wildcard crates/fabric/tests/loom_*.rs))

FABRIC_BENCH := $(CARGO_TARGET_DIR)/release/weft-bench-fabric
SIM_BENCH := $(CARGO_TARGET_DIR)/release/weft-bench-sim
PEERS_VENV ?= $(CURDIR)/.venv-peers
DEEPSPEED_VENV ?= $(CURDIR)/.venv-deepspeed

step = @printf '\033[1m== %s\033[0m\n' '$(1)'

.PHONY: help
help: ## List all targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

.PHONY: test
test: lint test-rust test-loom test-python ## All checks required before a commit

.PHONY: test-rust
test-rust: $(STAMPS)/requirements ## Rust tests
	$(call step,Rust tests)
	@cargo test --locked --workspace --quiet

# The MoE suite gets a tenth of the seeds: a run costs about ten times as much as in the fabric's.
SEEDS ?= 1000000
RECORD := python3 benchmarks/record.py

.PHONY: seeds
seeds: ## SEEDS random simulations of all suites, recorded
	$(call step,$(SEEDS) seeds)
	@WEFT_SEEDS=$$(($(SEEDS) * 5 / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-fabric --test sim -- --nocapture random_traffic
	@WEFT_SEEDS=$$(($(SEEDS) / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-fabric --test sim -- --nocapture a_loss_costs
	@WEFT_SEEDS=$$(($(SEEDS) / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-fabric --test sim -- --nocapture a_window_of_rounds
	@WEFT_SEEDS=$$(($(SEEDS) / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-moe --test sim -- --nocapture every_run
	@WEFT_SEEDS=$$(($(SEEDS) / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-collectives --test sim -- --nocapture every_call
	@WEFT_SEEDS=$$(($(SEEDS) / 10)) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-dispatch --test sim -- --nocapture every_query

.PHONY: seeds-dispatch
seeds-dispatch: ## SEEDS random simulations of query dispatch, recorded
	$(call step,$(SEEDS) seeds of query dispatch)
	@WEFT_SEEDS=$(SEEDS) $(RECORD) seeds cargo test --locked --release --quiet \
		-p weft-dispatch --test sim -- --nocapture every_query

.PHONY: loss
loss: build ## Ranks killed 100 times and stopped 50 times on each transport, recorded
	$(call step,Killing and stopping ranks)
	@WEFT_TEST_KILLS=100 WEFT_TEST_STOPS=50 $(RECORD) loss $(BIN)/python -m pytest -q -s tests/test_loss.py

.PHONY: loss-torch
loss-torch: build $(STAMPS)/torch ## Ranks killed and stopped 20 times in each collective of torch, recorded
	$(call step,Killing and stopping ranks in collectives)
	@WEFT_TEST_TORCH_LOSSES=20 $(RECORD) loss_torch $(BIN)/python -m pytest -q -s tests/test_torch_loss.py

.PHONY: loss-dispatch
loss-dispatch: ## Accelerator nodes and front ends killed and stopped 20 times each under load, recorded
	$(call step,Killing and stopping accelerator nodes and front ends)
	@WEFT_TEST_DISPATCH_LOSSES=20 $(RECORD) loss_dispatch cargo test --locked --quiet \
		-p weft-dispatch --test processes --test faults -- --nocapture under_load

SOAK_SECONDS ?= 600

.PHONY: soak-dispatch
soak-dispatch: ## Query dispatch under load for SOAK_SECONDS with joins and departures, recorded
	$(call step,$(SOAK_SECONDS) s of query dispatch)
	@SOAK_SECONDS=$(SOAK_SECONDS) $(RECORD) soak_dispatch cargo test --locked --quiet \
		-p weft-dispatch --test soak -- --nocapture

FUZZ_SECONDS ?= 60

.PHONY: fuzz
fuzz: ## Fuzzing of every parser for FUZZ_SECONDS, recorded (needs cargo-fuzz and nightly)
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
test-loom: ## Loom models of the lock-free parts, all interleavings
	$(call step,Loom models)
	@CARGO_TARGET_DIR=$(CARGO_TARGET_DIR)/loom RUSTFLAGS='--cfg loom' CARGO_PROFILE_RELEASE_LTO=off \
		cargo test --locked --release --quiet -p weft-fabric $(or $(LOOM_MODELS),--lib loom)

.PHONY: test-python
test-python: build ## Python tests without PyTorch
	$(call step,Python tests)
	@$(BIN)/python -m pytest -q -m 'not torch'

# Tests that compile or compute: at a lower priority, they use the cores while the others wait.
PATIENT := $(patsubst %,tests/test_%.py,bench_device bench_gpu_collectives bench_gpu_fused \
	bench_gpu_fused_models bench_gpu_training collective_kernels fused_compile fused_embedding \
	fused_embedding_kernels fused_gemm_compiled fused_gemv)

.PHONY: test-torch
test-torch: build $(STAMPS)/torch ## Python tests with PyTorch
	$(call step,Python tests with PyTorch)
	@nice -n 5 $(BIN)/python -m pytest -q -m torch -p no:cacheprovider $(PATIENT) > $(STAMPS)/patient.log 2>&1 & \
		patient=$$!; status=0; \
		trap 'kill $$patient 2> /dev/null || :; cat $(STAMPS)/patient.log' EXIT; \
		trap 'exit 143' TERM; \
		$(BIN)/python -m pytest -q -m torch $(PATIENT:%=--ignore=%) || status=$$?; \
		wait $$patient || status=$$?; \
		exit $$status

.PHONY: test-torch-suite
test-torch-suite: build $(STAMPS)/torch ## torch's own tests of torch.distributed over Weft; four minutes
	$(call step,Tests of PyTorch for any backend)
	@$(BIN)/python tests/torch_suite.py

# Debian's libfabric is 1.17; the wheel has 2.5.1, with its providers in separate files.
LIBFABRIC := $(CARGO_TARGET_DIR)/libfabric/unpacked/mpich-5.0.2.data/data/lib/mpich

.PHONY: libfabric
libfabric: $(LIBFABRIC) ## libfabric 2.5 for test-libfabric, downloaded

.PHONY: test-libfabric
test-libfabric: $(LIBFABRIC) $(STAMPS)/requirements ## Rust tests of ofi with libfabric 2.5 (x86-64, glibc 2.28)
	$(call step,Rust tests with libfabric 2.5)
	@export WEFT_LIBFABRIC=$(LIBFABRIC)/libfabric.so.1 FI_PROVIDER_PATH=$(LIBFABRIC)/libfabric \
		LD_LIBRARY_PATH=$(LIBFABRIC); \
		cargo test --locked --quiet -p weft-fabric --test ofi && \
		cargo test --locked --quiet -p weft-fabric --test conformance ofi

.PHONY: loadgen
loadgen: build ## MLPerf's LoadGen as a library, downloaded and compiled into the cache
	$(call step,Building LoadGen)
	@$(BIN)/python -m weft.loadgen

.PHONY: test-loadgen
test-loadgen: build ## Tests of LoadGen and of weft qdl (downloads its sources, needs a C++ compiler)
	$(call step,Tests of LoadGen)
	@WEFT_LOADGEN=$$($(BIN)/python -m weft.loadgen) && export WEFT_LOADGEN && \
		cargo test --locked --quiet -p weft-loadgen
	@TEST_LOADGEN=1 $(BIN)/python -m pytest -q tests/test_qdl_loadgen.py

# cargo check needs Rust's libraries for the target, and a cross compiler for the C sources of ring.
.PHONY: check-aarch64
check-aarch64: ## Compilation for aarch64 (needs rustup target add aarch64-unknown-linux-gnu, gcc-aarch64-linux-gnu)
	$(call step,Compiling for aarch64)
	@PYO3_CROSS=1 PYO3_CROSS_PYTHON_VERSION=3.11 cargo check --locked --workspace --quiet \
		--target aarch64-unknown-linux-gnu

.PHONY: lint
lint: $(STAMPS)/requirements ## Formatting, lints, types and wording
	$(call step,Rust formatting and lints)
	@cargo fmt --all --check
	@cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
	$(call step,Python formatting and types)
	@$(BIN)/ruff format --quiet --check
	@$(BIN)/ruff check --quiet
	@$(BIN)/mypy --no-error-summary
	$(call step,Wording)
	@$(BIN)/python tools/words.py

.PHONY: format
format: $(STAMPS)/requirements ## Formatted sources
	@cargo fmt --all
	@$(BIN)/ruff format --quiet
	@$(BIN)/ruff check --quiet --fix

.PHONY: bench
bench: bench-transfer bench-moe bench-host bench-planner ## All measurements of docs/speed.md (half an hour)

.PHONY: bench-transfer
bench-transfer: $(FABRIC_BENCH) ## Transfers beside bare memory, sockets and other libraries
	$(call step,Transfers)
	@benchmarks/peers/build.sh $(CARGO_TARGET_DIR)/peers
	@$(PYTHON) benchmarks/transfer.py --fabric $(FABRIC_BENCH) \
		--programs $(CARGO_TARGET_DIR)/peers --peers-python $(PEERS_VENV)/bin/python \
		--rounds $(or $(ROUNDS),15)

.PHONY: bench-ofi
bench-ofi: $(FABRIC_BENCH) ## Transfers over libfabric beside its bare loop (LIBFABRIC=FILE: another library)
	$(call step,Transfers over libfabric)
	@benchmarks/peers/build.sh $(CARGO_TARGET_DIR)/peers
	@$(PYTHON) benchmarks/transfer.py --fabric $(FABRIC_BENCH) \
		--programs $(CARGO_TARGET_DIR)/peers --peers-python $(PEERS_VENV)/bin/python \
		--paths ofi-tcp,ofi-shm --rounds $(or $(ROUNDS),15) $(if $(LIBFABRIC),--libfabric $(LIBFABRIC)) \
		--sizes 8,64,512,4096,32768,65536,262144,2097152,16777216,67108864

.PHONY: bench-moe
bench-moe: build $(STAMPS)/torch ## MoE dispatch and combine beside gloo (installs PyTorch)
	$(call step,MoE dispatch and combine)
	@$(BIN)/python benchmarks/moe.py

.PHONY: bench-collectives
bench-collectives: build $(STAMPS)/torch $(FABRIC_BENCH) ## Collectives beside gloo (installs PyTorch) and Open MPI
	$(call step,Collectives)
	@$(BIN)/python benchmarks/collectives.py
	$(call step,Collectives beside Open MPI)
	@benchmarks/peers/build.sh $(CARGO_TARGET_DIR)/peers
	@$(BIN)/python benchmarks/collective_peers.py --fabric $(FABRIC_BENCH) \
		--programs $(CARGO_TARGET_DIR)/peers --rounds $(or $(ROUNDS),7)

.PHONY: bench-deepspeed
bench-deepspeed: build $(STAMPS)/torch ## All-reduce beside DeepSpeed's over shared memory (installs both, compiles it)
	$(call step,All-reduce beside DeepSpeed)
	@$(PYTHON) -m venv $(DEEPSPEED_VENV)
	@printf 'import site; site.addsitedir("%s")\n' \
		"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		> "$$($(DEEPSPEED_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
	@$(DEEPSPEED_VENV)/bin/python -m pip install --quiet --disable-pip-version-check setuptools wheel ninja
	@$(DEEPSPEED_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		deepspeed==0.19.8
	@PATH=$(DEEPSPEED_VENV)/bin:$$PATH $(DEEPSPEED_VENV)/bin/python benchmarks/collectives.py --deepspeed --seconds 3

.PHONY: bench-training
bench-training: build $(STAMPS)/torch ## Training over Weft and over gloo (installs PyTorch)
	$(call step,Training)
	@$(BIN)/python benchmarks/training.py

.PHONY: bench-host
bench-host: $(FABRIC_BENCH) ## Idle ranks, and more ranks than cores
	$(call step,Ranks of one host)
	@$(PYTHON) benchmarks/host.py --fabric $(FABRIC_BENCH)

.PHONY: bench-threads
bench-threads: $(FABRIC_BENCH) ## Threads that share a communicator OVER shm or tcp, recorded
	$(call step,Threads of a rank)
	@$(RECORD) threads $(FABRIC_BENCH) threads --json --path $(or $(OVER),shm)

.PHONY: bench-posting
bench-posting: $(FABRIC_BENCH) ## Posts of the provider verbs to a null device, recorded
	$(call step,Posts to a null device)
	@$(RECORD) posting $(FABRIC_BENCH) posting --json

.PHONY: bench-calls
bench-calls: $(FABRIC_BENCH) ## Collectives of RANKS without PyTorch, OVER shm or tcp, recorded
	$(call step,Calls of collectives)
	@$(RECORD) calls $(FABRIC_BENCH) collectives --json --ranks $(or $(RANKS),2) --path $(or $(OVER),shm)

.PHONY: bench-pairs
bench-pairs: $(FABRIC_BENCH) ## Pairs: formation, many idle ones, a burst of processes
	$(call step,Pair groups)
	@$(RECORD) pairs $(FABRIC_BENCH) pairs --path shm --json
	@$(RECORD) pairs $(FABRIC_BENCH) pairs --path tcp --json

.PHONY: bench-dispatch
bench-dispatch: $(FABRIC_BENCH) ## Query dispatch between two processes beside bare loops, recorded
	$(call step,Query dispatch)
	@$(RECORD) dispatch $(FABRIC_BENCH) dispatch --path shm --json
	@$(RECORD) dispatch $(FABRIC_BENCH) dispatch --path tcp --json
	@benchmarks/certificates.sh $(CARGO_TARGET_DIR)/tls
	@WEFT_TLS_CERT=$(CARGO_TARGET_DIR)/tls/node.pem WEFT_TLS_KEY=$(CARGO_TARGET_DIR)/tls/node.key \
		WEFT_TLS_CA=$(CARGO_TARGET_DIR)/tls/ca.pem \
		$(RECORD) dispatch $(FABRIC_BENCH) dispatch --path tcp --tls --sides weft --json
	@benchmarks/peers/build.sh $(CARGO_TARGET_DIR)/peers
	@$(RECORD) dispatch $(FABRIC_BENCH) dispatch --path ofi-tcp --peers $(CARGO_TARGET_DIR)/peers --json

.PHONY: bench-planner
bench-planner: ## Planners of MoE dispatch
	$(call step,Planners)
	@$(PYTHON) benchmarks/planner.py --target $(CARGO_TARGET_DIR)

.PHONY: bench-sim
bench-sim: $(SIM_BENCH) ## Simulator speed, compared with SimGrid if installed
	$(call step,The simulator)
	@$(PYTHON) benchmarks/simulator.py --program $(SIM_BENCH) --simgrid $(CARGO_TARGET_DIR)/simgrid \
		--rounds $(or $(ROUNDS),5)

.PHONY: bench-paths
bench-paths: ## Time to compute a route, recorded
	$(call step,Routes)
	@$(RECORD) paths cargo run --locked --release --quiet -p weft-topology --example path_speed

# Randomly damaged schedules; a test run covers a seventh of them, each in fewer orders.
.PHONY: mutants
mutants: ## 100,000 damaged schedules, proved and run, recorded
	$(call step,Damaged schedules)
	@WEFT_MUTANTS=130000 WEFT_MUTANT_SEEDS=200 $(RECORD) mutants cargo test --locked --release --quiet \
		-p weft-collectives --test mutations -- --nocapture mutations_that

.PHONY: bench-instructions
bench-instructions: $(FABRIC_BENCH) ## Instruction counts, compared with the committed ones (needs valgrind)
	$(call step,Instructions)
	@$(PYTHON) benchmarks/instructions.py --fabric $(FABRIC_BENCH)

.PHONY: bench-soak
bench-soak: $(FABRIC_BENCH) ## Checked writes for DURATION (600 s) OVER shm or tcp, recorded
	$(call step,Soak)
	@$(RECORD) soak $(FABRIC_BENCH) soak --json --seconds $(or $(DURATION),600) --path $(or $(OVER),shm)

.PHONY: bench-peers
bench-peers: ## Python packages of other libraries, installed into .venv-peers
	$(call step,Installing NIXL and Mooncake)
	@$(PYTHON) -m venv $(PEERS_VENV)
	@$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--only-binary :all: --require-hashes -r benchmarks/peers/requirements.txt

REPRODUCED := $(CARGO_TARGET_DIR)/reproductions

.PHONY: reproductions
reproductions: build ## Simulations of published systems, docs/eflops.md, moe-rdma.md and dlrm.md
	$(call step,EFLOPS; MoE over RDMA; a recommendation model)
	@for name in eflops moe_rdma dlrm; do $(BIN)/python -m reproductions.$$name --out $(REPRODUCED); done
	@cp $(REPRODUCED)/*.json benchmarks/results
	@cp $(REPRODUCED)/*.svg docs/images
	@$(BIN)/python benchmarks/pages.py --write eflops moe-rdma dlrm

.PHONY: bigraph-lab
bigraph-lab: build ## All-reduces on a BiGraph of network namespaces, recorded (root; LAB: options)
	$(call step,A BiGraph of network namespaces)
	@$(BIN)/python -m lab --record benchmarks/results/lab.jsonl $(LAB)

.PHONY: rdma-kernel
rdma-kernel: $(BIN)/python ## Kernel of the guests of rdma-lab, compiled into the cache (Debian 12; 8 minutes of processor time, once)
	$(call step,Building the kernel of the guests)
	@$(BIN)/python -m lab.rdma kernel

.PHONY: rdma-lab
rdma-lab: rdma-kernel $(STAMPS)/native ## Tests over rxe devices (Soft-RoCE) between guests
	$(call step,Soft-RoCE between guests)
	@cargo test --locked --quiet -p weft-fabric --test conformance --test ofi --test verbs --no-run
	@run() { TEST_RDMA_LAB=1 $(BIN)/python -m pytest -q tests/test_rdma_lab.py tests/test_rdma_ofi.py \
			tests/test_rdma_verbs.py 2>&1 | tee $(STAMPS)/rdma-lab.log; }; \
		run || { grep -q fatal_sigsegv $(STAMPS)/rdma-lab.log && \
			echo '>> a guest'"'"'s own kernel crashed (fatal_sigsegv): once more' && run; }

.PHONY: bench-rdma
bench-rdma: rdma-kernel $(FABRIC_BENCH) ## Transfers over rxe beside perftest in PERFTEST (folder), and UCX and libfabric in PATH, recorded
	$(call step,Transfers between guests)
	@$(RECORD) rdma $(BIN)/python -m lab.rdma bench --json --program $(FABRIC_BENCH) --perftest $(PERFTEST) --rounds $(or $(ROUNDS),30)

.PHONY: soak-rdma
soak-rdma: rdma-kernel $(FABRIC_BENCH) ## WRITES (100000) of each of two guests over links that lose frames (DROP=0.001), checked, recorded
	$(call step,Checked writes between guests over links that lose frames)
	@$(RECORD) rdma_soak $(BIN)/python -m lab.rdma soak --json --program $(FABRIC_BENCH) --writes $(or $(WRITES),100000) \
		--drop $(or $(DROP),0.001)

# On a machine with GPUs: WEFT_PYTHON can import weft and torch, without a build.
.PHONY: gpu-test
gpu-test: ## GPU tests with WEFT_PYTHON (python3)
	$(call step,Tests on GPUs)
	@benchmarks/gpu/run.sh test

.PHONY: gpu-bench
gpu-bench: ## All GPU benchmarks with WEFT_PYTHON (python3), in about BUDGET (1800) seconds
	$(call step,Benchmarks on GPUs)
	@benchmarks/gpu/run.sh all --budget $(or $(BUDGET),1800)

.PHONY: pages
pages: build ## Generated tables and pictures of docs/ (PAGE=NAME: one page)
	@$(BIN)/python benchmarks/pages.py --write $(PAGE)

.PHONY: requirements
requirements: ## Pins of the newest releases that pyproject.toml allows (needs uv)
	$(call step,Pinning requirements)
	@uv pip compile $(PIN) -c requirements/constraints.in \
		--extra dev --extra demo --extra bench pyproject.toml -o requirements/dev.txt
	@uv pip compile $(PIN) --extra torch --extra layer --extra suite \
		-c requirements/constraints.in -c requirements/dev.txt pyproject.toml -o requirements/torch.txt
	@sed -i '1i # Generated by `make requirements`.' requirements/dev.txt requirements/torch.txt

PIN := --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url

.PHONY: clean
clean: ## Removal of all build products
	@rm -rf $(VENV) $(PEERS_VENV) $(DEEPSPEED_VENV) $(CARGO_TARGET_DIR) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -rf python/weft/_native*.so python/weft/torch/prebuilt
	@find python tests -name __pycache__ -prune -exec rm -rf {} +

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

$(LIBFABRIC): requirements/libfabric.txt | $(BIN)/python
	$(call step,Downloading libfabric 2.5)
	@rm -rf $(CARGO_TARGET_DIR)/libfabric
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--require-hashes -r $< -d $(CARGO_TARGET_DIR)/libfabric
	@$(BIN)/python -m zipfile -e $(CARGO_TARGET_DIR)/libfabric/*.whl $(CARGO_TARGET_DIR)/libfabric/unpacked
	@touch $@

$(FABRIC_BENCH): $(NATIVE_SOURCES) $(wildcard benchmarks/fabric/Cargo.toml benchmarks/fabric/src/*.rs \
		benchmarks/fabric/src/*/*.rs)
	$(call step,Building the benchmarks)
	@cargo build --locked --release --quiet -p weft-bench-fabric
	@touch $@

$(SIM_BENCH): $(NATIVE_SOURCES) $(wildcard benchmarks/sim/Cargo.toml benchmarks/sim/src/*.rs)
	$(call step,Building the benchmark of the simulator)
	@cargo build --locked --release --quiet -p weft-bench-sim
	@touch $@

$(STAMPS)/native: $(NATIVE_SOURCES) $(STAMPS)/requirements
	$(call step,Building the native module)
	@PIP_QUIET=1 VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop --release --quiet
	@touch $@
