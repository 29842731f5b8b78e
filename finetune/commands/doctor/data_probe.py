"""Started by doctor: read model folder, tokenizer, template and data of a configuration as a run
would. Trains nothing.

    python -m finetune.commands.doctor.data_probe REPORT < REQUEST

with the arguments of `probe` as REQUEST, and the language.

Data up to LARGE_BYTES is tokenized whole, into a temporary cache; of larger data only the form of
the first SAMPLED_RECORDS records of each file is checked.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from finetune.commands.doctor.check import Check, fail, failed, ok, warn
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
    """Model, tokenizer and template, then the data."""
    from finetune.data.encoding.templates import load_tokenizer
    from finetune.modeling.hub import with_model_found
    from finetune.modeling.model_config import (
        check_adapter,
        check_unquantised,
        check_weights,
        load_model_config,
    )

    config = with_model_found(config)
    model_config = load_model_config(config.model, trust_remote_code=config.trust_remote_code)
    check_unquantised(model_config)
    check_weights(config.model)
    if config.finetuning == "lora":
        check_adapter(model_config, config)
    yield ok(
        "model", f"{config.model}: {model_config.model_type}", model_type=model_config.model_type
    )
    tokenizer = load_tokenizer(
        config.model, template=config.template, trust_remote_code=config.trust_remote_code
    )
    what = _("{tokens:,} tokens, template: {template}")
    yield ok(
        "tokenizer",
        what.format(tokens=len(tokenizer), template=config.template or _("the tokenizer's own")),
    )
    yield _check_data(config, "train", model_config, tokenizer)
    if config.validates:
        yield _check_data(config, "valid", model_config, tokenizer)


def _check_data(
    config: RunConfig, side: Literal["train", "valid"], model_config: Any, tokenizer: Any
) -> Check:
    from finetune.data.reading.files import expand_sources
    from finetune.modeling.model_config import check_ids

    files = expand_sources(config.sources if side == "train" else config.held_out)
    size = sum(file.path.stat().st_size for file in files)
    names = ", ".join(file.path.name for file in files[:3]) + (" ..." if len(files) > 3 else "")
    if size > LARGE_BYTES:
        return _check_form(config, files, names)
    from finetune.data.dataset import samples_of

    difficulties = config.curriculum.levels if config.use_curriculum else None
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        samples = samples_of(config, tokenizer, difficulties, side, cache_dir=folder, num_proc=1)
        check_ids(model_config, samples, tokenizer)
        report = samples.report
    values = {"rows": report.records_read, "samples": report.samples, "tokens": report.tokens}
    what = _("{files}: {rows:,} records, {samples:,} samples, {tokens:,} tokens").format(
        files=names, **values
    )
    doubts = "; ".join(report.warnings())
    return (
        warn("data", f"{what}; {doubts}", doubts, **values)
        if doubts
        else ok("data", what, **values)
    )


def _check_form(config: RunConfig, files: tuple[DataFile, ...], names: str) -> Check:
    """The form of the first records of large files."""
    from finetune.data.formats import MediaLeftOut
    from finetune.data.preference.reader import reader_of
    from finetune.data.report import ProblemLog, RecordProblem

    problems, read = ProblemLog(), 0
    for number, file in enumerate(files):
        reader = reader_of(config.preference_form)(
            config.curriculum.levels, config.difficulty_field, file.source, config.on_media
        )
        for line, _record, found in islice(reader.file(file.path), SAMPLED_RECORDS):
            read += 1
            if isinstance(found, RecordProblem) and not isinstance(found, MediaLeftOut):
                problems.add((number, line), f"{file.path}:{line}", found)
    if config.on_bad_row == "refuse":
        problems.refuse(read)
    what = _("{files}: large; the form of {read:,} records is right, they were not tokenized")
    return ok("data", what.format(files=names, read=read), rows=read, bad=problems.total)


def probe_pretrain(config: PretrainConfig) -> Iterator[Check]:
    """Tokenizer and token files, and whether they make a step."""
    from finetune.data.corpus.token_shards import TokenShards, tokenizer_folder
    from finetune.data.corpus.tokenizer import open_tokenizer, tokenizer_hash, vocabulary_of
    from finetune.data.corpus.windows import Windows, training_windows
    from finetune.modeling.hub import with_model_found

    folder = (
        with_model_found(config).model
        or config.tokenizer
        or tokenizer_folder(config.train_data_path, split="train")
    )
    tokenizer = None if folder is None else open_tokenizer(folder)
    known: dict[str, Any] = {"vocab_size": config.vocab_size, "tokenizer_hash": None}
    if tokenizer is None:
        what = _("no tokenizer: no bits per byte, no samples")
        yield warn("tokenizer", what, _("give --tokenizer FOLDER"))
    else:
        vocabulary = vocabulary_of(tokenizer)
        yield ok("tokenizer", _("{tokens:,} tokens").format(tokens=vocabulary))
        known = {
            "vocab_size": config.vocab_size or vocabulary,
            "tokenizer_hash": tokenizer_hash(tokenizer),
        }
    windows = training_windows(config, **known)
    if len(windows) < config.global_batch_size:
        values = {"tokens": windows.tokens, "windows": len(windows)}
        what = _(
            "{tokens:,} tokens, {windows:,} windows, fewer than the {needed:,} of one step"
            " (--train-data-path)"
        )
        fix = _("give more data, or a --total-batch-size of at most {most}")
        fix = fix.format(most=len(windows) * config.max_seq_len)
        yield fail("data", what.format(needed=config.global_batch_size, **values), fix)
        return
    yield _counted("train", windows)
    if config.valid_data_path:
        shards = TokenShards(config.valid_data_path, split="val", **known)
        yield _counted("valid", Windows(shards, config.max_seq_len, name="valid"))


def _counted(split: str, windows: Windows | JoinedWindows) -> Check:
    values = {"tokens": windows.tokens, "windows": len(windows)}
    what = _("{split}: {tokens:,} tokens, {windows:,} windows, {cut:.1%} of the tokens cut")
    return ok(
        "data",
        what.format(split=split, cut=windows.cut_tokens / windows.tokens, **values),
        **values,
    )


def probe(
    kind: str, module: str, arguments: Sequence[str], world_size: int
) -> list[dict[str, Any]]:
    """The checks of a kind's own probe, as JSON.

    Args:
        module: the kind's entry; a kind from elsewhere is not in the table of this process.
        arguments: the run's command line.
    """
    # warnings of the data are part of the report
    logging.getLogger("finetune").setLevel(logging.ERROR)
    register(kind, module)
    found = KINDS[kind]
    config = resolve(arguments, world_size=world_size, model_class=found.config_class).config
    checks: list[Check] = []
    try:
        checks.extend(found.probe(config))
    except FinetuneError as error:
        done = {check.name for check in checks}
        checks += failed(next((name for name in found.probed if name not in done), "data"), error)
    return [check.to_json() for check in checks]


if __name__ == "__main__":
    answer_with(probe)
