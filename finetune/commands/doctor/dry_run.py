"""One step for real: a run of the configured kind on a tiny made model, saved, and resumed from the
checkpoint.

    python -m finetune.commands.doctor.dry_run FOLDER

makes the model, tokenizer and data; doctor starts that, then the runs, as a user would. What a kind
trains (`rehearse_...`) is executed as its configured run would be.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.commands.doctor.check import Check
from finetune.commands.doctor.launched import elastic, without_launcher
from finetune.commands.doctor.probe import run_to_end
from finetune.config.base_config import BaseConfig
from finetune.config.kinds import RunKind
from finetune.config.preference_config import PreferenceConfig, PreferenceSettings
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.run_config import RunConfig
from finetune.runtime.language import _

MODULE = "finetune.commands.doctor.dry_run"
RUN_TIMEOUT_SECONDS = 600.0
STEPS = 2
_WINDOW = 64  # tokens
# The resumed step is the uninterrupted one up to rounding; kernels of accelerators may add in
# another order.
LOSS_TOLERANCE = 1e-3


def check_dry_run(
    kind: RunKind,
    processes: int,
    device_type: str,
    config: BaseConfig | None,
    environment: Mapping[str, str],
) -> Check:
    """Train two steps with a checkpoint after each; then resume from the first, and compare the
    second step.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as temporary:
        folder = Path(temporary)
        rehearsed = kind.rehearsal(folder, processes, config)
        if rehearsed is None:
            return Check("dry_run").skip(_("{kind} has no small run to rehearse"), kind=kind.name)
        # With this rate step 2 has another loss than without step 1.
        settings = {
            "learning_rate": 0.01,
            "warmup_steps": 0,
            "save_steps": 1,
            "device_type": device_type,
            "report_to": "none",
            "preprocessing_num_workers": 1,
            "cache_dir": str(folder / "cache"),
            "timeout_seconds": 120,
            **rehearsed,
        }
        file, first, second = folder / "run.json", folder / "first", folder / "second"
        file.write_text(json.dumps(settings), encoding="utf-8")
        start = elastic(processes) if processes > 1 else [sys.executable]
        run = [*start, "-m", kind.module, "--config", str(file), "--output-dir"]
        resume = ["--resume", str(first / "checkpoint-1")]
        commands = {
            _("making a tiny model failed: {reason}"): [sys.executable, "-m", MODULE, temporary],
            _("one step and saving failed: {reason}"): [*run, str(first)],
            _("resuming failed: {reason}"): [*run, str(second), *resume],
        }
        for what, command in commands.items():
            answer = run_to_end(
                command,
                environment=without_launcher(environment),
                timeout_seconds=RUN_TIMEOUT_SECONDS,
            )
            if answer.code != 0:
                check = Check("dry_run", values={"messages": answer.last_lines})
                return check.fail(what, answer.fix, reason=answer.reason)
        return compare(kind.name, _loss(first), _loss(second), processes)


def compare(kind: str, whole: float, resumed: float, processes: int) -> Check:
    """Check that step 2 after a resume has the loss of step 2 without."""
    values = {
        "kind": kind,
        "loss": whole,
        "resumed_loss": resumed,
        "processes": processes,
    }
    check = Check("dry_run", values=values)
    if not abs(whole - resumed) <= LOSS_TOLERANCE * abs(whole):
        return check.fail(
            _(
                "step 2 has loss {resumed:.6f} after a resume, and {whole:.6f} without: the saved"
                " state is not complete"
            ),
            _("report this with the versions above"),
            resumed=resumed,
            whole=whole,
        )
    return check.ok(
        _(
            "{kind}: {processes} processes trained, saved and resumed: step 2 has loss {loss:.4f}"
            " both ways"
        )
    )


def _loss(output: Path) -> float:
    lines = (output / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    return next(event["loss"] for event in map(json.loads, lines) if event["step"] == STEPS)


# ---------------------------------------------------------------- what each kind trains

# `make` has put these into the folder: `model`, `train.jsonl`, `pairs.jsonl`, `labels.jsonl`,
# `tokens.bin`.


def rehearse_fine_tuning(folder: Path, processes: int, config: RunConfig | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "cutoff_len": 128,
        "micro_batch_size": 1,
        "global_batch_size": 2 * processes,
        "max_steps": STEPS,
        "lora_r": 4,
    }
    return settings | _of_config(config, "finetuning", "deepspeed")


def rehearse_preferences(
    folder: Path, processes: int, config: PreferenceConfig | None
) -> dict[str, Any]:
    """Rehearse the configured loss. If all weights are trained, the resumed run must find the
    log-probabilities of the reference that the first run stored.
    """
    labelled = config is not None and config.preference_form == "labels"
    loss = _of_config(config, *PreferenceSettings.model_fields)
    data = str(folder / ("labels.jsonl" if labelled else "pairs.jsonl"))
    return rehearse_fine_tuning(folder, processes, config) | loss | {"data": data}


def rehearse_pretraining(
    folder: Path, processes: int, config: PretrainConfig | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_data_path": str(folder / "tokens.bin"),
        "tokenizer": str(folder / "model"),
        "depth": 2,
        "max_seq_len": _WINDOW,
        "device_batch_size": 1,
        "total_batch_size": 2 * processes * _WINDOW,
        "num_iterations": STEPS,
    }
    if config is not None and config.model is not None:
        settings |= {
            "model": str(folder / "model"),
            "lora_r": 4,
            "finetuning": config.finetuning,
        }
        del settings["tokenizer"], settings["depth"]
    return settings | _of_config(config, "arch", "optimizer", "backend", "compile", "fp8")


def _of_config(config: RunConfig | PretrainConfig | None, *names: str) -> dict[str, Any]:
    """Return the settings that decide how the run is executed; those without a value have their
    default.
    """
    values = {} if config is None else {name: getattr(config, name) for name in ("dtype", *names)}
    return {name: value for name, value in values.items() if value is not None}


# ---------------------------------------------------------------- the model and the data


def make(folder: Path) -> None:
    """Write a Qwen3 with two layers and hidden size 128, a byte tokenizer and its template; 16
    records of each form; and a corpus.
    """
    import numpy as np
    import torch

    from finetune.data.corpus.tokenizer import SPECIAL_TOKENS, train_tokenizer
    from finetune.modeling.scratch import make_unstarted_model, scratch_config

    sums = [(f"add {n} and {n + 1}", f"{2 * n + 1}" * (n % 5 + 1)) for n in range(16)]
    vocab_size = 256 + len(SPECIAL_TOKENS)  # every byte is a token, and nothing is merged
    tokenizer = train_tokenizer(iter([]), vocab_size)
    tokenizer.save_pretrained(folder / "model")
    config = scratch_config("qwen3", 2, vocab_size=vocab_size, max_seq_len=256)
    torch.manual_seed(0)
    make_unstarted_model(config, "sdpa").save_pretrained(folder / "model")
    records: dict[str, list[dict[str, Any]]] = {
        "train": [{"instruction": asked, "output": answer} for asked, answer in sums],
        "pairs": [
            {
                "prompt": asked,
                "chosen": answer,
                "rejected": f"{answer}0",
            }
            for asked, answer in sums
        ],
        "labels": [
            {
                "prompt": asked,
                "completion": answer,
                "label": n % 2 == 0,
            }
            for n, (asked, answer) in enumerate(sums)
        ],
    }
    for name, rows in records.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    text = " ".join(f"{asked}: {answer}" for asked, answer in sums)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # Enough for one step of a thousand processes.
    np.resize(np.array(ids, dtype=np.uint16), 2**17).tofile(folder / "tokens.bin")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
