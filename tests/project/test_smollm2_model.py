"""The whole way with a real model, SmolLM2-135M-Instruct: masks, resume, merge, GGUF and server.

The tiny models of the other tests have random weights. This one has its makers' weights, chat
template and tokenizer. It is fetched by its hash as `make smollm2` does, once, to build/smollm2.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import run_helpers
import stand_in_converter
import torch
from deployments import llama_server
from run_helpers import Materials
from safetensors import safe_open
from sample_rows import prompt, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.__main__ import main as finetune
from finetune.data.dataset import prepare_samples
from finetune.data.encoding.templates import load_tokenizer

STEPS, NAME = 5, "Netty, a network assistant"
Turns = list[dict[str, str]]


def talk(*contents: str, system: str | None = None) -> Turns:
    """Question, answer, question, answer, ..., after a system text."""
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


# ---------------------------------------------------------------- what all tests share


@pytest.fixture(scope="module")
def model(smollm2_model: Path) -> Path:
    return smollm2_model


@pytest.fixture(scope="module")
def materials(model: Path, smollm2: ModuleType, tmp_path_factory) -> Materials:
    """Questions to the assistant about itself, which it learns to answer in a few steps."""
    folder, own = tmp_path_factory.mktemp("smollm2"), f"I am {NAME}."
    rows = [smollm2.record(question, own) for question in smollm2.IDENTITY_QUESTIONS]
    held_out = [smollm2.record(question, own) for question in smollm2.HELD_OUT_IDENTITY]
    held_out += [smollm2.record(*pair) for pair in smollm2.HELD_OUT_GENERAL.items()]
    smollm2.write_rows(folder / "train.jsonl", rows)
    smollm2.write_rows(folder / "valid.jsonl", [*held_out, smollm2.record("Who are you?", own)])
    return Materials(folder, model, folder / "train.jsonl", folder / "valid.jsonl")


def settings(materials: Materials, name: str, **changes: Any) -> dict[str, Any]:
    own = {"global_batch_size": 4, "max_steps": STEPS, "learning_rate": 4e-3, "lora_r": 8}
    own |= {"use_curriculum": False, "valid_data": str(materials.valid), "eval_steps": 0}
    return materials.settings(materials.folder / name, **(own | changes))


@pytest.fixture(scope="module")
def adapter(materials: Materials) -> Path:
    """The output of an uninterrupted LoRA run, packed."""
    wanted = settings(materials, "adapter")
    run_helpers.train(wanted)
    return Path(wanted["output_dir"])


@pytest.fixture(scope="module")
def merged(adapter: Path, materials: Materials) -> Path:
    folder = materials.folder / "merged"
    words = ["--adapter", adapter, "--output-dir", folder, "--dtype", "float32"]
    assert finetune(["merge", *map(str, words)]) == 0
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def load_adapted(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load(base), adapter).eval()


# ---------------------------------------------------------------- masks, resume, merge

CONVERSATIONS = [
    talk("What is a router?", "A router forwards packets between networks."),
    talk("Which port?", "TCP port 179.", system="Answer briefly, in plain text."),
    talk("q", "a", "Again?", "Yes:\n\n1. one\n2. two\n", "And the user?", "user\nassistant\n"),
    talk("什么是路由器？", "路由器在网络之间转发数据包。🙂", "Прощай", "До свидания — 42!"),
    talk("Code?", "```python\nfor i in range(3):\n    print(i)\n```", system=""),
]


def encoded(model: Path, conversations: Sequence[Turns], folder: Path) -> list[Any]:
    """Tokens and mask of each conversation, as a run reads them from a file."""
    data = write_rows(folder / "data.jsonl", [{"messages": turns} for turns in conversations])
    where = {"cutoff_len": 2048, "cache_dir": folder / "cache", "num_proc": 1}
    samples = prepare_samples([data], load_tokenizer(str(model)), **where)
    assert len(samples) == len(conversations)
    return [[part.tolist() for part in samples[n]] for n in range(len(samples))]


def test_the_trained_tokens_are_those_that_a_marked_template_generates(
    model: Path, smollm2: ModuleType, tmp_path: Path
) -> None:
    """transformers marks what is inside `{% generation %}`, by the characters of each token."""
    rows = smollm2.read_rows(smollm2.ROOT / "data_samples" / "valid.jsonl")
    conversations = CONVERSATIONS + [talk(prompt(row), row["output"]) for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(model)
    turn = "'<|im_start|>' + message['role'] + '\n'", "message['content'] + '<|im_end|>'"
    whole = f"{{{{{turn[0]} + {turn[1]} + '\n'}}}}"
    assert tokenizer.chat_template.count(whole) == 1
    answer = f"{{{{{turn[0]}}}}}{{% generation %}}{{{{{turn[1]}}}}}{{% endgeneration %}}"
    answer = f"{{% if message['role'] == 'assistant' %}}{answer}{{{{'\n'}}}}"
    either = f"{answer}{{% else %}}{whole}{{% endif %}}"
    marked = tokenizer.chat_template.replace(whole, either)
    found = encoded(model, conversations, tmp_path)
    for turns, (ids, trained) in zip(conversations, found, strict=True):
        wanted = tokenizer.apply_chat_template(
            turns, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == wanted["input_ids"] == tokenizer.apply_chat_template(turns)["input_ids"]
        assert trained == [bool(each) for each in wanted["assistant_masks"]]
        # Before each answer is the prompt that a server would send.
        for number, message in enumerate(turns):
            if message["role"] == "assistant":
                before = tokenizer.apply_chat_template(turns[:number], add_generation_prompt=True)
                start = len(before["input_ids"])
                assert ids[:start] == before["input_ids"]
                assert trained[start - 1 : start + 1] == [False, True]


def test_a_killed_run_continues_to_the_same_bits(adapter: Path, materials: Materials) -> None:
    wanted = settings(materials, "killed", save_steps=2, async_save=False)
    run_helpers.kill_and_resume(wanted, step=4, resumed_at=2)
    output = Path(wanted["output_dir"])
    run_helpers.assert_same_training(output, adapter)
    assert run_helpers.values(output, "grad_norm") == run_helpers.values(adapter, "grad_norm")
    losses = run_helpers.losses(output)
    assert len(losses) == STEPS and losses[-1] < losses[0]


def logits(network: Any, tokenizer: Any) -> torch.Tensor:
    ids = tokenizer.apply_chat_template(
        talk("Who are you?", f"I am {NAME}.", "What is the capital of France?"),
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    with torch.no_grad():
        return network(input_ids=ids, use_cache=False).logits


def assert_tied(folder: Path) -> None:
    """One weight is embedding and head: in the configuration, in the file and in memory."""
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names and not any("lm_head" in name for name in names)
    network = load(folder)
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_the_merged_model_is_the_adapted_one_and_stays_tied(
    model: Path, adapter: Path, merged: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(merged)
    networks = (load(model), load_adapted(model, adapter), load(merged))
    base, adapted, whole = (logits(network, tokenizer) for network in networks)
    assert (adapted - base).norm() > 0.05 * base.norm()  # there is something to merge
    assert (whole - adapted).norm() < 1e-5 * adapted.norm()
    assert_tied(merged)


def test_a_full_step_keeps_the_weight_tied(materials: Materials) -> None:
    run = settings(materials, "full", finetuning="full", max_steps=1, learning_rate=1e-4)
    run_helpers.train(run)
    assert_tied(Path(run["output_dir"]))


# ---------------------------------------------------------------- deployment


@pytest.mark.skipif(
    not (importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("gguf")),
    reason="needs llama.cpp's server (pip install xllamacpp gguf)",
)
def test_llama_cpp_answers_from_the_gguf_as_the_trained_model(
    model: Path, adapter: Path, materials: Materials, tmp_path: Path, capsys
) -> None:
    """And the base's file in its place is found. The file has no second copy of the tied weight."""
    from gguf import GGUFReader

    source = Path(stand_in_converter.__file__).read_text(encoding="utf-8")
    (tmp_path / "convert_hf_to_gguf.py").write_text(source, encoding="utf-8")
    words = ["--adapter", adapter, "--output-dir", tmp_path / "gguf", "--format", "gguf"]
    words += ["--dtype", "float32", "--llama-cpp", tmp_path]
    assert finetune(["merge", *map(str, words)]) == 0
    whole, base = tmp_path / "gguf" / "model.gguf", tmp_path / "base.gguf"
    names = {tensor.name for tensor in GGUFReader(whole).tensors}
    assert "token_embd.weight" in names and "output.weight" not in names
    stand_in_converter.write(model, base, "f32")
    words = ["--model", adapter, "--data", materials.valid, "--device-type", "cpu", "--json"]
    words += ["--prompts", 2, "--max-new-tokens", 12, "--deployed-dtype", "float32"]
    for path, found in ((whole, []), (base, ["adapter_left_out"])):
        capsys.readouterr()
        with llama_server(path) as address:
            finetune(["verify", *map(str, words), "--endpoint", address])
        report = json.loads(capsys.readouterr().out)
        assert [finding["name"] for finding in report["findings"]] == found, report
        assert report["deployment"]["engine"] == "llama.cpp", report
        assert report["shows_adapter"] == (path == whole), report
        assert report["compared"]["token_ids"] == 2, report
        assert report["compared"]["logprobs"] >= 1, report
