# `make demo` and `make test` need Python 3.10+ and make, nothing else: they make a virtual environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

# Some virtual machines advertise AMX and don't allow it: bfloat16 products on the CPU then die with an illegal
# instruction. Without AMX they run everywhere.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

# The core of the suite, which `make core` runs on another torch: it needs neither Transformers nor the other integrations.
CORE := $(addprefix tests/test_,$(addsuffix .py,utils optimizer optimizer_groups optimizer_schedulers optimizer_state \
	optimizer_views distributed distributed_checkpoint fsdp fsdp_integration sso normuon sinkhorn muon_optimizer elementwise clipping \
	overlap overlap_ddp packing plan migration readme routing routing_report spectral conformance kernels kernel_steps program \
	training_model training_loop cli_entry \
	cli_doctor errors gradients graph_capture faults_checkpoints faults_models))
TORCH ?= torch

.PHONY: demo test slow coverage core lint format bench docs clean

demo: .venv/installed-cli
	$(BIN)/python -m experiments.demo $(ARGS)

test: .venv/installed-dev
	$(BIN)/python -m pytest tests -n auto --dist worksteal $(ARGS)

# Whole training runs against AdamW, at several learning rates.
slow: .venv/installed-dev
	$(BIN)/python -m pytest tests -m slow -s $(ARGS)

# Apart from `test`, because coverage makes the suite a quarter slower.
coverage: .venv/installed-dev
	$(BIN)/python -m pytest tests --cov=muon_fsdp -n auto --dist worksteal $(ARGS)

# Our kernels run in the interpreter of Triton 3.7. Those of 3.6 (with NumPy 2.4) and of 3.9 refuse them, so whatever Triton
# this torch asks for is replaced, after it has compiled them for all kinds of GPUs.
core:
	$(PYTHON) -m venv --clear .venv-core
	.venv-core/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	.venv-core/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cli]' hypothesis numpy pytest \
		pytest-xdist tensorboard
	.venv-core/bin/python -m tests.compile_kernels
	.venv-core/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt triton
	.venv-core/bin/python -m pytest $(CORE) -n auto --dist worksteal $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-cli
	$(BIN)/python -m muon_fsdp.cli bench $(ARGS)

# The variable silences an advertisement.
docs: export NO_MKDOCS_2_WARNING = 1
docs: .venv/installed-docs
	$(BIN)/python -m mkdocs build --strict $(ARGS)

clean:
	rm -rf .venv .venv-core demo_output site

.venv/installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; run make PYTHON=python3.x" if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing muon_fsdp[$*] into .venv (the first time takes a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@
