"""Started by doctor: read model folder, tokenizer, template and data of a configuration as a run
would. Trains nothing.

    python -m finetune.commands.doctor.data_probe < REQUEST

with the arguments of `probe` as REQUEST, and the language.

Data up to LARGE_BYTES is fully tokenized, into a temporary cache. For larger data, only the first
SAMPLED_RECORDS records in each file are checked, and only their form.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from finetune.commands.doctor.check import Check, failed
from finetune.commands.doctor.probe import answer_with
from finetune.config.kinds import KINDS, register
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve
from finetune.config.run_config import RunConfig
from finetune.errors import FinetuneError
from finetune.runtime.language import _

if TYPE_CHECKING:
    from finetune.data.corpus.windows import JoinedWindows, Windows
    from finetune.data.reading.files import DataFile

LARGE_BYTES = 32 << 20
SAMPLED_RECORDS = 20_000


def probe_sft(config: RunConfig) -> Iterator[Check]:
    """Check model, tokenizer and template, then the data."""
    from finetune.data.encoding.templates import load_tokenizer
    from finetune.modeling.hub import with_model_found
    from finetune.modeling.pretrained import check_model

    config = with_model_found(config)
    model_config = check_model(config)
    check = Check("model", values={"model_type": model_config.model_type})
    yield check.ok("{model}: {model_type}", model=config.model)
    template = config.template
    tokenizer = load_tokenizer(
        config.model, template=template, trust_remote_code=config.trust_remote_code
    )
    what = _("{tokens:,} tokens, template: {template}")
    shown = template or _("the tokenizer's own")
    yield Check("tokenizer").ok(what, tokens=len(tokenizer), template=shown)
    yield _check_data(config, "train", model_config, tokenizer)
    if config.validates:
        yield _check_data(config, "valid", model_config, tokenizer)


def _check_data(
    config: RunConfig, side: Literal["train", "valid"], model_config: Any, tokenizer: Any
) -> Check:
    from finetune.data.dataset import samples_of
    from finetune.data.reading.files import expand_sources
    from finetune.modeling.model_config import check_ids

    files = expand_sources(config.sources if side == "train" else config.held_out)
    names = ", ".join(file.path.name for file in files[:3]) + (" ..." if len(files) > 3 else "")
    if sum(file.path.stat().st_size for file in files) > LARGE_BYTES:
        return _check_form(config, files, names)
    difficulties = config.curriculum.levels if config.use_curriculum else None
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        samples = samples_of(config, tokenizer, difficulties, side, cache_dir=folder, num_proc=1)
        check_ids(model_config, samples, tokenizer)
        report = samples.report
    values = {
        "rows": report.records_read,
        "samples": report.samples,
        "tokens": report.tokens,
    }
    check = Check("data", values=values)
    what = _("{files}: {rows:,} records, {samples:,} samples, {tokens:,} tokens")
    if doubts := "; ".join(report.warnings()):
        return check.warn(what + "; {doubts}", "{doubts}", files=names, doubts=doubts)
    return check.ok(what, files=names)


def _check_form(config: RunConfig, files: tuple[DataFile, ...], names: str) -> Check:
    """Check the form of the first records of large files."""
    from finetune.data.formats import MediaLeftOut
    from finetune.data.preference.reader import reader_of
    from finetune.data.report import ProblemLog, RecordProblem

    problems, read = ProblemLog(), 0
    levels, difficulty_field = config.curriculum.levels, config.difficulty_field
    make_reader = reader_of(config.preference_form)
    for number, file in enumerate(files):
        reader = make_reader(levels, difficulty_field, file.source, config.on_media)
        for line, _record, found in islice(reader.file(file.path), SAMPLED_RECORDS):
            read += 1
            if isinstance(found, RecordProblem) and not isinstance(found, MediaLeftOut):
                problems.add((number, line), f"{file.path}:{line}", found)
    if config.on_bad_row == "refuse":
        problems.refuse(read)
    check = Check("data", values={"rows": read, "bad": problems.total})
    return check.ok(
        _("{files}: large; the form of {read:,} records is right, they were not tokenized"),
        files=names,
        read=read,
    )


def probe_pretrain(config: PretrainConfig) -> Iterator[Check]:
    """Check tokenizer and token files, and whether they make a step."""
    from finetune.data.corpus.token_shards import TokenShards, tokenizer_folder
    from finetune.data.corpus.tokenizer import open_tokenizer, tokenizer_hash, vocabulary_of
    from finetune.data.corpus.windows import Windows, training_windows
    from finetune.modeling.hub import with_model_found

    folder = with_model_found(config).model or config.tokenizer
    folder = folder or tokenizer_folder(config.train_data_path, split="train")
    known: dict[str, Any] = {"vocab_size": config.vocab_size, "tokenizer_hash": None}
    if folder is None:
        yield Check("tokenizer").warn(
            _("no tokenizer: no bits per byte, no samples"), _("give --tokenizer FOLDER")
        )
    else:
        tokenizer = open_tokenizer(folder)
        vocabulary = vocabulary_of(tokenizer)
        yield Check("tokenizer").ok(_("{tokens:,} tokens"), tokens=vocabulary)
        known["vocab_size"] = config.vocab_size or vocabulary
        known["tokenizer_hash"] = tokenizer_hash(tokenizer)
    windows = training_windows(config, **known)
    if len(windows) < config.global_batch_size:
        values = {"tokens": windows.tokens, "windows": len(windows)}
        yield Check("data", values=values).fail(
            _(
                "{tokens:,} tokens, {windows:,} windows, fewer than the {needed:,} of one step"
                " (--train-data-path)"
            ),
            _("give more data, or a --total-batch-size of at most {most}"),
            needed=config.global_batch_size,
            most=len(windows) * config.max_seq_len,
        )
        return
    yield _counted("train", windows)
    if config.valid_data_path:
        shards = TokenShards(config.valid_data_path, split="val", **known)
        yield _counted("valid", Windows(shards, config.max_seq_len, name="valid"))


def _counted(split: str, windows: Windows | JoinedWindows) -> Check:
    check = Check("data", values={"tokens": windows.tokens, "windows": len(windows)})
    return check.ok(
        _("{split}: {tokens:,} tokens, {windows:,} windows, {cut:.1%} of the tokens cut"),
        split=split,
        cut=windows.cut_tokens / windows.tokens,
    )


def probe(
    kind: str, module: str, arguments: Sequence[str], world_size: int
) -> list[dict[str, Any]]:
    """Return the checks of a kind's own probe, as JSON.

    Args:
        module: the kind's entry; a kind from elsewhere is not in the table of this process.
        arguments: the run's command line.
    """
    # warnings of the data are part of the report
    logging.getLogger("finetune").setLevel(logging.ERROR)
    register(kind, module)
    found, checks = KINDS[kind], []
    config = resolve(arguments, world_size=world_size, model_class=found.config_class).config
    try:
        for check in found.probe(config):
            checks.append(check)
    except FinetuneError as error:
        done = {check.name for check in checks}
        checks += failed(next((name for name in found.probed if name not in done), "data"), error)
    return [asdict(check) for check in checks]


if __name__ == "__main__":
    answer_with(probe)
