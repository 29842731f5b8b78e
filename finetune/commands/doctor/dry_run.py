"""One step for real: `finetune.sft` on a tiny made model, saved, and resumed from the checkpoint.

    python -m finetune.commands.doctor.dry_run FOLDER

makes the model, tokenizer and data; doctor starts that, then the runs, as a user would.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.commands.doctor.check import Check, fail, ok
from finetune.commands.doctor.launched import without_launcher
from finetune.commands.doctor.probe import Answer, run_to_end
from finetune.config.run_config import BaseConfig
from finetune.runtime.language import _

MODULE = "finetune.commands.doctor.dry_run"
RUN_TIMEOUT_SECONDS = 600.0
STEPS = 2
# The resumed step is the uninterrupted one up to rounding; kernels of accelerators may add in another order.
LOSS_TOLERANCE = 1e-3


def check_dry_run(processes: int, device_type: str, config: BaseConfig | None, environment: Mapping[str, str]) -> Check:
    """Train two steps with a checkpoint after each; then resume from the first, and compare the second step."""
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as temporary:
        folder = Path(temporary)
        command = [sys.executable, "-m", MODULE, str(folder)]
        answer = run_to_end(command, environment=environment, timeout_seconds=RUN_TIMEOUT_SECONDS)
        if answer.code != 0:
            return _failed(_("making a tiny model failed: {reason}"), answer)
        settings = _settings(folder, processes, device_type, config)
        (folder / "run.json").write_text(json.dumps(settings), encoding="utf-8")
        first, second = folder / "first", folder / "second"
        answer = _train(first, processes, environment)
        if answer.code != 0:
            return _failed(_("one step and saving failed: {reason}"), answer)
        answer = _train(second, processes, environment, "--resume", str(first / "checkpoint-1"))
        if answer.code != 0:
            return _failed(_("resuming failed: {reason}"), answer)
        return compare(_loss(first), _loss(second), processes)


def compare(whole: float, resumed: float, processes: int) -> Check:
    """Whether step 2 after a resume is step 2."""
    name, values = "dry_run", {"loss": whole, "resumed_loss": resumed, "processes": processes}
    if not abs(whole - resumed) <= LOSS_TOLERANCE * abs(whole):
        what = _(
            "step 2 has loss {resumed:.6f} after a resume, and {whole:.6f} without: the saved state is not complete"
        )
        return fail(name, what.format(resumed=resumed, whole=whole), _("report this with the versions above"), **values)
    what = _("{processes} processes trained, saved and resumed: step 2 has loss {loss:.4f} both ways")
    return ok(name, what.format(processes=processes, loss=resumed), **values)


def _settings(folder: Path, processes: int, device_type: str, config: BaseConfig | None) -> dict[str, Any]:
    """A small run that takes from the configuration what decides how it is executed."""
    settings: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "cutoff_len": 128,
        "micro_batch_size": 1,
        "global_batch_size": 2 * processes,
        "max_steps": STEPS,
        "save_steps": 1,
        "lora_r": 4,
        "device_type": device_type,
        "report_to": "none",
        "preprocessing_num_workers": 1,
        "cache_dir": str(folder / "cache"),
        "timeout_seconds": 120,
    }
    if config is not None and config.base_model is not None:
        settings |= {"finetuning": "full" if config.trains_all_weights else "lora", "dtype": config.dtype}
        if config.deepspeed:
            settings["deepspeed"] = config.deepspeed
    return settings


def _train(output: Path, processes: int, environment: Mapping[str, str], *more: str) -> Answer:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    run = ["-m", "finetune.sft", "--config", str(output.parent / "run.json"), "--output-dir", str(output), *more]
    return run_to_end(
        [sys.executable, *start, *run],
        environment=without_launcher(environment),
        timeout_seconds=RUN_TIMEOUT_SECONDS,
    )


def _loss(output: Path) -> float:
    lines = (output / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    return next(event["loss"] for event in map(json.loads, lines) if event["step"] == STEPS)


def _failed(what: str, answer: Answer) -> Check:
    return fail("dry_run", what.format(reason=answer.reason), answer.fix, messages=answer.last_lines)


# ---------------------------------------------------------------- what is trained, made in a process of its own


def make(folder: Path) -> None:
    """A Qwen3 of two layers, 32 wide, a tokenizer of bytes with a ChatML template, and 16 records."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from finetune.data.templates import TEMPLATES

    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*specials, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=specials[0], eos_token=specials[2])
    fast.chat_template = TEMPLATES["chatml"]
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=(len(fast) + 7) // 8 * 8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    records = [{"instruction": f"add {n} and {n + 1}", "output": f"{2 * n + 1}" * (n % 5 + 1)} for n in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
