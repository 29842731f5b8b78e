"""One step for real: `finetune.sft` on a tiny made model, saved, and gone on with from the checkpoint.

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
from finetune.commands.doctor.launched import clean
from finetune.commands.doctor.probe import Answer, run_to_end, what_now
from finetune.config.run_config import BaseConfig

RUN_TIMEOUT_SECONDS = 600.0
STEPS = 2
# The resumed step is the uninterrupted one up to rounding; kernels of accelerators may add in another order.
LOSS_TOLERANCE = 1e-3


def check_dry_run(processes: int, device_type: str, config: BaseConfig | None, environment: Mapping[str, str]) -> Check:
    """Train two steps with a checkpoint after each; then go on from the first, and compare the second step."""
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as temporary:
        folder = Path(temporary)
        words = [sys.executable, "-m", "finetune.commands.doctor.dry_run", str(folder)]
        code, messages = run_to_end(words, environment=environment, timeout_seconds=RUN_TIMEOUT_SECONDS)
        if code != 0:
            return _failed("making a tiny model", "生成微型模型", Answer(None, code, messages))
        settings = _settings(folder, processes, device_type, config)
        (folder / "run.json").write_text(json.dumps(settings), encoding="utf-8")
        first, second = folder / "first", folder / "second"
        for output, more in ((first, []), (second, ["--resume", str(first / "checkpoint-1")])):
            code, messages = _train(folder, output, processes, more, environment)
            if code != 0:
                stage, chinese = (
                    ("one step and saving", "训练一步并保存") if output == first else ("resuming", "恢复训练")
                )
                return _failed(stage, chinese, Answer(None, code, messages))
        return compare(_loss(first), _loss(second), processes)


def compare(whole: float, resumed: float, processes: int) -> Check:
    """Whether step 2 after a resume is step 2."""
    name, values = "dry_run", {"loss": whole, "resumed_loss": resumed, "processes": processes}
    if not abs(whole - resumed) <= LOSS_TOLERANCE * abs(whole):
        return fail(
            name,
            (
                f"step 2 has loss {resumed:.6f} after a resume, and {whole:.6f} without: the saved state is not whole",
                f"恢复后第 2 步损失为 {resumed:.6f}，不中断时为 {whole:.6f}：保存的状态不完整",
            ),
            ("report this with the versions above", "请附上以上版本信息反馈"),
            **values,
        )
    said = f"{processes} processes trained, saved and resumed: step 2 has loss {resumed:.4f} both ways"
    return ok(name, said, f"{processes} 个进程完成训练、保存与恢复：两种方式第 2 步损失均为 {resumed:.4f}", **values)


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


def _train(
    folder: Path, output: Path, processes: int, more: list[str], environment: Mapping[str, str]
) -> tuple[int | None, str]:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    words = ["-m", "finetune.sft", "--config", str(folder / "run.json"), "--output-dir", str(output), *more]
    return run_to_end(
        [sys.executable, *start, *words], environment=clean(environment), timeout_seconds=RUN_TIMEOUT_SECONDS
    )


def _loss(output: Path) -> float:
    lines = (output / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    return next(record["loss"] for record in map(json.loads, lines) if record["step"] == STEPS)


def _failed(stage: str, chinese: str, answer: Answer) -> Check:
    what = (f"{stage} failed: {answer.reason}", f"{chinese}失败：{answer.reason}")
    return fail("dry_run", what, what_now(answer), messages=answer.last_words)


# ---------------------------------------------------------------- what is trained, made in a process of its own


def make(folder: Path) -> None:
    """A Qwen3 of two layers, 32 wide, a tokenizer of bytes with a ChatML template, and 16 rows."""
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
    rows = [{"instruction": f"add {n} and {n + 1}", "output": f"{2 * n + 1}" * (n % 5 + 1)} for n in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
