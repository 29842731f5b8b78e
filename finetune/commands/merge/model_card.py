"""The model card of a merged model: what it was made from, how, and what it scored. It contains
nothing about this machine.

Only the settings named here are written, and only the last part of paths. So no experiment
tracker's key and no user's folder can get into a file that will be published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.paths import split_revision
from finetune.inference.loading import Origin, Source, find_run
from finetune.storage import durable_files
from finetune.version import __version__

if TYPE_CHECKING:
    from finetune.commands.merge.self_test import Rounding, SelfTest

SETTINGS = (
    "finetuning",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "quantization",
    "total_steps",
    "global_batch_size",
    "cutoff_len",
    "seed",
    "learning_rate",
    "warmup_steps",
    "lr_scheduler",
    "weight_decay",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "dtype",
    "use_curriculum",
    "curriculum_seed",
    "difficulty_field",
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
TEST = (
    "transformers loaded the written files, and they were compared with base and adapter on"
    " {test.prompts} prompts ({test.tokens} tokens). Logits differ by {test.difference:.1e} of their"
    " norm, and in {dtype} {test.tolerance:.0e} is allowed; the adapter changes them by"
    " {test.effect:.1e}. The likeliest token is the same at {test.agreement:.2%} of the positions."
    " The tokenizer read {test.texts} texts as before, with the same chat template.\n"
)
ROUNDING = (
    "the adapter is for a base in {rounding.trained_on}, and merged into {into}; on {other} the"
    " adapted logits differ from these by {rounding.difference:.1e} of their norm, and the likeliest"
    " token is the same at {rounding.agreement:.2%} of the positions"
)
GGUF_TEST = (
    "llama.cpp's own converter made `model.gguf` of these files. Loaded again by transformers, its"
    " logits differ by {:.1e} of their norm; its tokens, sizes, end of an answer and chat template"
    " are the same.\n"
)


def write_card(
    folder: Path,
    source: Source,
    *,
    name: str,
    dtype: str,
    test: SelfTest,
    gguf_difference: float | None = None,
) -> None:
    """Write README.md next to a merged model: Markdown with the hub's front matter.

    Args:
        gguf_difference: for a model in one GGUF file, the difference of its logits from the merged
            model's, relative to their norm.
    """
    assert source.adapter is not None
    is_gguf, run = gguf_difference is not None, find_run(source.adapter)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    use = USE_OWN_CODE if "auto_map" in config else USE
    front = {
        "library_name": "gguf" if is_gguf else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "merged"],
    }
    if not Path(source.base).expanduser().exists():  # a hub id, which the hub links
        front["base_model"] = split_revision(source.base)[0]
    header = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()]
    made = f"`{_short(source.base)}` with the LoRA adapter `{_short(str(source.adapter))}` merged"
    made += f" into its weights, in {dtype}, by finetune {__version__}.\n"
    lines = ["---", *header, f"---\n\n# {_cell(name)}\n", made, USE_GGUF if is_gguf else use]
    if run is None:
        lines += _unknown(source.adapter)
    else:
        lines += [*_training(run), *_metrics(run, source.adapter)]
    lines += ["## Self-test\n", TEST.format(test=test, dtype=dtype)]
    if test.rounding is not None:
        lines.append(f"Of the rounding: {rounding_text(test.rounding)}.\n")
    if is_gguf:
        lines.append(GGUF_TEST.format(gguf_difference))
    libraries = ", ".join(f"{library} {version(library)}" for library in LIBRARIES)
    text = "\n".join([*lines, "## Made with\n", f"{libraries}\n"])
    durable_files.replace_file(folder / "README.md", text.encode())


def _unknown(adapter: Path) -> list[str]:
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    names = ("r", "lora_alpha", "target_modules")
    return [
        "## Training",
        "",
        "The adapter's folder is not that of a run: of its training nothing is known.",
        "",
        *_table(("adapter", "value"), [(name, config[name]) for name in names if config.get(name)]),
    ]


def _training(run: Origin) -> list[str]:
    settings = {**run.settings, **run.identity}
    known = [(name, settings[name]) for name in SETTINGS if settings.get(name) is not None]
    lines = ["## Training", "", *_table(("setting", "value"), known)]
    curriculum = settings.get("curriculum")
    if isinstance(curriculum, dict) and settings.get("use_curriculum"):
        stages = []
        for stage in curriculum["stages"]:
            weights = [f"{weight:g}" for weight in stage["mix"]]
            stages.append([f"up to {stage['until']:.0%}", *weights])
        heading = ("progress", *curriculum["levels"])
        lines += ["Curriculum, where the records have difficulties:", "", *_table(heading, stages)]
    split = settings.get("valid_split")
    facts = [
        ("trained on", _names(run.settings.get("data")) or "not known"),
        (
            "held out",
            _names(settings.get("valid_data")) or (f"{split} of these" if split else "none"),
        ),
        ("data fingerprint", run.identity.get("data", "not known")),
        ("schedule fingerprint", run.identity.get("schedule", "not known")),
    ]
    return [*lines, "## Data", "", *_table(("", ""), facts)]


def _metrics(run: Origin, adapter: Path) -> list[str]:
    """Return the losses before the first step, and at the adapter's."""
    step = re.fullmatch(r"checkpoint-(\d+)", adapter.expanduser().resolve().name)
    evaluations = run.evaluations(int(step[1]) if step else None)
    lines = ["## Metrics", ""]
    if not evaluations:
        return [*lines, "The run measured none: it had no validation data.", ""]
    first, last = evaluations[0], evaluations[-1]
    losses = []
    for key in sorted(key for key in last if key.startswith("eval_loss")):
        before, after = (f"{event.get(key, float('nan')):.4f}" for event in (first, last))
        losses.append((key.partition("/")[2] or "all", before, after))
    heading = ("difficulty", f"step {first['step']}", f"step {last['step']}")
    return [*lines, "Loss per trained token on the held-out records:", "", *_table(heading, losses)]


def rounding_text(rounding: Rounding) -> str:
    """Return what the rounding of a quantized base is worth, in a sentence."""
    into, other = "the base's own", "the rounded ones"
    if rounding.merged_into != "none":
        into, other = "weights rounded like that", "the base's own"
    return ROUNDING.format(rounding=rounding, into=into, other=other)


def _table(heading: Sequence[str], lines: Iterable[Sequence[Any]]) -> list[str]:
    rows = (heading, ["---"] * len(heading), *lines)
    return [*(f"| {' | '.join(map(_cell, row))} |" for row in rows), ""]


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _names(entries: Sequence[str | dict[str, Any]] | None) -> str:
    """Return the last parts of the paths in `data` of run.yaml."""
    paths = [entry if isinstance(entry, str) else entry["path"] for entry in entries or []]
    return ", ".join(map(_short, paths))


def _short(name: str) -> str:
    """Return a hub id as it is, and of a path its last part."""
    path = Path(name).expanduser()
    is_path = path.exists() or path.is_absolute() or name.count("/") > 1
    return _cell(path.resolve().name if is_path else name)
