"""docs/evidence/benchmarks_sft.md, from what benchmarks/sft.py measured.

python benchmarks/sft_document.py    # writes its section on devices anew, from
benchmarks/results/sft_*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sft_report import CONTENDERS, make_table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "evidence" / "benchmarks_sft.md"
# of devices: those of this project's own machines are made anew
RESULTS = ROOT / "benchmarks" / "results"
TITLES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "vocab": "A large vocabulary",
}
ON_A_DEVICE = "## On a device"
HEAD = """# Fine-tuning compared with TRL and LLaMA-Factory

This page is written by `make bench` (`benchmarks/sft.py`). Do not edit it.

Run the benchmark on a quiet machine. The comments show how long it takes:

```
make bench PART=fp32               # fp32, bf16 or vocab: a round of all its contenders, within 9 minutes
make bench                         # all parts; ends within 9 minutes, and goes on when called again, to three rounds
make bench BENCH="--minutes 60"    # all of it at once
make bench BENCH="--fresh"         # forget what was measured
```

On two quiet cores a round takes about 6 minutes (fp32), 5 (bf16) and 5 (vocab) [estimate]. Most of that is the padded
variants and the imports of TRL and LLaMA-Factory. This page shows all parts that have been measured. The peers have
their own virtual environments, `build/bench-venv/trl` and `build/bench-venv/llamafactory`. `make bench` creates them
from `benchmarks/sft_requirements_*.txt` with the torch version in `constraints.txt`.

"""
TAIL = """
## What is equal, and how that is known

- All systems use the same model (random weights, Qwen3's architecture), conversations, chat template, adapter, learning
  rate, AdamW, clipping and threads. The peers read the conversations in the order of our run. Every run is a separate
  process. The order of the runs is reversed in every other round.
- The benchmark records what enters each model in every step: the tokens, which of them are trained, and where
  conversations begin. They are compared with a plan from transformers' own rendering.
- A system is ranked only if all of these match:
    - It trained on the planned conversations, in the planned number of steps of 8.
    - It trains the same number of parameters, and its gradient norms are above 0.
    - The first loss on the same batch is equal within 1e-4 (float32; 5e-3 in bfloat16).
    - The mean loss of the pass is within 1%.
- Packed rows of TRL and LLaMA-Factory hold as many conversations as fit, so their steps are other global batches. They
  are shown but not ranked.
- TRL 1.16 computes the loss in chunks by default; `chunked_nll` is another name for this.
- The template has no newline after the end of a turn. LLaMA-Factory would train on such a newline; TRL and this package
  would not.
- "tok/s" counts the tokens of the conversations without padding, over all steps after the first. "Computed per token"
  includes padding.
- "To the end of the first step" runs from the start of the process with empty caches, including imports and tokenizing.
  Our first step includes a rehearsal of the largest microbatch with weight 0.
- Peak memory is that of the process (VmHWM), or of torch's allocator on a device.
- The large-vocabulary part leaves out LLaMA-Factory. Its full float32 logits for a padded batch, with their softmax and
  gradients, need more than 10 GB [estimate].
- `-tuned` is TRL or LLaMA-Factory with better settings than its defaults.
- In float32, LLaMA-Factory grouped by length computes as many tokens per second as ours if padding is counted. Padding
  is the only difference left between the two.

"""
DEVICE_HEAD = f"""{ON_A_DEVICE}

This section needs one GPU with 80 GB:

```
python benchmarks/sft.py --device cuda --peers PEERS --work-dir FOLDER   # 16 GB of weights go into the folder
cp FOLDER/device/results.json benchmarks/results/sft_NAME.json
python benchmarks/sft_document.py                                        # writes this section
```

The model has Qwen3-8B's shape, with random weights in bfloat16. PEERS/trl/bin/python and PEERS/llamafactory/bin/python
run the peers. They can belong to environments or be scripts, and need a torch build for the device.

- The device's own events time the steps, so the host does not have to wait. The first two steps are not counted.
  Recorded inputs stay on the device until training ends.
- MFU counts 6 operations per weight and token (PaLM), without recomputation, relative to the GPU's dense 16-bit peak.
- Without recomputation each token keeps 8 MiB. The tuned peers therefore take 2 or 4 conversations at a time, and the
  bare loop takes rows of at most 4,096 tokens.
- The flash-attn package is not installed; the peers use torch's SDPA for attention.
- A system is ranked only if its frozen weights also have the same dtype and are on the same device.
"""


def make_document(results: dict[str, dict[str, Any]]) -> str:
    """The page. `results` of parts in any order; what is missing is said to be missing."""
    parts = [_part(part, results[part]) for part in TITLES if part in results]
    if missing := [part for part in TITLES if part not in results]:
        parts.append(f"Not measured yet: {', '.join(missing)}.\n")
    words = "\n".join(f"- **{name}**: {contender.words}." for name, contender in CONTENDERS.items())
    return f"{HEAD}{words}\n\n" + "\n".join(parts) + TAIL + device_section(device_results())


def device_results() -> dict[str, dict[str, Any]]:
    """What was measured on devices and is kept with the project, by the names of the files."""
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(RESULTS.glob("sft_*.json"))
    }


def device_section(results: dict[str, dict[str, Any]]) -> str:
    """The last section of the page."""
    tables = [
        f"\n### {result['machine']['device']}\n\nFrom `benchmarks/results/{name}`:\n\n"
        f"{_described(result)}\n\n{make_table('device', result)}\n"
        for name, result in results.items()
    ]
    return DEVICE_HEAD + (
        "".join(tables)
        or "\nThis part has not been run: no figure on this page is from a device.\n"
    )


def _part(part: str, result: dict[str, Any]) -> str:
    return f"## {TITLES[part]}\n\n{_described(result)}\n\n{make_table(part, result)}\n"


def _described(result: dict[str, Any]) -> str:
    given, machine, plan = result["plan"]["settings"], result["machine"], result["plan"]
    tokens, supervised = (
        sum(step[kind] for step in plan["steps"]) for kind in ("tokens", "supervised")
    )
    versions = {
        name: text for run in result["runs"] for name, text in run.get("versions", {}).items()
    }
    libraries = ", ".join(
        f"{name} {versions[name]}" for name in ("trl", "llamafactory", "torch") if name in versions
    )
    users: dict[str, set[str]] = {}  # libraries by their version of transformers
    for run in result["runs"]:
        if "versions" in run:
            users.setdefault(run["versions"]["transformers"], set()).add(run["library"])
    transformers = [f"{text} for {', '.join(sorted(users[text]))}" for text in sorted(users)]
    return (
        f"- Machine: {machine['device']}, {machine['threads']} threads"
        f" ({', '.join(machine['flags']) or 'flags unknown'}).\n"
        f"- Versions: {libraries}.\n"
        f"- transformers: {'; '.join(transformers)}.\n"
        f"- Model: {plan['parameters'] / 1e6:.0f} M parameters, vocabulary"
        f" {given['vocabulary']:,}, LoRA r{given['lora_r']}.\n"
        f"- Data: {given['conversations']} conversations with {tokens:,} tokens in all"
        f" ({supervised:,} trained, longest {plan['longest']}), {len(plan['steps'])} steps of"
        f" {given['batch']}.\n"
        f"- Load before the runs: {machine['load_before']:.1f}."
    )


def main() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(
        page[: page.index(ON_A_DEVICE)] + device_section(device_results()), encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
