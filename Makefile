# `make demo` and `make test` need Python 3.10+ and make, nothing else: they make a virtual environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

# Some virtual machines advertise AMX and don't allow it: bfloat16 products on the CPU then die with an illegal
# instruction. Without AMX they run everywhere.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: demo test lint format bench clean

demo: .venv/installed-cli
	$(BIN)/python -m muon_fsdp.training.demo $(ARGS)

test: .venv/installed-dev
	$(BIN)/python -m pytest tests --cov=muon_fsdp -n auto --dist worksteal $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-cli
	$(BIN)/python -m muon_fsdp.cli bench $(ARGS)

clean:
	rm -rf .venv demo_output

.venv/installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; run make PYTHON=python3.x" if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing muon_fsdp[$*] into .venv (the first time takes a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	@touch $@
