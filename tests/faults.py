"""Faults put into the core on purpose: each must be caught by a test.

    python tests/faults.py            # all of them, the table into docs/evidence/fault_table.md (`make
    faults`) python tests/faults.py packed     # those with this word in their name, printed only

Each is put into a copy of the tree, whose tests of that part are then run until the first that
fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "evidence" / "fault_table.md"
COPIED = (
    "finetune",
    "tests",
    "ds_configs",
    "accelerate_configs",
    "data_samples",
    "launchers",
    "setup.cfg",
    "docs",
)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        file: below finetune/.
        right, wrong: a text that occurs in the file, and what stands there instead.
        tests: files below tests/ that should catch it.
        only: pytest's -k, where the files have slow tests about other things.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: str
    only: str = ""


FAULTS = (
    Fault(
        "samples end up in other microbatches",
        "batching/microbatch_schedule.py",
        "    microbatch_of[order] = microbatch_of_rank\n",
        "    microbatch_of[:] = microbatch_of_rank\n",
        "batching/test_microbatch_schedule.py",
    ),
    Fault(
        "microbatches above the token budget",
        "batching/microbatch_schedule.py",
        "((budget + 1) << shift) - 1",
        "((2 * budget + 1) << shift) - 1",
        "batching/test_microbatch_schedule.py",
    ),
    Fault(
        "ranks with unequal numbers of microbatches",
        "batching/microbatch_schedule.py",
        "return max(1, -(-count // world_size)) * world_size",
        "return max(1, count)",
        "batching/test_microbatch_schedule.py",
    ),
    Fault(
        "padded microbatches not sorted by length",
        "batching/microbatch_schedule.py",
        "order = _stable_order(lengths.max(initial=0) - lengths)",
        "order = np.arange(len(lengths))",
        "batching/test_microbatch_schedule.py",
    ),
    Fault(
        "micro-steps assigned in one direction only",
        "batching/microbatch_schedule.py",
        "        slots[1::2] = slots[1::2, ::-1].copy()\n",
        "        pass\n",
        "batching/test_microbatch_schedule.py",
    ),
    Fault(
        "every pass in the same order",
        "batching/sampler.py",
        "found.size, self.seed, *found.key, number, exact",
        "found.size, self.seed, *found.key, 0, exact",
        "batching/test_sampler.py",
    ),
    Fault(
        "difficulties not shuffled inside a step",
        "batching/sampler.py",
        'shuffled[np.argsort(cell_of_slot, kind="stable")] = batch',
        "shuffled[:] = batch",
        "batching/test_sampler.py",
    ),
    Fault(
        "one step too few",
        "batching/sampler.py",
        "return math.ceil(Fraction(repr(float(num_epochs))) * samples / global_batch_size)",
        "return math.floor(Fraction(repr(float(num_epochs))) * samples / global_batch_size)",
        "batching/test_sampler.py",
    ),
    Fault(
        "draws of a difficulty overlap between steps",
        "batching/sampler.py",
        "self._cell_counts[mark * _MARKED : step].sum(\n            axis=0, dtype=np.int64\n        )",
        "self._cell_counts[mark * _MARKED : step].sum(\n            axis=0, dtype=np.int64\n        ) // 2",
        "batching/test_sampler.py",
    ),
    Fault(
        "sources alternate, regardless of weight",
        "batching/mixing.py",
        "units = [int(share * denominator) for share in group.shares]",
        "units = [denominator // len(group.shares) for share in group.shares]",
        "batching/test_mixing.py",
    ),
    Fault(
        "every source picks its own difficulties in every step",
        "batching/mixing.py",
        "end = row_ends[:, i] + turned",
        "end = row_ends[:, i] + 0 * turned",
        "batching/test_mixing.py",
    ),
    Fault(
        "errors of several difficulties add up",
        "batching/mixing.py",
        "if np.max(several) > 1:",
        "if np.max(several) > 99:",
        "batching/test_mixing.py",
    ),
    Fault(
        "the key is not used",
        "batching/permutation.py",
        "self._table = exact_order(size, size, *key)",
        "self._table = exact_order(size, size)",
        "batching/test_permutation.py batching/test_sampler.py",
    ),
    Fault(
        "binary fractions instead of decimals",
        "batching/curriculum.py",
        "else Fraction(repr(float(number)))",
        "else Fraction(float(number))",
        "batching/test_curriculum.py",
    ),
    Fault(
        "stage boundaries half a step late",
        "batching/curriculum.py",
        "* total_steps - half)",
        "* total_steps)",
        "batching/test_curriculum.py",
    ),
    Fault(
        "the smallest fractions go up",
        "batching/rounding.py",
        "np.where(partial, -fractions, 1.0)",
        "np.where(partial, fractions, 1.0)",
        "batching/test_curriculum.py",
    ),
    Fault(
        "ramps start at the wrong mix",
        "batching/curriculum.py",
        "else schedule.shares(index - 1)\n        polynomials",
        "else schedule.shares(index)\n        polynomials",
        "batching/test_curriculum.py",
    ),
    Fault(
        "positions continue across documents",
        "batching/collate.py",
        "join([np.arange(length) for length in lengths], 0)",
        "join([np.arange(length) + sum(lengths[:n]) for n, length in enumerate(lengths)], 0)",
        "modeling/test_attention.py modeling/test_loss.py",
    ),
    Fault(
        "targets off by one",
        "batching/collate.py",
        "np.append(mask[1:], False) for mask",
        "np.append(mask[:-1], False) for mask",
        "modeling/test_loss.py",
    ),
    Fault(
        "documents in a packed microbatch attend to each other",
        "batching/collate.py",
        "tuple(lengths) if packing",
        "(sum(lengths),) if packing",
        "modeling/test_loss.py",
    ),
    Fault(
        "the denominator counts tokens",
        "batching/steps.py",
        "supervised_tokens=int(supervised.sum())",
        "supervised_tokens=int(self.samples.lengths[indices].sum())",
        "modeling/test_loss.py",
    ),
    Fault(
        "smaller microbatches below the longest sample",
        "batching/steps.py",
        "max(self.token_budget // 2, longest_sample_tokens)",
        "self.token_budget // 2",
        "training/test_out_of_memory.py batching/test_microbatch_schedule.py modeling/test_loss.py",
    ),
    Fault(
        "losses not scaled for DDP's mean",
        "training/executor.py",
        "self.scale = 1 if self.can_retry else accelerator.num_processes",
        "self.scale = 1",
        "modeling/test_loss.py training/test_grid_sample.py",
    ),
    Fault(
        "the rehearsed microbatch is trained on",
        "training/executor.py",
        "work.insert(0, (REHEARSAL, self.largest, 0.0))",
        "work.insert(0, (REHEARSAL, self.largest, weight))",
        "modeling/test_loss.py",
    ),
    Fault(
        "the rehearsal shifts the microbatches' dropout",
        "training/executor.py",
        "work = [(number, microbatch, weight) for number, microbatch in enumerate(microbatches)]",
        "work = [(n + (self.largest is not None), m, weight) for n, m in enumerate(microbatches)]",
        "training/test_resume.py",
        only="dropout",
    ),
    Fault(
        "dropout ignores the microbatch's number",
        "training/executor.py",
        'f"{seed}:{step}:{microbatch}:{rank}"',
        'f"{seed}:{step}:{rank}"',
        "modeling/test_loss.py",
    ),
    Fault(
        "chunked losses without softcapping",
        "modeling/loss.py",
        "    if softcap is not None:\n        logits = soft_cap",
        "    if False:\n        logits = soft_cap",
        "modeling/test_loss.py",
    ),
    Fault(
        "learning rates do not follow the schedule",
        "training/trainer.py",
        "        self.lr_scheduler.set(inputs.step)\n",
        "",
        "training/test_nonfinite.py",
        only="resumed_right_after",
    ),
    Fault(
        "a non-finite step is applied",
        "training/optimizers.py",
        "        part.found_inf = nonfinite",
        "        part.found_inf = None",
        "training/test_optimizers.py training/test_nonfinite.py",
    ),
    Fault(
        "the host forgets which step failed",
        "training/guards.py",
        "        self._unread.append((step, batch, nonfinite))",
        "        self._unread.append((step + 1, batch, nonfinite))",
        "training/test_guards.py training/test_nonfinite.py",
    ),
    Fault(
        "losses are added one at a time",
        "modeling/loss.py",
        "return torch.where(belongs, losses, losses.new_zeros(())).sum(dim=1)",
        "return losses.new_zeros(count).index_add_(0, difficulties, losses)",
        "modeling/test_loss.py",
    ),
    Fault(
        "values as narrow as they are",
        "modeling/attention.py",
        "states = nn.functional.pad(states, (0, width - states.shape[-1]))",
        "states = states",
        "modeling/test_attention.py",
    ),
    Fault(
        "float32 under autocast",
        "modeling/attention.py",
        "if torch.is_autocast_enabled(query.device.type):",
        "if False:",
        "modeling/test_attention.py",
    ),
    Fault(
        "windows on NPUs",
        "modeling/npu_attention.py",
        '"pre_tockens": sliding_window - 1,',
        '"pre_tockens": sliding_window,',
        "runtime/test_fake_npu.py",
        "attention_is_called_as_documented",
    ),
    Fault(
        "wrong fused operations are used",
        "modeling/layers.py",
        "for name, operation in ops.items() if name not in refused}",
        "for name, operation in ops.items()}",
        "modeling/test_layers.py",
        "wrong_operation_is_refused",
    ),
    Fault(
        "wrong attention kernels are used",
        "modeling/attention_check.py",
        "problem = problem or problem_of(comparison, device, dtype, min(tokens, most))",
        "problem_of(comparison, device, dtype, min(tokens, most))",
        "modeling/test_attention_check.py",
        "torchs_own_is_restored",
    ),
    Fault(
        "gradients summed over ranks",
        "config/deepspeed.py",
        '"gradient_allreduce_op": ("mean",),',
        '"gradient_allreduce_op": ("mean", "sum"),',
        "config/test_resolution.py",
    ),
    Fault(
        "DeepSpeed steps at every microbatch",
        "training/executor.py",
        "is_boundary=last)",
        "is_boundary=True)",
        "training/test_grid_sample.py",
    ),
    Fault(
        "LoRA gradients not summed over ranks",
        "training/executor.py",
        "            gradient.copy_(summed)\n",
        "            pass\n",
        "training/test_grid_sample.py",
    ),
    Fault(
        "one rank alone decides to retry",
        "training/executor.py",
        "self.can_retry and self.control.any(result is None)",
        "self.can_retry and result is None",
        "training/test_out_of_memory.py",
        only="retry_in_process",
    ),
    Fault(
        "mean losses instead of sums",
        "modeling/loss.py",
        'reduction="none")',
        'reduction="none") / max(1, len(targets))',
        "modeling/test_loss.py",
    ),
    Fault(
        "targets chunked differently from hidden states",
        "modeling/loss.py",
        "targets[part], head.softcap",
        "targets[: len(rows)], head.softcap",
        "modeling/test_loss.py",
    ),
    Fault(
        "attention looks ahead",
        "modeling/attention.py",
        "is_causal=mask is None",
        "is_causal=False",
        "modeling/test_attention.py",
    ),
    Fault(
        "a window one token too wide",
        "modeling/attention.py",
        "(distance < sliding_window)",
        "(distance <= sliding_window)",
        "modeling/test_attention.py",
    ),
    Fault(
        "documents not separated in attention",
        "modeling/attention.py",
        "document_lengths if document_lengths is not None else (query.shape[2],)",
        "(query.shape[2],)",
        "modeling/test_attention.py",
    ),
    Fault(
        "a resumed run starts at step 0",
        "training/trainer.py",
        "yield from range(self.start.step, self.total_steps)",
        "yield from range(0, self.total_steps)",
        "training/test_resume.py",
        only="older_checkpoint or logs_of_a_killed or two_then_one",
    ),
    Fault(
        "the learning rate restarts on resume",
        "training/trainer.py",
        "StepSchedule(self.optimizer, self.learning_rate_factor)",
        "StepSchedule(self.optimizer, lambda step: self.learning_rate_factor("
        "step - self.start.step))",
        "training/test_resume.py",
    ),
    Fault(
        "optimizer moments not restored",
        "training/trainer.py",
        "            self.training_state().load_moments(self.start.folder)\n",
        "            pass\n",
        "training/test_resume.py",
        only="older_checkpoint or logs_of_a_killed or two_then_one",
    ),
    Fault(
        "evaluation divides by samples",
        "training/trainer.py",
        '{"loss": total / tokens}',
        '{"loss": total / len(step_batches.samples)}',
        "modeling/test_loss.py",
    ),
    Fault(
        "the optimizer's step count is lost",
        "training/optimizers.py",
        'state["step"] = step_count(step, optimizer, parameter)',
        'state["step"] = step_count(0, optimizer, parameter)',
        "training/test_resume.py",
        only="older_checkpoint or logs_of_a_killed or two_then_one",
    ),
    Fault(
        "checkpoint content not verified",
        "storage/checkpoint_files.py",
        "    if hashes:\n        names",
        "    if False:\n        names",
        "storage/test_checkpoint_files.py",
        only="not killed_at and not error_of_the_disk",
    ),
    Fault(
        "the run folder not synced after the rename",
        "storage/checkpoint_files.py",
        "        durable_files.move(self.folder, target)\n       "
        " durable_files.sync_folder(self.run_folder)",
        "        durable_files.move(self.folder, target)",
        "storage/test_checkpoint_files.py",
        only="not killed_at and not error_of_the_disk",
    ),
    Fault(
        "broken checkpoints count as kept",
        "storage/checkpoint_files.py",
        "        if not validity.valid:\n            # else it was reported when it was new\n            if not enough",
        "        if not validity.valid and False:\n            # else it was reported when it was new\n            if not enough",
        "storage/test_checkpoint_files.py",
        only="not killed_at and not error_of_the_disk",
    ),
    Fault(
        "resume from a broken checkpoint",
        "storage/checkpoint_files.py",
        "        if validity.valid:\n            return folder, skipped",
        "        if True:\n            return folder, skipped",
        "storage/test_checkpoint_files.py",
        only="not killed_at and not error_of_the_disk",
    ),
    Fault(
        "one checkpoint too few kept",
        "storage/checkpoint_files.py",
        "enough = kept >= keep",
        "enough = kept >= keep - 1",
        "storage/test_checkpoint_files.py",
        only="not killed_at and not error_of_the_disk",
    ),
    Fault(
        "warm-up one step late",
        "config/schedules.py",
        "return step / max(1, settings.warmup_steps)",
        "return max(0, step - 1) / max(1, settings.warmup_steps)",
        "config/test_schedules.py",
    ),
    Fault(
        "the cosine does not reach 0",
        "config/schedules.py",
        "0.5 * (1.0 + math.cos(",
        "0.5 * (1.2 + math.cos(",
        "config/test_schedules.py",
    ),
    Fault(
        "vectors get weight decay",
        "training/optimizers.py",
        '"weight_decay": 0.0,',
        '"weight_decay": 0.1,',
        "training/test_optimizers.py",
    ),
    Fault(
        "the parts of the optimizer do not share state",
        "training/optimizers.py",
        "            part.state = self.state\n",
        "            pass\n",
        "training/test_optimizers.py training/pretraining/test_pretrain.py",
    ),
    Fault(
        "a split by the position of a record",
        "data/selection.py",
        "return number, content, content, found",
        "return number, content, number * 0x9E3779B97F4A7C15 % 2**64, found",
        "data/test_selection.py",
    ),
    Fault(
        "the last of equal records kept instead of the first",
        "data/selection.py",
        'np.unique(keys["content"], return_index=True)[1]',
        'len(keys) - 1 - np.unique(keys["content"][::-1], return_index=True)[1]',
        "data/test_selection.py",
    ),
    Fault(
        "n-grams across two documents",
        "commands/inspect/ngrams.py",
        "whole = self.texts[:count] == self.texts[length - 1 : length - 1 + count]",
        "whole = np.ones(count, dtype=bool)",
        "commands/inspect/test_ngrams.py",
    ),
    Fault(
        "plain text without its end token",
        "data/encoding/render.py",
        "ids = np.append(ids, np.int32(self._end_id))",
        "pass",
        "data/test_columns.py",
    ),
    Fault(
        "the preference reference has its adapter on",
        "modeling/lora.py",
        "        layer._disable_adapters = True\n",
        "        layer._disable_adapters = False\n",
        "training/test_preference_runs.py",
        only="adapter_off",
    ),
    Fault(
        "preference losses divided by targets",
        "training/preferences/objective.py",
        "        return len(batch.indices)\n",
        "        return batch.supervised_tokens\n",
        "training/test_preference_runs.py",
        only="begins_at",
    ),
    Fault(
        "the rejected answer before the chosen one",
        "training/preferences/objective.py",
        "in (part[0::2], part[1::2]))",
        "in (part[1::2], part[0::2]))",
        "modeling/test_preference_loss.py",
    ),
    Fault(
        "a trained head's weights without the preference factors",
        "modeling/preference_loss.py",
        "(rows * upstream[part, None]).to(dtype)",
        "rows",
        "modeling/test_preference_loss.py",
    ),
)


def caught_by(fault: Fault, folder: Path) -> str:
    """The first test that fails with the fault in the copy of the tree in `folder`; "" where none
    does.
    """
    path = folder / "finetune" / fault.file
    source = path.read_text(encoding="utf-8")
    assert fault.right in source, f"{fault.name}: {fault.file} has changed"
    path.write_text(source.replace(fault.right, fault.wrong, 1), encoding="utf-8")
    tests = [f"tests/{name}" for name in fault.tests.split()]
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *tests,
    ]
    words += ["-k", fault.only] if fault.only else []
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(source, encoding="utf-8")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    assert done.returncode == (1 if failed else 0), done.stdout + done.stderr
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else ""


def copy_tree(folder: Path) -> None:
    """What the tests need, into an empty folder."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(
                source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(source, target)


def main() -> int:
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in sys.argv[1:])]
    lines, missed = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        copy_tree(Path(temporary))
        for fault in chosen:
            test = caught_by(fault, Path(temporary))
            missed += not test
            lines.append(
                f"| {fault.name} | `{fault.file}` | {f'`{test}`' if test else '**not caught**'} |"
            )
            print(lines[-1], flush=True)
    if len(chosen) == len(FAULTS):
        head = (
            "# Deliberate faults\n\nEach fault was put into the core to check that a test of `make"
            " test` fails:\n"
        )
        head += f"**{len(chosen) - missed} of {len(chosen)} "
        head += "caught**. `make faults` writes this page.\n\n"
        head += "| fault | in | first test that failed |\n|---|---|---|\n"
        TABLE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
