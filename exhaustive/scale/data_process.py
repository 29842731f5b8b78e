"""One contender of exhaustive/scale/data.py in a process of its own, under the Python that has its
library.

    python exhaustive/scale/data_process.py SETTINGS.json

Each prepares the same rows as its users would before a training: from the file on disk to samples
that can be drawn.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any


def memory(*names: str) -> dict[str, int]:
    """Bytes of this process by smaps_rollup's names."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    found = {name.rstrip(":"): int(value) * 1024 for name, value, _ in map(str.split, lines)}
    return {name: found[name] for name in names}


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def ours(work: dict[str, Any]) -> dict[str, Any]:
    """`prepare_fine_tuning` of a run, as each of its processes calls it."""
    from finetune.data import samples as sample_arrays

    # some, of few rows too
    sample_arrays.SHARD_TOKENS = min(sample_arrays.SHARD_TOKENS, work["rows"] * 4)
    # Whatever it imports is there before, so that it is no memory of the data's.
    import finetune.batching.sampler
    import finetune.data.dataset
    import finetune.data.encoding.templates
    import finetune.modeling.attention
    import finetune.modeling.model_config  # noqa: F401
    from finetune.config.run_config import RunConfig
    from finetune.training.prepare import prepare_fine_tuning

    logging.basicConfig(level=logging.INFO, format="%(message)s", filename=work["log"])
    config = RunConfig(
        model=work["model"],
        data=(work["data"],),
        cache_dir=work["cache"],
        output_dir=str(Path(work["cache"]) / "run"),
        finetuning="lora",
        cutoff_len=work["cutoff_len"],
        global_batch_size=128,
        report_to=("none",),
        preprocessing_num_workers=work["processes"],
    )
    private = ("Private_Dirty", "Pss")
    before, begin, spent = memory(*private), time.perf_counter(), cpu_seconds()
    data = prepare_fine_tuning(config)
    seconds, after = time.perf_counter() - begin, memory(*private)
    facts = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds() - spent,
        "before": before,
        "after": after,
        "samples": len(data.train),
    }
    begin = time.perf_counter()
    for step in range(0, len(data.batches), max(1, len(data.batches) // 100)):
        for index in data.batches.indices(step).tolist():
            data.train[index]
    facts |= {"steps_seconds": time.perf_counter() - begin, "after_steps": memory(*private)}
    return facts | {"tokens": data.train.report.tokens, "fingerprint": data.train.fingerprint}


def invented(work: dict[str, Any]) -> dict[str, Any]:
    """As ours, but the tokens are random numbers: what is large on the disk, without the hours that
    make it.
    """
    import numpy as np

    from finetune.data.passes import Preparation
    from finetune.data.report import DataReport
    from finetune.data.samples import ROW, SCRATCH, SampleWriter

    def write_samples(self: Preparation, folder: Path) -> dict[str, Any]:
        choose, portion = np.random.default_rng(1), 100_000
        writer = SampleWriter(folder)
        for first in range(0, work["rows"], portion):
            rows = np.zeros(portion, ROW)
            rows["row_ids"] = rows["lines"] = np.arange(first, first + portion)
            rows["levels"] = choose.integers(0, 3, portion)
            rows["lengths"], rows["supervised_counts"] = choose.integers(20, 36, portion), 7
            tokens = choose.integers(0, 4096, int(rows["lengths"].sum()), dtype=np.int32)
            writer.add(tokens, tokens % 4 == 0, rows)
            if writer.is_full:
                writer.finish({})
        writer.finish({})
        fingerprint = writer.write_arrays(of_preferences=False)
        shutil.rmtree(folder / SCRATCH)
        shards = [[state["samples"], state["tokens"]] for state in writer.states]
        report = vars(
            DataReport(work["rows"], work["rows"], work["rows"], difficulty_field_found=True)
        )
        names = ["explain", "reasoning", "topology"]
        facts = {
            "fingerprint": fingerprint,
            "level_names": names,
            "report": report,
            "highest_id": 4095,
        }
        return facts | {"shards": shards}

    Preparation.write_samples = write_samples  # type: ignore[method-assign]
    return ours(work)


def trl(work: dict[str, Any]) -> dict[str, Any]:
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    begin, spent = time.perf_counter(), cpu_seconds()
    rows = load_dataset("json", data_files=work["data"], split="train")
    loaded = time.perf_counter()
    trainer = SFTTrainer(
        model=work["model"],
        args=SFTConfig(
            output_dir=str(Path(work["cache"]) / "run"),
            max_length=work["cutoff_len"],
            assistant_only_loss=True,
            dataset_num_proc=work["processes"],
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
    )
    seconds = time.perf_counter() - begin
    dataset: Any = trainer.train_dataset
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds() - spent,
        "reading_seconds": loaded - begin,
        "samples": len(dataset),
    }


def llamafactory(work: dict[str, Any]) -> dict[str, Any]:
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    settings = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": work["model"],
        "dataset_dir": str(Path(work["data"]).parent),
        "dataset": Path(work["data"]).stem,
        "output_dir": str(Path(work["cache"]) / "run"),
        "finetuning_type": "lora",
        "cutoff_len": work["cutoff_len"],
        "preprocessing_num_workers": work["processes"],
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
    }
    begin, spent = time.perf_counter(), cpu_seconds()
    model_args, data_args, training_args, _, _ = get_train_args(settings)
    tokenizer_module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizer_module["tokenizer"], data_args)
    module = get_dataset(
        template, model_args, data_args, training_args, stage="sft", **tokenizer_module
    )
    facts = {"seconds": time.perf_counter() - begin, "cpu_seconds": cpu_seconds() - spent}
    return facts | {"samples": len(module["train_dataset"])}


CONTENDERS = {"ours": ours, "invented": invented, "trl": trl, "llamafactory": llamafactory}


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_CACHE"] = work["cache"]
    result = CONTENDERS[work["contender"]](work)
    Path(work["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
