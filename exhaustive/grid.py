"""The equivalence grid: one run, executed in 64 ways, against one of them; runs of other models in
eight each; runs on preferences; and pretraining.

    python exhaustive/grid.py              # all: docs/evidence/equivalence_grid.md (`make grid`)
    python exhaustive/grid.py 4            # four of them, printed only
    python exhaustive/grid.py delta_rule   # those with this word in their name, printed only
    python exhaustive/grid.py --device cuda --jobs 10    # on one device: exhaustive/device_grid.py

Each cell trains the same 20 steps in float32 and is compared with the first of its model, one
process without DeepSpeed on packed rows: the samples of every step must be the same, losses within
1e-5 relative, and each trained tensor within 1e-3 by norm(difference) / norm(update). With dropout,
ways to execute draw differently: samples and rates must be the same.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import preference_rows
import run_helpers as runs
import run_patches
from pretraining_cells import PRETRAINING, pretraining_settings, pretraining_start

TABLE = runs.ROOT / "docs" / "evidence" / "equivalence_grid.md"
STEPS = 20
LOSS_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-3
# dtype -> the same limits; in bfloat16 three times what was seen on a CPU, or more.
LIMITS = {"float32": (LOSS_LIMIT, WEIGHT_LIMIT), "bfloat16": (1e-2, 0.15)}
# What makes all directions of a gradient equally long follows rounding in those that have next to
# nothing, which no loss sees; Muon's iterations are in bfloat16 besides. About five times what was
# seen.
ORTHOGONAL_LIMITS = {"normuon": (LOSS_LIMIT, 0.02), "muon": (LOSS_LIMIT, 0.05)}


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
}
SHORT_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
DELTA_EXPERTS = {
    **DELTA_RULE,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
STATE_SPACE = {
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
}
SINKS = {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}
# What is special about a model -> its model type, what its configuration has beside SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied head": ("llama", {"tie_word_embeddings": False}),
    "windows": ("mistral", {"sliding_window": 5}),
    "latent attention": ("deepseek_v3", {**LATENT, "v_head_dim": 4, "first_k_dense_replace": 2}),
    "softcaps": ("gemma2", {"head_dim": 8, "sliding_window": 7, "final_logit_softcapping": 2.0}),
    "scaled logits": ("cohere", {"logit_scale": 0.5}),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "vision part": ("gemma3", {}),
    "short convolutions": ("lfm2", SHORT_CONVOLUTIONS),
    "value embeddings": ("lfm2_value", SHORT_CONVOLUTIONS),
    "delta rule": ("qwen3_5_text", DELTA_RULE),
    "delta rule with experts": ("qwen3_5_moe_text", DELTA_EXPERTS),
    "state space": ("granitemoehybrid", STATE_SPACE),
    "sinks": ("gpt_oss", SINKS),
}
# At the others' rate, 1e-2, rounding grows a hundredfold in 20 steps of a layer whose state decays.
GENTLE_RATE = 1e-3
GENTLE_MODELS = {"delta rule", "delta rule with experts", "state space"}


def make_model(folder: Path, kind: str, tokenizer_of: Path) -> Path:
    """A model of one of `MODELS`, with random weights and the tokenizer of another."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from finetune.modeling import lfm2_value

    lfm2_value.register()
    model_type, changes = MODELS[kind]
    shutil.copytree(
        tokenizer_of, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {**SIZES, "vocab_size": runs.vocabulary(tokenizer_of), **ends, **changes}
    if kind == "vision part":
        towers = {
            "text_config": sizes | {"head_dim": 8},
            "vision_config": SIZES | {"image_size": 28, "patch_size": 14},
        }
        sizes = {**towers, **ends}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes)).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Cell:
    """One way to execute a run."""

    finetuning: str
    layout: str
    processes: int
    packing: bool
    micro_batch_size: int
    model: str = ""  # one of MODELS; else the Qwen3 of the tests
    dropout: float = 0.0
    fused_lora: bool = True
    dtype: str = "float32"
    fused_layers: str = "off"
    device: str = "cpu"
    mixed: bool = False  # two sources by weight
    quantization: str = "none"
    loss: str = ""  # of preferences; else fine-tuning
    pretraining: str = ""  # one of PRETRAINING; micro-batches are windows then

    @property
    def name(self) -> str:
        packing = "packed" if self.packing else "padded"
        own = "".join(f"-{part}".replace(" ", "_") for part in (self.model, self.dropout) if part)
        own += ("" if self.fused_lora else "-peft") + ("-mixed" if self.mixed else "")
        own += f"-{self.loss}" if self.loss else ""
        own += f"-{self.pretraining}".replace(" ", "_") if self.pretraining else ""
        others = (
            (self.quantization, "none"),
            (self.dtype, "float32"),
            (self.fused_layers, "off"),
            (self.device, "cpu"),
        )
        own += "".join(f"-{value}" for value, usual in others if value != usual)
        return f"{self.finetuning}-{self.layout}-{self.processes}-{packing}-{self.micro_batch_size}{own}"

    @property
    def run(self) -> Cell:
        """The reference: the same run on one process without DeepSpeed; in float32 on the CPU."""
        same = {
            "model": self.model,
            "dropout": self.dropout,
            "dtype": self.dtype,
            "mixed": self.mixed,
        }
        same |= {
            "quantization": self.quantization,
            "loss": self.loss,
            "pretraining": self.pretraining,
        }
        reference = Cell(self.finetuning, "plain", 1, True, 1, **same)
        return reference if self.dtype == "float32" else replace(reference, device=self.device)

    @property
    def limits(self) -> tuple[float, float]:
        """Of losses and of weights."""
        return ORTHOGONAL_LIMITS.get(self.pretraining.rpartition(" ")[2], LIMITS[self.dtype])

    def settings(self, materials: runs.Materials, folder: Path) -> dict[str, Any]:
        if self.pretraining:
            own = {"windows": self.micro_batch_size, "steps": STEPS}
            return pretraining_settings(
                self.pretraining, folder / self.name, materials.folder, **own
            )
        model = materials.folder / self.model if self.model else materials.model
        sources: dict[str, Any] = {}
        if self.model in GENTLE_MODELS:
            sources["learning_rate"] = GENTLE_RATE
        if self.mixed:
            sources = {"data": [str(materials.data), str(materials.valid)], "data_weights": [3, 1]}
        if self.loss:
            # A cache of its own: else the first that trains all weights would ask the model before
            # the run for all.
            pairs, own = (
                preference_data(materials, self.loss),
                {"cache_dir": str(folder / f"{self.name}.cache")},
            )
            sources = {"data": str(pairs), "loss": self.loss, **own}
            # Else the reference point, which is never below 0, would be 0 in every step.
            sources |= {"undesirable_weight": 0.1} if self.loss == "kto" else {}
        return materials.settings(
            folder / self.name,
            model=str(model),
            lora_dropout=self.dropout,
            fused_lora=self.fused_lora,
            quantization=self.quantization,
            fused_layers=self.fused_layers,
            dtype=self.dtype,
            device_type=self.device,
            finetuning=self.finetuning,
            packing=self.packing,
            micro_batch_size=self.micro_batch_size,
            max_steps=STEPS,
            **runs.LAYOUTS[self.layout],
            **sources,
        )


def preference_data(materials: runs.Materials, loss: str) -> Path:
    labels = loss == "kto"
    path = materials.folder / ("labels.jsonl" if labels else "pairs.jsonl")
    return path if path.exists() else preference_rows.make_pairs(path, 60, labels=labels)


@dataclass(frozen=True)
class Outcome:
    """A cell against its reference; `why` is empty where the cell holds."""

    cell: Cell
    loss_difference: float
    weight_difference: float
    why: str


def cells() -> list[Cell]:
    """All, the references first within their kind."""
    ways = itertools.product(("lora", "full"), runs.LAYOUTS, (1, 2), (True, False), (1, 4))
    others = (
        ("plain", 1, False, 4),
        ("plain", 2, True, 4),
        ("zero2", 2, True, 1),
        ("zero3", 2, False, 4),
    )
    of_models = [
        Cell(kind, *way, model) for model in MODELS for kind in ("lora", "full") for way in others
    ]
    special = (
        {"dropout": 0.3},
        {"fused_lora": False},
        {"mixed": True},
        {"quantization": "nf4"},
        {"quantization": "int8"},
    )
    of_adapters = [Cell("lora", *way, **own) for own in special for way in others]
    of_pairs = itertools.product(("lora", "full"), runs.LAYOUTS, (1, 2), (True, False), (4,))
    preferences = [Cell(*way, loss="dpo") for way in of_pairs]
    preferences += [
        Cell("lora", *way, loss=loss) for loss in ("ipo", "orpo", "simpo", "kto") for way in others
    ]
    # One process holding all windows of a step, and two holding one, two and all of theirs.
    pretraining_ways = ((1, 8), (2, 1), (2, 2), (2, 4))
    pretraining = [
        Cell("full", "plain", n, True, m, pretraining=kind)
        for kind in PRETRAINING
        for n, m in pretraining_ways
    ]
    return [Cell(*way) for way in ways] + of_models + of_adapters + preferences + pretraining


def starting_weights(cell: Cell, materials: runs.Materials, folder: Path) -> dict[str, Any]:
    """Trainable weights before the first step, by name; float32."""
    import torch

    from finetune.config.preference_config import PreferenceConfig
    from finetune.config.run_config import RunConfig
    from finetune.modeling.adapter import add_adapter
    from finetune.modeling.pretrained import load_model
    from finetune.training.state import trainable

    if cell.pretraining:
        return pretraining_start(cell.pretraining)
    settings = cell.settings(materials, folder)
    kind = PreferenceConfig if cell.loss else RunConfig
    config = kind(**settings | {"report_to": (settings["report_to"],)})
    model = load_model(config, model_dtype=torch.float32, zero3=False)
    if cell.finetuning == "lora":
        model = add_adapter(model, config, one_dtype=False)
    return {name: parameter.detach().clone() for name, parameter in trainable(model)}


def trained_weights(run: Path, names: list[str]) -> dict[str, Any]:
    """The same after the last step, from its checkpoint, whole or in slices."""
    from finetune.training.state import SavedTensors

    saved = SavedTensors(run / f"checkpoint-{STEPS}", "weights")
    return {name: saved.get(name) for name in names}


class Grid:
    """Runs cells and compares each with the reference of its kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.materials = runs.make_materials(folder / "materials", layers=2)
        self._references: dict[Cell, tuple[Any, ...]] = {}

    def outcome(self, cell: Cell) -> Outcome:
        start, ids, losses, weights = self._reference(cell.run)
        found_ids, found_losses, found_weights = self._execute(cell, list(start))
        if cell.dropout:
            return self._with_dropout(cell, ids == found_ids, losses == found_losses)
        loss = runs.largest_relative_difference(losses, found_losses)
        weight = max(
            float(
                (found_weights[name] - weights[name]).norm()
                / (weights[name] - start[name]).norm().clamp(min=1e-12)
            )
            for name in start
        )
        loss_limit, weight_limit = cell.limits
        wrong = []
        if found_ids != ids:
            wrong.append("other samples")
        if not loss <= loss_limit:
            wrong.append(f"losses differ by {loss:.1e}")
        if not weight <= weight_limit:
            wrong.append(f"weights differ by {weight:.1e}")
        return Outcome(cell, loss, weight, "; ".join(wrong))

    def _with_dropout(self, cell: Cell, same_ids: bool, same_losses: bool) -> Outcome:
        rates = [runs.values(self.folder / way.name, "learning_rate") for way in (cell, cell.run)]
        wrong = [] if same_ids else ["other samples"]
        wrong += [] if rates[0] == rates[1] else ["other rates"]
        wrong += ["nothing was dropped"] if same_losses else []
        return Outcome(cell, 0.0, 0.0, "; ".join(wrong))

    def _reference(self, cell: Cell) -> tuple[Any, ...]:
        if cell not in self._references:
            self.make_model(cell.model)
            start = starting_weights(cell, self.materials, self.folder)
            ids, losses, weights = self._execute(cell, list(start))
            moved = [name for name in start if float((weights[name] - start[name]).norm()) == 0]
            assert not moved, f"the reference did not train {moved}: the grid would compare nothing"
            self._references[cell] = start, ids, losses, weights
        return self._references[cell]

    def make_model(self, kind: str) -> None:
        """Make the model of cells, unless it is there or they take the one of the tests."""
        if kind and not (self.materials.folder / kind).exists():
            make_model(self.materials.folder / kind, kind, self.materials.model)

    def _execute(
        self, cell: Cell, names: list[str]
    ) -> tuple[list[list[int]], list[float], dict[str, Any]]:
        settings = cell.settings(self.materials, self.folder)
        run = Path(settings["output_dir"])
        if not run.exists():
            module = (
                "finetune.dpo"
                if cell.loss
                else "finetune.pretrain"
                if cell.pretraining
                else "finetune.sft"
            )
            runs.train(settings, cell.processes, patch=run_patches.true_float32, module=module)
        return runs.sample_ids(run), runs.losses(run), trained_weights(run, names)


def table(outcomes: list[Outcome], seconds: float) -> str:
    """The committed page."""
    held = sum(not outcome.why for outcome in outcomes)
    lines = [
        "# The equivalence grid",
        "",
        (
            f"Runs of {STEPS} steps in float32 on a CPU, executed in {len(outcomes)} ways. The"
            " reference is one process without DeepSpeed,"
        ),
        (
            "packed, with micro-batch 1. The default model is a Qwen3 with tied embeddings."
            " `make grid` writes this page."
        ),
        "",
        (
            f"**{held} of {len(outcomes)} hold** ({seconds:.0f} s on 2 cores): every step has the"
            " same samples, losses agree within"
        ),
        (
            f"{LOSS_LIMIT:g} relative, and each trained tensor agrees within {WEIGHT_LIMIT:g} by"
            " norm(difference) / norm(update)."
        ),
        "",
        (
            "With dropout, each way of execution draws different masks, so only samples and"
            " learning rates are compared. Pretraining"
        ),
        (
            "uses the learning rates of `--lr-batch-exponent 0.5`. Its weights may differ by"
            f" {ORTHOGONAL_LIMITS['normuon'][1]:g} with NorMuon and"
            f" {ORTHOGONAL_LIMITS['muon'][1]:g} with Muon,"
        ),
        "because these optimizers amplify rounding in directions where a gradient is nearly zero.",
        "",
    ]
    return "\n".join([*lines, *rows(outcomes), ""])


def rows(outcomes: list[Outcome]) -> list[str]:
    """The table: a line per cell."""
    lines = [
        (
            "| model | trained | sharding | processes | microbatches | micro-batch | losses differ"
            " by | weights | |"
        ),
        "|---|---|---|--:|---|--:|--:|--:|---|",
    ]
    for outcome in outcomes:
        cell = outcome.cell
        sharding = {"plain": "none" if cell.processes == 1 else "DDP"}.get(
            cell.layout, cell.layout.replace("_", " + ")
        )
        differences = [
            f"{found:.1e}" for found in (outcome.loss_difference, outcome.weight_difference)
        ]
        special = (
            cell.model,
            f"dropout {cell.dropout}" if cell.dropout else "",
            "" if cell.fused_lora else "peft's own LoRA",
            "two sources, 3 to 1" if cell.mixed else "",
            "" if cell.quantization == "none" else f"base in {cell.quantization}",
            cell.loss,
            f"{cell.pretraining}, from scratch" if cell.pretraining else "",
            "" if cell.dtype == "float32" else cell.dtype,
            "" if cell.fused_layers == "off" else f"layers by {cell.fused_layers}",
        )
        columns = (
            ", ".join(filter(None, special)),
            cell.finetuning,
            sharding,
            cell.processes,
            "windows" if cell.pretraining else "packed" if cell.packing else "padded",
            cell.micro_batch_size,
            *(("", "") if cell.dropout else differences),
            outcome.why or "holds",
        )
        lines.append(f"| {' | '.join(map(str, columns))} |")
    return lines


def main(arguments: list[str]) -> int:
    if "--device" in arguments:
        import device_grid

        return device_grid.main(arguments)
    chosen = cells()
    if arguments and not arguments[0].isdigit():
        chosen = [cell for cell in chosen if arguments[0] in cell.name]
    elif arguments:
        chosen = chosen[5 :: max(1, len(chosen) // int(arguments[0]))]
    began = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        grid = Grid(Path(folder))
        for number, cell in enumerate(chosen, 1):
            outcomes.append(grid.outcome(cell))
            print(f"{number}/{len(chosen)} {cell.name}: {outcomes[-1].why or 'holds'}", flush=True)
    page = table(outcomes, time.monotonic() - began)
    print(page)
    if not arguments:
        TABLE.write_text(page, encoding="utf-8")
    return int(any(outcome.why for outcome in outcomes))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
