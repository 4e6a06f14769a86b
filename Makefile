# `make serve` and `make test` are all that a new clone needs. PORT, CB_MODEL and PYTHON may be set.

PYTHON ?= python3.11
PORT ?= 3000
BIN := .venv/bin
STAMP := .venv/installed

# BentoML reports usage over the network unless it is told not to.
export BENTOML_DO_NOT_TRACK ?= True

.PHONY: serve model test test-kernels interpret-kernels compile-kernels kernel-budget gpu-check
.PHONY: lint soak build clean
.PHONY: bench bench-serving bench-kernels bench-startup bench-scheduler bench-plan bench-plot
.PHONY: bench-peers bench-transformers bench-client bench-quality

serve: $(STAMP)
ifeq ($(strip $(CB_MODEL)),)
	@$(BIN)/python -m cb_backend.default_model
endif
	@exec $(BIN)/bentoml serve . --port $(PORT)

# The default model in BentoML's model store; quick when it is there.
model: $(STAMP)
	@$(BIN)/python -m cb_backend.default_model

# Everything that needs no GPU. pytest comes last, so that its summary closes the output.
test: lint model test-kernels
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The GPU kernels without a GPU: interpreted, against float64; compiled, against their budgets. Each
# in a process of its own, since TRITON_INTERPRET holds for all of one; both at once.
test-kernels: $(STAMP)
	@$(BIN)/python -c "import triton" || { echo "test-kernels needs triton>=3.6 installed"; exit 1; }
	@$(MAKE) --no-print-directory -j2 --output-sync=target interpret-kernels compile-kernels

interpret-kernels:
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels/triton/interpreted

compile-kernels:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels/triton/compiled

# After a change of kernels or of the launch table: read the difference before you commit it.
kernel-budget: $(STAMP)
	PYTHONPATH=.:kernels $(BIN)/python -m tests.kernels.triton.compiled

# Needs a GPU, and of Python torch, triton, transformers and numpy; installs nothing.
GPU_PYTHON ?= python3
gpu-check:
	PYTHONPATH=.:kernels $(GPU_PYTHON) -m gpu_check $(GPU_CHECK_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A million simulated steps of the engine; a failure prints its seed, shrunk. SEED= starts elsewhere.
SEED ?= 1000
soak: $(STAMP)
	$(BIN)/python -m tests.simulation --seed $(SEED) --seeds 4000

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_engine.py $(BENCH_ARGS)

# Through the public HTTP API, and what that leaves of the engine's own speed.
bench-serving: $(STAMP)
	$(BIN)/python benchmarks/bench_serving.py $(BENCH_ARGS)

# Kernels, one stream and one long prompt, as shares of what the machine can do.
bench-kernels: $(STAMP)
	$(BIN)/python benchmarks/bench_kernels.py
	$(BIN)/python benchmarks/bench_roofline.py $(BENCH_ARGS)

# What int8 weights cost in quality.
bench-quality: $(STAMP)
	$(BIN)/python benchmarks/bench_quality.py

# Seconds to ready, and the runner's memory.
bench-startup: $(STAMP)
	$(BIN)/python benchmarks/bench_startup.py $(BENCH_ARGS)

# Throughput against latency, of all that bench-serving has measured.
bench-plot: $(STAMP)
	$(BIN)/python benchmarks/plot.py $(BENCH_ARGS)

# The scheduler and the engine loop without a model, and how well a plan foretells a run.
bench-scheduler: $(STAMP)
	$(BIN)/python benchmarks/bench_scheduler.py

bench-plan: $(STAMP)
	$(BIN)/python benchmarks/bench_plan.py $(BENCH_ARGS)

# Beside vLLM's CPU build, in turns; the first run installs it (3.5 GB) into .venv-vllm.
bench-peers: $(STAMP)
	$(BIN)/python benchmarks/bench_peer_vllm.py $(BENCH_ARGS)

# Beside transformers' own continuous batching.
bench-transformers: $(STAMP)
	$(BIN)/python benchmarks/bench_peer_transformers.py $(BENCH_ARGS)

# vLLM's load generator against our server, beside ours.
bench-client: $(STAMP)
	$(BIN)/python benchmarks/bench_client_vllm.py $(BENCH_ARGS)

# A Bento in BentoML's store, with the default model pinned to it.
build: model
	$(BIN)/bentoml build

clean:
	rm -rf .venv .venv-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# The stamp is written last: an install that was cut off starts over.
$(STAMP): constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt setuptools
	$(BIN)/pip install -c constraints.txt --no-build-isolation -e '.[default-model,dev,plan]'
	@touch $@
