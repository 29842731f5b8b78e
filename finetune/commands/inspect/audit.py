"""`python -m finetune inspect --audit`: what should be known of data before training, as a table or
as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.config.run_config import RunConfig
from finetune.data.audit import OVERLAP_WORDS, Audit
from finetune.data.cache import default_cache_dir
from finetune.data.preparation import processes_for
from finetune.data.reading.sources import expand_sources
from finetune.data.records import RecordReader
from finetune.data.samples import Samples

if TYPE_CHECKING:
    from rich.console import Console


def audit_data(
    config: RunConfig, train: Samples, valid: Samples | None, benchmarks: Sequence[str]
) -> dict[str, Any]:
    """The audit of a run's data, as plain JSON.

    Args:
        train: the samples of the training side, bad records dropped.
        valid: those of the other side of a split.
        benchmarks: files that must not be in the data, beside the run's validation data.
    """
    files = expand_sources(config.sources)
    levels = config.curriculum.levels if config.use_curriculum else None
    readers = tuple(
        RecordReader(levels, config.difficulty_field, file.source, config.on_media)
        for file in files
    )
    paths = [file.path for file in files]
    audit = Audit(files, readers, processes_for(paths, config.preprocessing_num_workers))
    scratch = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
    found = audit.duplicates(scratch)
    training = np.unique(train.record_ids) if valid is not None or config.drop_duplicates else None
    held_out = [audit.held_out(name, expand_sources([name])) for name in benchmarks]
    if valid is not None:
        name = f"the validation side of --valid-split {config.valid_split}"
        held_out.insert(0, audit.held_out(name, None, np.unique(valid.record_ids)))
    if config.valid_data:
        held_out.insert(
            0, audit.held_out("the validation data", expand_sources(config.valid_sources))
        )
    report = train.report
    left_out = {"images, video or sound": report.left_out_media} if report.left_out_media else {}
    return {
        "files": [str(path) for path in paths],
        "records": report.records_read,
        "unusable": report.dropped | left_out,
        "cutoff_len": config.cutoff_len,
        "over_cutoff": {
            "prompts_trimmed": report.trimmed_records,
            "turns_dropped": report.dropped_turns,
            "answers_cut": report.cut_answers,
            "texts_cut": report.cut_texts,
        },
        **{name: value for name, value in found.items() if name != "records"},
        "overlap_words": OVERLAP_WORDS,
        "overlap": [audit.overlap(one, training) for one in held_out],
    }


def print_audit(result: dict[str, Any], console: Console) -> None:
    """The table, and a few places below it."""
    from rich.table import Table

    table = Table(title="audit", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    records = result["records"]

    def add(name: str, count: int) -> None:
        table.add_row(name, f"{count:,} ({count / max(records, 1):.1%})")

    table.add_row("records", f"{records:,}")
    for reason, count in result["unusable"].items():
        add(f"unusable: {reason}", count)
    for name, count in result["over_cutoff"].items():
        add(f"over {result['cutoff_len']:,} tokens: {name.replace('_', ' ')}", count)
    add("exact duplicates", result["exact_duplicates"])
    add("near duplicates", result["near_duplicates"])
    for script, count in sorted(result["scripts"].items(), key=lambda entry: -entry[1]):
        add(f"script: {script}", count)
    for overlap in result["overlap"]:
        table.add_row(
            f"shared with {overlap['name']}",
            f"{overlap['found']:,} of its {overlap['records']:,} by"
            f" {overlap['training_records']:,}",
        )
    console.print(table)
    pairs = [("says the same as", pair) for pair in result["exact_examples"]]
    pairs += [("says nearly the same as", pair) for pair in result["near_examples"]]
    pairs += [
        ("is found in", pair) for overlap in result["overlap"] for pair in overlap["examples"]
    ]
    for words, (one, other) in pairs:
        console.print(f"{one} {words} {other}", markup=False, soft_wrap=True)
