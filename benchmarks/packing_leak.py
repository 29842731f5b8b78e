"""Do packed documents stay apart? The same check on this package and on what others pack with.

    python benchmarks/packing_leak.py                     # printed
    python benchmarks/packing_leak.py --write-doc         # docs/evidence/packing_leak.md
    python benchmarks/packing_leak.py --python trl=build/bench-venv/trl/bin/python

Tiny models in float32 on the CPU, with random weights. Three documents are packed into one sequence
by a contender's own collator. Then the first is replaced by one of the same length. If the others
stayed apart, their logits are what they were. A contender runs in a process of its own, with the
Python given for it, and is left out where its package cannot be imported.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "evidence" / "packing_leak.md"
MODEL_TYPES = ("qwen3", "lfm2", "gpt_oss", "qwen3_next", "qwen3_5_text", "granitemoehybrid")
LENGTHS = (9, 14, 5)
VOCABULARY = 64
LEAK = 1e-3  # of the largest logit; rounding gives 1e-6
PACKAGES = {
    "finetune": ("finetune-lm", "transformers", "torch"),
    "transformers": ("transformers", "torch"),
    "transformers, bounds": ("transformers", "torch"),
    "trl": ("trl", "transformers", "torch"),
    "llamafactory": ("llamafactory", "transformers", "torch"),
}
NAMES = {
    "finetune": "this package",
    "transformers": "transformers: `DataCollatorWithFlattening`",
    "transformers, bounds": "the same with `return_flash_attn_kwargs`, `return_seq_idx`",
    "trl": "TRL: `packing`, `padding_free`",
    "llamafactory": "LLaMA-Factory: `neat_packing`",
}


def make_model(model_type: str, attention: str | None) -> Any:
    """A tiny model with random weights; the same for every contender, whose Python need not have
    anything of this project.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
    }
    layers = {
        "lfm2": ["conv", "full_attention"],
        "qwen3_next": ["linear_attention", "full_attention"],
        "qwen3_5_text": ["linear_attention", "full_attention"],
        "granitemoehybrid": ["mamba", "attention"],
    }
    default = CONFIG_MAPPING[model_type]()
    known = {name: value for name, value in sizes.items() if hasattr(default, name)}
    if model_type in layers:
        known["layer_types"] = layers[model_type]
    config = CONFIG_MAPPING[model_type](**known)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def ours(model_type: str, documents: list[list[int]]) -> tuple[Any, dict[str, Any]]:
    import numpy as np
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from finetune.batching.collate import collate
    from finetune.modeling.attention import can_pack, choose_attention

    config = CONFIG_MAPPING[model_type]()
    assert can_pack(config)
    members = [(np.array(ids, np.int32), np.ones(len(ids), bool), 0) for ids in documents]
    inputs = collate(members, packing=True, pad_token_id=0).model_inputs(torch.device("cpu"))
    return make_model(model_type, choose_attention(config)), {**inputs, "logits_to_keep": 0}


def flattened(documents: list[list[int]], **options: bool) -> dict[str, Any]:
    from transformers import DataCollatorWithFlattening

    return dict(DataCollatorWithFlattening(**options)([{"input_ids": ids} for ids in documents]))


def packed_by_trl(documents: list[list[int]]) -> dict[str, Any]:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return dict(collator([{"input_ids": ids} for ids in documents]))


def packed_by_llama_factory(documents: list[list[int]]) -> dict[str, Any]:
    import torch
    from llamafactory.data.collator import prepare_4d_attention_mask

    numbers = [number for number, ids in enumerate(documents, 1) for _ in ids]
    positions = [place for ids in documents for place in range(len(ids))]
    return {
        "input_ids": torch.tensor([[token for ids in documents for token in ids]]),
        "position_ids": torch.tensor([positions]),
        "attention_mask": prepare_4d_attention_mask(torch.tensor([numbers]), torch.float32),
    }


def check(contender: str, model_type: str) -> str:
    """`apart`, `leaks SHARE`, or what the contender says."""
    import torch

    choose = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, VOCABULARY, (n,), generator=choose).tolist() for n in LENGTHS]
    other = [torch.randint(3, VOCABULARY, LENGTHS[:1], generator=choose).tolist(), *documents[1:]]

    def logits(rows: list[list[int]]) -> Any:
        if contender == "finetune":
            model, inputs = ours(model_type, rows)
        else:
            if contender == "trl":
                inputs = packed_by_trl(rows)
            elif contender == "llamafactory":
                inputs = packed_by_llama_factory(rows)
            else:
                bounds = contender == "transformers, bounds"
                inputs = flattened(rows, return_flash_attn_kwargs=bounds, return_seq_idx=bounds)
            inputs.pop("labels", None)
            attention = "eager" if model_type == "gpt_oss" else "sdpa"
            model = make_model(model_type, attention)
        with torch.no_grad():
            return model(**{**inputs, "use_cache": False}).logits[0]

    try:
        before, after = logits(documents), logits(other)
    except (ValueError, NotImplementedError, RuntimeError) as error:  # a refusal is a result
        return f"refuses: {str(error).splitlines()[0]}"
    share = ((before - after).abs() / before.abs().max()).amax(dim=-1)
    own, leaked = share[: LENGTHS[0]].max().item(), share[LENGTHS[0] :].max().item()
    assert own > LEAK, "the replaced document has the same logits: the check would see nothing"
    return f"leaks {leaked:.0%}" if leaked > LEAK else "apart"


def run_contender(contender: str) -> dict[str, Any]:
    """All model types, in this process."""
    found = {}
    for model_type in MODEL_TYPES:
        try:
            found[model_type] = check(contender, model_type)
        except KeyError:
            found[model_type] = "unknown type"  # of this transformers
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES[contender]]
    return {"versions": ", ".join(versions), "found": found}


def started(contender: str, python: str) -> dict[str, Any] | None:
    """The same in a process of its own; None where its package is missing there."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if contender == "finetune":
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [python, __file__, "--contender", contender],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        print(f"{contender}: left out ({last[0][:200]})", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def page(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# Packed documents: apart or not",
        "",
        "Three documents are packed into one sequence, and the first is replaced. *apart*: the logits",
        "of the others stay as they were; *leaks*: they change, by this share of the largest logit;",
        "*refuses*: an error, see below.",
        f"Tiny models, float32, CPU, {datetime.date.today().isoformat()}.",
        "`python benchmarks/packing_leak.py --write-doc` writes this page.",
        "",
        f"| packed by | {' | '.join(MODEL_TYPES)} |",
        f"|---|{'---|' * len(MODEL_TYPES)}",
    ]
    for contender, result in results.items():
        cells = [result["found"][model_type].split(":")[0] for model_type in MODEL_TYPES]
        lines.append(f"| {NAMES[contender]} | {' | '.join(cells)} |")
    said = {
        cell
        for result in results.values()
        for cell in result["found"].values()
        if cell.startswith("refuses")
    }
    lines += ["", *(f"- {cell}" for cell in sorted(said))] if said else []
    lines += ["", "Versions:", ""]
    lines += [f"- {NAMES[name]}: {result['versions']}" for name, result in results.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contender", choices=PACKAGES, help="in this process, as JSON")
    parser.add_argument("--python", action="append", default=[], metavar="CONTENDER=PATH")
    parser.add_argument("--write-doc", action="store_true")
    asked = parser.parse_args()
    if asked.contender:
        print(json.dumps(run_contender(asked.contender)))
        return 0
    pythons = dict(given.split("=", 1) for given in asked.python)
    results = {}
    for contender in PACKAGES:
        result = started(contender, pythons.get(contender, sys.executable))
        if result is not None:
            results[contender] = result
    text = page(results)
    print(text)
    if asked.write_doc:
        DOCUMENT.write_text(text, encoding="utf-8")
    return 0 if all(cell == "apart" for cell in results["finetune"]["found"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
