"""Model, conversations and the plan of a part of benchmarks/sft.py, made on this machine from a few
numbers.

    python benchmarks/sft_inputs.py SETTINGS.json

The model has random weights and the tokenizer of `data_samples/tiny-qwen3`, with an embedding as
large as asked for. Conversations are answers of the bundled data put one after another, one to
three turns, log-normal in length. Peers read them in the order in which our run trains on them. The
plan says what must enter each model, step by step: it is made by transformers' own rendering
(`return_assistant_tokens_mask`), not by any of those that are measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "data_samples" / "tiny-qwen3"
SPREAD, SHORTEST_TOKENS = 0.9, 24  # of a conversation's tokens; the spread is of the logarithm
# Without the newline that ChatML has after each turn: LLaMA-Factory trains on it, TRL and this
# package do not. The marks say to transformers (and so to TRL) what is trained; LLaMA-Factory reads
# its own slots off the rendering.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{{-"
    " '<|im_start|>assistant\\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{%"
    " endgeneration %}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content +"
    " '<|im_end|>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{-"
    " '<|im_start|>assistant\\n' }}{%- endif %}"
)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 2,
    },
    "24m": {
        "hidden_size": 384,
        "num_hidden_layers": 7,
        "intermediate_size": 1024,
        "num_attention_heads": 6,
    },
    # Qwen3-8B's published configuration.
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
    },
}
KEY_VALUE_HEADS = {"tiny": 2, "24m": 3, "8b": 8}
HEAD_DIM = {"tiny": 32, "24m": 64, "8b": 128}


def conversation_digest(ids: Sequence[int], targets: Sequence[int]) -> str:
    """One name for a conversation as it enters a model: its tokens, and which of them are
    trained.
    """
    return hashlib.sha256(json.dumps([list(ids), list(targets)]).encode()).hexdigest()[:16]


def make_inputs(folder: Path, settings: dict[str, Any], device: str) -> None:
    """Write `model/`, `data.jsonl`, `ordered/` (for the peers) and `plan.json` below `folder`.

    Args:
        device: where the model's numbers are drawn.
    """
    from finetune.planning.shapes import shape_of_model

    conversations = _write_conversations(folder / "data.jsonl", settings)
    model = write_model(folder / "model", settings, device)
    order = _order_of_our_run(folder, settings)
    if sorted(order) != list(range(len(conversations))):
        raise SystemExit("our run would not train on each conversation once")
    ordered = [conversations[index] for index in order]
    _write_for_peers(folder / "ordered", ordered)
    plan = _plan(folder / "model", ordered, settings)
    mean_tokens = sum(step["tokens"] for step in plan["steps"]) // len(ordered)
    shape = shape_of_model(model)
    plan |= {
        "flops_per_token": 6 * shape.passed + 12 * shape.query_width * mean_tokens,
        "parameters": model.num_parameters(),
    }
    (folder / "plan.json").write_text(json.dumps(plan, indent=1), encoding="utf-8")


def our_settings(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of our run that decide what is trained."""
    return {
        "model": str(folder / "model"),
        "data": str(folder / "data.jsonl"),
        "cache_dir": str(folder / "cache"),
        "finetuning": "lora",
        "lora_r": settings["lora_r"],
        "lora_alpha": 2 * settings["lora_r"],
        "learning_rate": settings["learning_rate"],
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "num_epochs": 1.0,
        "cutoff_len": settings["cutoff_len"],
        "micro_batch_size": settings["batch"],
        "global_batch_size": settings["batch"],
        "save_steps": 0,
        "report_to": "none",
        "preprocessing_num_workers": 1,
    }


def _write_conversations(path: Path, settings: dict[str, Any]) -> list[list[dict[str, str]]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    records = [
        json.loads(line)
        for line in (ROOT / "data_samples" / "train.jsonl").read_text("utf-8").splitlines()
    ]
    choose = random.Random(settings["seed"])
    made = [
        _conversation(choose, records, tokenizer, settings)
        for _ in range(settings["conversations"])
    ]
    with path.open("w", encoding="utf-8") as file:
        for messages in made:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    return made


def _conversation(
    choose: random.Random, records: list[dict[str, Any]], tokenizer: Any, settings: dict[str, Any]
) -> list[dict[str, str]]:
    wanted = int(choose.lognormvariate(math.log(settings["median_tokens"]), SPREAD))
    wanted = min(max(wanted, SHORTEST_TOKENS), settings["cutoff_len"] * 3 // 4)
    turns = choose.choice((1, 1, 1, 2, 3))
    messages = []
    for _ in range(turns):
        record = choose.choice(records)
        answers: list[str] = []
        while len(tokenizer("\n".join(answers)).input_ids) < wanted / turns:
            answers.append(choose.choice(records)["output"])
        # No answer is longer than a quarter of what is cut off at, so that the last cannot go
        # beyond it.
        messages.append({"role": "user", "content": record["instruction"]})
        messages.append({"role": "assistant", "content": "\n".join(answers or [record["output"]])})
    return messages


def write_model(folder: Path, settings: dict[str, Any], device: str) -> Any:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    shape = settings["shape"]
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = settings["cutoff_len"]
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        **SHAPES[shape],
        num_key_value_heads=KEY_VALUE_HEADS[shape],
        head_dim=HEAD_DIM[shape],
        vocab_size=settings["vocabulary"],
        max_position_embeddings=max(4096, settings["cutoff_len"]),
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(settings["seed"])
    with torch.device(device):  # to draw 8 B numbers takes a CPU minutes
        model = Qwen3ForCausalLM(config).to(getattr(torch, settings["weights"]))
    model.save_pretrained(folder)
    return model


def _order_of_our_run(folder: Path, settings: dict[str, Any]) -> list[int]:
    from finetune.config.run_config import RunConfig
    from finetune.training.prepare import prepare_fine_tuning

    given = our_settings(folder, settings) | {
        "output_dir": str(folder / "none"),
        "data": (str(folder / "data.jsonl"),),
    }
    data = prepare_fine_tuning(RunConfig(**given | {"report_to": ("none",)}))
    steps = range(len(data.batches))
    return [int(data.train.record_ids[i]) for step in steps for i in data.batches.indices(step)]


def _write_for_peers(folder: Path, ordered: list[list[dict[str, str]]]) -> None:
    """The same conversations in training order, with the description that LLaMA-Factory wants
    beside them.
    """
    folder.mkdir()
    rows = [{"messages": messages} for messages in ordered]
    (folder / "train.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
    }
    described = {
        "file_name": "train.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }
    (folder / "dataset_info.json").write_text(json.dumps({"bench": described}), encoding="utf-8")


def rendered(
    model: Path, ordered: list[list[dict[str, str]]]
) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of each conversation, and the places of the trained ones, as transformers renders
    them.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for messages in ordered:
        encoded = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        yield (
            encoded["input_ids"],
            [place for place, trained in enumerate(encoded["assistant_masks"]) if trained],
        )


def _plan(
    model: Path, ordered: list[list[dict[str, str]]], settings: dict[str, Any]
) -> dict[str, Any]:
    whole = list(rendered(model, ordered))
    longest = max(len(ids) for ids, _ in whole)
    if longest > settings["cutoff_len"]:
        raise SystemExit(
            f"a conversation of {longest} tokens is longer than {settings['cutoff_len']}"
        )
    size = settings["batch"]
    steps = [whole[start : start + size] for start in range(0, len(whole), size)]
    return {
        "settings": settings,
        "longest": longest,
        "steps": [
            {
                "tokens": sum(len(ids) for ids, _ in step),
                "supervised": sum(len(targets) for _, targets in step),
                "conversations": sorted(conversation_digest(ids, targets) for ids, targets in step),
            }
            for step in steps
        ],
    }


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    make_inputs(Path(settings["folder"]), settings["inputs"], settings["device"])


if __name__ == "__main__":
    main()
