"""A model with an adapter that changes what it says, merged, and deployments of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from launching import ROOT
from protocol_server import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.__main__ import main as finetune
from finetune.commands.verify.reference import Reference
from finetune.inference.loading import find_source, load_tokenizer_of

BASE = ROOT / "data_samples" / "tiny-qwen3"
DATA = ROOT / "data_samples" / "valid.jsonl"
TRAINING = ROOT / "data_samples" / "train.jsonl"


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter on the bundled model, trained until it answers otherwise."""
    from peft import LoraConfig, get_peft_model

    gc.freeze()  # what is imported stays: `verify` collects garbage before it loads a model
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-3)
    records = [json.loads(line) for line in TRAINING.read_text(encoding="utf-8").splitlines()]
    for start in range(0, 160, 4):
        turns = []
        for record in records[start : start + 4]:
            asked = f"{record['instruction']}\n{record['input']}".strip()
            answer = {"role": "assistant", "content": record["output"]}
            turns.append([{"role": "user", "content": asked}, answer])
        batch = tokenizer.apply_chat_template(
            turns, return_tensors="pt", padding=True, return_dict=True
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        adapted(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    adapted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make(adapter: Path) -> Callable[[], Reference]:
    """A reference; one for each comparison, which rounds its weights."""
    source, cpu = find_source(str(adapter), None), torch.device("cpu")
    tokenizer = load_tokenizer_of(source, None, trust_remote_code=False)
    return lambda: Reference(source, tokenizer, cpu, "float32", trust_remote_code=False)


@pytest.fixture(scope="session")
def merged(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged") / "merged"
    assert finetune(["merge", "--adapter", str(adapter), "--output-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict]:
    """The report of `verify --json` against a deployment, with its exit `code`."""

    def run(adapter: Path, *flags: object) -> dict:
        words = ["--model", adapter, "--data", DATA, "--prompts", 5, "--max-new-tokens", 24]
        capsys.readouterr()
        code = finetune(["verify", *map(str, [*words, *flags]), "--device-type", "cpu", "--json"])
        return {"code": code, **json.loads(capsys.readouterr().out)}

    return run


@pytest.fixture(scope="session")
def _server(merged: Path) -> Iterator[Server]:
    server = Server(merged)
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def serve(_server: Server) -> Callable[[str], Server]:
    """One server, which goes another way each time."""
    return _server.start


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("http_proxy", raising=False)
        yield
