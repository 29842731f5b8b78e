"""What tests share: a tiny model, tiny data, and the real command."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

WORDS = (
    "router",
    "switch",
    "packet",
    "frame",
    "port",
    "link",
    "route",
    "mask",
    "路由器",
    "数据包",
    "42",
    "->",
    ";",
)
LEVELS = ("explain", "reasoning", "topology")

# Before any test imports a Hugging Face library: nothing is fetched, and warnings about forks are
# not wanted.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tensors here are tiny: threads of one operation would wait for one another, and for the other
# processes of a test.
os.environ["OMP_NUM_THREADS"] = os.environ.get("FINETUNE_TEST_THREADS", "1")
# torch.compile's cache of generated C++ has no key for this variable (torch 2.13): code with AVX-512
# types would be compiled anew for AVX2, and fail.
if "ATEN_CPU_CAPABILITY" in os.environ:
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR",
        str(Path(tempfile.gettempdir(), f"inductor_{os.environ['ATEN_CPU_CAPABILITY']}")),
    )
# Runs sync what they write, and many tests at once would wait for one disk: in memory, where there
# is room.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
gc.disable()  # until everything is collected
# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands
# that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Real launchers, several nodes, whole demos, the pages' commands: what `make test-slow` runs. What
# they start is tested without them too. File -> beginnings of the names of its tests.
SLOW = {
    "test_configs.py": ("test_two_nodes_of_eight",),
    "test_doctor_launched.py": ("test_a_dry_run_for_real",),
    "test_executions.py": ("test_",),
    "test_fake_npu.py": ("test_two_simulated_npus", "test_every_packable_type"),
    "test_launchers.py": ("test_two_nodes_and_one",),
    "test_parent_watchdog.py": ("test_no_worker_trains_on",),
    "test_pretrain.py": ("test_every_way_of_starting",),
    "test_pretrain_demo.py": ("test_",),
    "test_control.py": ("test_sigterm_to_torchrun",),
    "test_smollm2_model.py": ("test_",),
    "test_two_nodes.py": ("test_",),
}


def pytest_configure(config: pytest.Config) -> None:
    """Ordinary tests see no CUDA device, so that they are the same on every machine; those marked
    gpu are asked for.
    """
    asked = (
        "gpu" in config.option.markexpr.replace("not gpu", "")
        or os.environ.get("FINETUNE_TEST_DEVICE") == "cuda"
    )
    # Only where there is a driver: elsewhere nothing need be hidden, and tests look at this
    # variable.
    if not asked and Path("/dev/nvidiactl").exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith(SLOW.get(item.path.name, ())):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """All test modules and libraries are loaded now: collections in tests need not look through
    them again.
    """
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Tokenized data and library caches of this test run, apart from the user's; started commands
    inherit it.
    """
    before = os.environ.get("HF_DATASETS_CACHE")
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets_cache"))
    yield
    if before is None:
        del os.environ["HF_DATASETS_CACHE"]
    else:
        os.environ["HF_DATASETS_CACHE"] = before


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a 2-layer Qwen3 (random weights), a byte-level BPE tokenizer and a ChatML
    template. Read only.
    """
    import torch
    from chat_models import CHATML, SPECIALS, make_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    tokenizer = make_tokenizer(CHATML, SPECIALS["chatml"])
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 7) // 8 * 8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # Larger than usual, so that logits are far from uniform and wrong arithmetic shows.
        initializer_range=0.2,
    )
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    torch.set_rng_state(generator_state)
    return folder


def make_records(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Alpaca rows, the three levels in turn; answers of 3 to 60 words, questions of 3 to 25, some
    with a system.
    """
    choose = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join(choose.choices(WORDS, k=choose.randint(low, high)))

    rows = []
    for number in range(count):
        row = {
            "instruction": text(3, 25),
            "input": "",
            "output": text(3, 60),
            "difficulty": LEVELS[number % 3],
        }
        if number % 7 == 0:
            row["system"] = text(2, 8)
        rows.append(row)
    return rows


@pytest.fixture(scope="session")
def write_rows() -> Callable[[Path, list[dict[str, str]]], Path]:
    """Write rows as JSON Lines; returns the path."""

    def write(path: Path, rows: list[dict[str, str]]) -> Path:
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
        return path

    return write


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory, write_rows) -> Path:
    """train.jsonl: 60 rows, 20 of each level in turn, 30 to 200 tokens long. Read only."""
    return write_rows(tmp_path_factory.mktemp("tiny_data") / "train.jsonl", make_records(60))


@pytest.fixture(scope="session")
def tiny_valid(tmp_path_factory: pytest.TempPathFactory, write_rows) -> Path:
    """valid.jsonl: 9 rows, 3 of each level. Read only."""
    return write_rows(
        tmp_path_factory.mktemp("tiny_valid") / "valid.jsonl", make_records(9, seed=1)
    )


@pytest.fixture
def fresh_environment():
    """An environment as on a fresh machine; whatever a test does to it is undone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME", "TMPDIR", "LANG")
    }
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(kept)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def run_cli():
    """The real command: see `launching.run_cli`."""
    from launching import run_cli

    return run_cli
