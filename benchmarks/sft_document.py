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
HEAD = """# Fine-tuning beside TRL and LLaMA-Factory

Written by `make bench` (`benchmarks/sft.py`); do not edit.

Needs a quiet machine, and the time that is said here:

```
make bench PART=fp32               # fp32, bf16 or vocab: a round of all its contenders, within 9 minutes
make bench                         # all parts; ends within 9 minutes, and goes on when called again, to three rounds
make bench BENCH="--minutes 60"    # all of it at once
make bench BENCH="--fresh"         # forget what was measured
```

On two quiet cores a round takes about 6 minutes (fp32), 5 (bf16) and 5 (vocab) [estimate], most of it TRL's and
LLaMA-Factory's padded forms and imports. The parts that are there come together in this page. Peers live in virtual
environments of their own, `build/bench-venv/trl` and `build/bench-venv/llamafactory`, which `make bench` makes from
`benchmarks/sft_requirements_*.txt` with the torch of `constraints.txt`.

"""
TAIL = """
## What is equal, and how that is known

- Model (random weights, Qwen3's architecture), conversations, chat template, adapter, rate, AdamW, clipping, order of
  the conversations (peers read them in the order of our run) and threads are the same. Every run is a process of its
  own; the order is turned round in every other round.
- What entered each model is recorded in front of it, in every step: tokens, which of them are trained, and where
  conversations begin. A contender is ranked only if these are the planned conversations in the planned number of steps
  of 8, with as many trained parameters, gradient norms above 0, the first loss of the same batch equal within 1e-4
  (float32; 5e-3 in bfloat16) and the mean loss of the pass within 1%. The plan is made by transformers' own rendering.
- Packed rows of TRL and LLaMA-Factory hold as many conversations as fit: their steps are other global batches. They are
  shown and not ranked.
- TRL 1.16 takes the loss in chunks by default; `chunked_nll` is another name for it.
- The template has no newline after the end of a turn: LLaMA-Factory would train on it, TRL and this package do not.
- Tokens per second are those of the conversations, padding not counted, of all steps after the first. "Computed for a
  token" counts padding. "To the end of the first step" is from the start of the process, imports and tokenizing
  included, with empty caches; our first step has a rehearsal of the largest microbatch before it, with weight 0. Peak
  memory is the process's own (VmHWM), on a device that of torch's allocator.
- The vocabulary's part leaves LLaMA-Factory out: whole float32 logits of a padded batch, their softmax and gradients
  are more than 10 GB [estimate].
- What TRL and LLaMA-Factory can do better than as they come is in `-tuned`.
- In float32 LLaMA-Factory grouped by length computes as many tokens a second as ours, padding counted: padding is all
  that is left between the two.

"""
DEVICE_HEAD = f"""{ON_A_DEVICE}

Needs one card of 80 GB:

```
python benchmarks/sft.py --device cuda --peers PEERS --work-dir FOLDER   # 16 GB of weights go into the folder
cp FOLDER/device/results.json benchmarks/results/sft_NAME.json
python benchmarks/sft_document.py                                        # writes this section
```

The model has Qwen3-8B's shape, with random weights in bfloat16. PEERS/trl/bin/python and
PEERS/llamafactory/bin/python are what runs the peers, of environments or of scripts; their torch is for the device.

- Steps are timed by the device's own events, so that the host need not wait; the first two are not counted. What enters
  a model stays on the device until the training is over.
- MFU is of 6 operations per weight and token (PaLM), whatever is recomputed, and of the card's dense 16-bit peak.
- Without recomputation a token keeps 8 MiB, so tuned peers take 2 or 4 conversations at a time, and the bare loop rows
  of at most 4,096 tokens. Nothing here has the flash-attn package: the peers' attention is torch's SDPA.
- A contender is ranked only if its frozen weights are of the same dtype and on the same device, too.
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
        f"\n### {result['machine']['device']}\n\nFrom `benchmarks/results/{name}`."
        f" {_described(result)}\n\n{make_table('device', result)}\n"
        for name, result in results.items()
    ]
    return DEVICE_HEAD + (
        "".join(tables) or "\nIt was not run: no figure on this page is from a device.\n"
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
    measured = [
        (run["library"], run["versions"]["transformers"])
        for run in result["runs"]
        if "versions" in run
    ]
    stands_on = [f"{library} on transformers {text}" for library, text in sorted({*measured})]
    return (
        f"{machine['device']}, {machine['threads']} threads"
        f" ({', '.join(machine['flags']) or 'flags unknown'}), {libraries}; {'; '.join(stands_on)}."
        f" {plan['parameters'] / 1e6:.0f} M parameters, vocabulary {given['vocabulary']:,};"
        f" {given['conversations']} conversations of {tokens:,} tokens ({supervised:,} trained,"
        f" longest {plan['longest']}), LoRA r{given['lora_r']}, {len(plan['steps'])} steps of"
        f" {given['batch']}. Load before the runs: {machine['load_before']:.1f}."
    )


def main() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(
        page[: page.index(ON_A_DEVICE)] + device_section(device_results()), encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
