"""Families of models through the whole chain: trained, resumed, merged, asked.

    python exhaustive/models.py              # all families, the table into docs/reference/models.md (`make
    models`) python exhaustive/models.py "Qwen3"      # those whose names begin so, printed only

Each is a tiny model of its family with random weights (model_families.py). With LoRA and in full it
must learn, go on from a checkpoint bit-identically, and leave files of its base's names; packed and
padded it must be the same training; merged and as an adapter it must answer as transformers alone
does.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import model_families
import run_helpers as runs
import torch
from model_families import FAMILIES, REMOTE_CODE, Family
from safetensors.torch import load_file

PAGE = runs.ROOT / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- families: made by make models -->", "<!-- end of families -->"
STEPS, SAVED = 10, 5
QUESTION = [{"role": "user", "content": "router port?"}]
NEW_TOKENS = 12
# Rounding of float32, a little more where experts see all tokens of a microbatch in one product.
LOSSES_WITHIN = 1e-3


@dataclass
class Row:
    """What became of a family; `failures` is empty where all holds."""

    family: Family
    packed: bool = False
    targets: tuple[str, ...] = ()
    calls: str = ""
    held: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def check(self, name: str, work: Callable[[], None]) -> None:
        """Note whether it holds; later checks may need what it made."""
        try:
            work()
        except (AssertionError, Exception) as error:
            self.failures[name] = str(error).strip()[-2500:] or repr(error)
        else:
            self.held.append(name)


class Chain:
    """One family's runs, in a folder of its own."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family, self.folder, self.row = family, folder, Row(family)
        folder.mkdir(parents=True)
        self.model = folder / "model"
        data = runs.make_data(folder / "train.jsonl", 40)
        valid = runs.make_data(folder / "valid.jsonl", 5, seed=1)
        self.materials = runs.Materials(folder, self.model, data, valid)

    def run(self) -> Row:
        from finetune.modeling.attention import can_pack

        self.row.packed = can_pack(model_families.make_family(self.family, self.model))
        for how in ("lora", "full"):
            self.row.check(f"{how}: learns", lambda how=how: self.learns(how))  # type: ignore[misc]
            self.row.check(f"{how}: resumes", lambda how=how: self.resumes(how))  # type: ignore[misc]
        self.row.check("padding is said once", self.says_padded)
        if self.row.packed:
            self.row.check("packed as padded", self.padded)
        self.row.check("whole model has its base's names", self.names)
        self.row.check("merges", self.merges)
        for name in ("lora", "merged", "full"):
            self.row.check(f"{name}: answers", lambda name=name: self.answers(name))  # type: ignore[misc]
        return self.row

    def train(self, name: str, how: str, **changes: Any) -> runs.Ranks:
        rate = 1e-2 if how == "lora" else 5e-3
        settings = {
            "finetuning": how,
            "learning_rate": rate,
            "max_steps": STEPS,
            "lora_r": 8,
            **changes,
        }
        return runs.train(self.materials.settings(self.folder / name, **settings))

    def learns(self, how: str) -> None:
        self.log = self.train(how, how, save_steps=SAVED).output()
        losses = runs.losses(self.folder / how)
        assert sum(losses[-3:]) < 0.95 * sum(losses[:3]), f"losses {losses}"
        if how == "lora":
            tensors = load_file(self.folder / how / "adapter_model.safetensors")
            modules = {
                name.split(".lora_")[0].removesuffix(".base_layer").rpartition(".")[2]
                for name in tensors
            }
            self.row.targets = tuple(sorted(modules))
            idle = [
                name for name, tensor in tensors.items() if "lora_B" in name and not tensor.any()
            ]
            assert not idle, f"nothing was learned by {idle}"

    def resumes(self, how: str) -> None:
        self.train(f"{how} again", how, resume=str(self.folder / how / f"checkpoint-{SAVED}"))
        whole, again = (runs.result_weights(self.folder / name) for name in (how, f"{how} again"))
        assert whole.keys() == again.keys()
        different = [name for name, tensor in whole.items() if not torch.equal(tensor, again[name])]
        assert not different, f"not bit-identical: {different}"

    def says_padded(self) -> None:
        said = self.log.count("packing is off")
        assert said == (0 if self.row.packed else 1), f"said {said} times"

    def padded(self) -> None:
        self.train("padded", "full", packing=False)
        packed, padded = (runs.losses(self.folder / name) for name in ("full", "padded"))
        assert runs.largest_relative_difference(packed, padded) < LOSSES_WITHIN, (packed, padded)

    def names(self) -> None:
        self.same_names("full")

    def same_names(self, name: str) -> None:
        """A result has its base's tensors; where the text model alone is loaded, those of it, and
        it is said.
        """
        base, ours = (
            load_file(folder / "model.safetensors") for folder in (self.model, self.folder / name)
        )
        said = "only its text model" in self.log
        wanted = {key for key in base if not (said and ".visual." in key)}
        assert wanted == ours.keys(), sorted(wanted ^ ours.keys())

    def merges(self) -> None:
        words = [
            "--adapter",
            str(self.folder / "lora"),
            "--output-dir",
            str(self.folder / "merged"),
        ]
        code, output = runs.run_module("finetune", ["merge", *words], self.folder / "merge.log", {})
        assert code == 0, output
        assert ("only its text model" in output) == ("only its text model" in self.log), output
        self.same_names("merged")

    def answers(self, name: str) -> None:
        """Ours, to a question as the template writes it, against transformers' own with nothing of
        this package.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from finetune.inference.generation import load_for_generation
        from finetune.inference.sampling import Sampling

        folder = self.folder / name
        with load_for_generation(str(folder), dtype="float32", device_type="cpu") as generator:
            answer = generator.generate(
                [QUESTION], Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS)
            )[0]
            form, stops = generator.call_form, sorted(generator.stop_ids)
        self.row.calls = form.name if form is not None else ""
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            self.model if name == "lora" else folder, dtype=torch.float32
        )
        if name == "lora":
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, folder)
        inputs = tokenizer.apply_chat_template(
            QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        settings = {
            "do_sample": False,
            "max_new_tokens": NEW_TOKENS,
            "eos_token_id": stops,
            "pad_token_id": 0,
        }
        with torch.inference_mode():
            ids = model.eval().generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings
            )
        wanted = ids[0, inputs["input_ids"].shape[1] :].tolist()
        assert list(answer.token_ids) == wanted, (
            f"{list(answer.token_ids)} where transformers says {wanted}"
        )


# ---------------------------------------------------------------- the table


def line(row: Row) -> str:
    """A row of the table."""
    held = "all" if not row.failures else f"**fails: {', '.join(row.failures)}**"
    kind = "packed" if row.packed else "padded"
    return (
        f"| {row.family.name} | `{row.family.model_type}` |"
        f" {kind}{' (hybrid)' if row.family.hybrid else ''} | {' '.join(row.targets)} |"
        f" {row.calls or '-'} | {held} |"
    )


def table(rows: list[Row]) -> str:
    head = (
        "| family | model type | rows are | LoRA's targets by `all-linear` | calls of tools |"
        " holds |"
    )
    remote = f"Not tested, because their code comes with the model: {'; '.join(REMOTE_CODE)}."
    return "\n".join([head, "|---|---|---|---|---|---|", *map(line, rows), "", remote])


def listed(page: str) -> list[tuple[str, str]]:
    """Family and model type of the rows of the committed page."""
    section = page[page.index(BEGIN) : page.index(END)]
    return re.findall(r"^\| (.+?) \| `(\w+)` \|", section, re.MULTILINE)


def main(arguments: list[str]) -> int:
    chosen = [family for family in FAMILIES if family.name.startswith(tuple(arguments) or "")]
    rows = []
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        for family in chosen:
            rows.append(Chain(family, Path(folder) / re.sub(r"\W+", "_", family.name)).run())
            print(line(rows[-1]), flush=True)
            for name, why in rows[-1].failures.items():
                print(f"--- {family.name}, {name}: {why}\n", flush=True)
    if not arguments:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page[: page.index(BEGIN)], page[page.index(END) :]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{after}", encoding="utf-8")
    return int(any(row.failures for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
