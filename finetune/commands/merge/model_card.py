"""The model card of a merged model: what it was made from, how, and what it scored. Nothing of this
machine is in it.

Only the settings named here are written, and of paths only the last part: so no key of a tracker
and no folder of a user can get into a file that will be published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune.config.paths import split_revision
from finetune.inference.loading import Origin, Source, find_run
from finetune.storage import durable_files
from finetune.version import __version__

SETTINGS = (
    *("finetuning", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "quantization"),
    *("total_steps", "global_batch_size", "cutoff_len", "seed"),
    *("learning_rate", "warmup_steps", "lr_scheduler", "weight_decay", "max_grad_norm"),
    *(
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "dtype",
        "use_curriculum",
        "curriculum_seed",
        "difficulty_field",
    ),
)
LIBRARIES = ("torch", "transformers", "peft", "tokenizers", "safetensors")
USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
question = [{"role": "user", "content": "What does a router do?"}]
inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```
"""
USE_OWN_CODE = USE.replace(
    "CausalLM.from_pretrained(folder)",
    "CausalLM.from_pretrained(folder, trust_remote_code=True)  # the class is in it",
)
USE_GGUF = """## Use

```bash
llama-server -m model.gguf --jinja         # llama.cpp: takes the chat template that is in the file
ollama create my-model -f Modelfile        # Ollama, where the folder has a Modelfile
```
"""
GGUF_TEST = (
    "llama.cpp's own converter made `model.gguf` of these files. Loaded again by transformers, its"
    " logits differ by {:.1e} of their norm; its tokens, sizes, end of an answer and chat template"
    " are the same.\n"
)


def write_card(folder: Path, source: Source, **facts: Any) -> None:
    """Write README.md beside a merged model; the facts are `model_card`'s."""
    config = folder / "config.json"
    own_code = config.exists() and "auto_map" in json.loads(config.read_text(encoding="utf-8"))
    durable_files.replace_file(
        folder / "README.md", model_card(source, own_code=own_code, **facts).encode()
    )


def model_card(
    source: Source,
    *,
    name: str,
    dtype: str,
    self_test: Mapping[str, Any],
    own_code: bool = False,
    gguf_difference: float | None = None,
) -> str:
    """The card as Markdown with the hub's front matter.

    Args:
        own_code: the model's class is in its folder.
        gguf_difference: of a model in one GGUF file, by how much of their norm its logits differ
            from the merged ones.
    """
    assert source.adapter is not None
    run = find_run(source.adapter)
    base, kind = _short(source.base), "transformers" if gguf_difference is None else "gguf"
    front = {"library_name": kind, "pipeline_tag": "text-generation", "tags": ["lora", "merged"]}
    if not Path(source.base).expanduser().exists():  # a hub id, which the hub links
        front["base_model"] = split_revision(source.base)[0]
    return "\n".join(
        [
            "---",
            *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()),
            f"---\n\n# {_cell(name)}\n",
            (
                f"`{base}` with the LoRA adapter `{_short(str(source.adapter))}` merged into its"
                f" weights, in {dtype}, by finetune {__version__}.\n"
            ),
            (USE_OWN_CODE if own_code else USE) if gguf_difference is None else USE_GGUF,
            *(_unknown(source.adapter) if run is None else _training(run)),
            *([] if run is None else _metrics(run, source.adapter)),
            *_test(self_test, dtype),
            *([] if gguf_difference is None else [GGUF_TEST.format(gguf_difference)]),
            "## Made with\n",
            ", ".join(f"{library} {version(library)}" for library in LIBRARIES) + "\n",
        ]
    )


def _unknown(adapter: Path) -> list[str]:
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    known = [
        (name, config[name])
        for name in ("r", "lora_alpha", "target_modules")
        if config.get(name) is not None
    ]
    return [
        "## Training",
        "",
        "The adapter's folder is not that of a run: of its training nothing is known.",
        "",
        *_table(("adapter", "value"), known),
    ]


def _training(run: Origin) -> list[str]:
    known = {**run.settings, **run.identity}
    settings = [(name, known[name]) for name in SETTINGS if known.get(name) is not None]
    lines = ["## Training", "", *_table(("setting", "value"), settings)]
    stages = _stages(run.settings)
    if stages and known.get("use_curriculum"):
        lines += ["Curriculum, where the records have difficulties:", "", *stages]
    data = {
        name: [_path(entry) for entry in run.settings.get(name) or []]
        for name in ("data", "valid_data")
    }
    split = run.settings.get("valid_split")
    held_out = ", ".join(map(_short, data["valid_data"])) or (
        f"{split} of these" if split else "none"
    )
    facts = [
        ("trained on", ", ".join(map(_short, data["data"])) or "not known"),
        ("held out", held_out),
        (
            "data fingerprint",
            known.get("data") if isinstance(known.get("data"), str) else "not known",
        ),
        ("schedule fingerprint", known.get("schedule", "not known")),
    ]
    return [*lines, "## Data", "", *_table(("", ""), facts)]


def _stages(settings: Mapping[str, Any]) -> list[str]:
    curriculum = settings.get("curriculum")
    if not isinstance(curriculum, dict):
        return []
    stages = [
        (f"up to {stage['until']:.0%}", *(f"{weight:g}" for weight in stage["mix"]))
        for stage in curriculum["stages"]
    ]
    return _table(("progress", *curriculum["levels"]), stages)


def _metrics(run: Origin, adapter: Path) -> list[str]:
    """The loss before the first step, and at the adapter's."""
    step = re.fullmatch(r"checkpoint-(\d+)", adapter.expanduser().resolve().name)
    evaluations = run.evaluations(int(step[1]) if step else None)
    lines = ["## Metrics", ""]
    if not evaluations:
        return [*lines, "The run measured none: it had no validation data.", ""]
    first, last = evaluations[0], evaluations[-1]
    losses = [
        (
            key.partition("/")[2] or "all",
            *(f"{event.get(key, float('nan')):.4f}" for event in (first, last)),
        )
        for key in sorted(last)
        if key.startswith("eval_loss")
    ]
    heading = ("difficulty", f"step {first['step']}", f"step {last['step']}")
    return [*lines, "Loss per trained token on the held-out records:", "", *_table(heading, losses)]


def _test(test: Mapping[str, Any], dtype: str) -> list[str]:
    return [
        "## Self-test\n",
        (
            "transformers loaded the written files, and they were compared with base and adapter"
            f" on {test['prompts']} prompts ({test['tokens']} tokens). Logits differ by"
            f" {test['difference']:.1e} of their norm, and in {dtype} {test['tolerance']:.0e} is"
            f" allowed; the adapter changes them by {test['effect']:.1e}. The likeliest token is"
            f" the same at {test['agreement']:.2%} of the positions. The tokenizer read"
            f" {test['texts']} texts as before, with the same chat template.\n"
        ),
        *(
            [f"Of the rounding: {rounding_text(test['rounding'])}.\n"]
            if test.get("rounding")
            else []
        ),
    ]


def rounding_text(rounding: Mapping[str, Any]) -> str:
    """What the rounding of a quantized base is worth, in a sentence."""
    rounded = rounding["merged_into"] != "none"
    into, other = (
        ("weights rounded like that", "the base's own")
        if rounded
        else ("the base's own", "the rounded ones")
    )
    return (
        f"the adapter is for a base in {rounding['trained_on']}, and merged into {into}; on {other}"
        f" the adapted logits differ from these by {rounding['difference']:.1e} of their norm, and"
        f" the likeliest token is the same at {rounding['agreement']:.2%} of the positions"
    )


def _table(heading: Sequence[str], lines: Iterable[Sequence[Any]]) -> list[str]:
    return [
        *(
            f"| {' | '.join(map(_cell, line))} |"
            for line in (heading, ["---"] * len(heading), *lines)
        ),
        "",
    ]


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _path(entry: str | dict[str, Any]) -> str:
    """Of an entry of `data` in run.yaml."""
    return entry if isinstance(entry, str) else entry["path"]


def _short(name: str) -> str:
    """A hub id as it is; of a path its last part."""
    path = Path(name).expanduser()
    return _cell(
        path.resolve().name if path.exists() or path.is_absolute() or name.count("/") > 1 else name
    )
