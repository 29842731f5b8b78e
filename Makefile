# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Needs Python >= 3.10, make and a C++ compiler (DeepSpeed builds its CPU Adam at first use).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo pretrain-demo test check translations grid crash faults clean-venv

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed; this is %d.%d" % sys.version_info[:2] or 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[deepspeed,dev]'
	-DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions $(BIN)/python -c \
	  'from finetune.training.operators import load_shared_memory_operator as load; load()' >/dev/null 2>&1 # a minute, once
	touch $(READY)

# Some environments forbid compiled modules: the processes that a run or a test starts would each compile anew.
unexport PYTHONDONTWRITEBYTECODE

demo: $(READY)
	$(BIN)/python launchers/demo.py

# From CPython's own sources to a small model that chats: prepare, pretrain, fine-tune. A few minutes.
pretrain-demo: $(READY)
	$(BIN)/python launchers/pretrain_demo.py

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests

# Formatting, linting, types of the core, the order of imports, and the public surfaces.
CHECKED := finetune tests data_samples launchers benchmarks docs
TYPED   := $(addprefix finetune/,runtime config storage batching data modeling planning training)
check: $(READY)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy $(TYPED)
	$(BIN)/python -m pytest -n 2 -m frozen tests

# The Chinese catalogue brought up to date, and what it lacks listed.
translations: $(READY)
	$(BIN)/python tests/translations.py

# Exhaustive runs; their tables are committed in docs/.
grid: $(READY)
	$(BIN)/python tests/grid.py

crash: $(READY)
	$(BIN)/python tests/crash.py

# Faults put into the core on purpose: each must be caught by a test.
faults: $(READY)
	$(BIN)/python tests/faults.py

clean-venv:
	rm -rf $(VENV)
