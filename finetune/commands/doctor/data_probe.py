"""Started by doctor: read model folder, tokenizer, template and data of a configuration as a run would. Trains nothing.

    python -m finetune.commands.doctor.data_probe REPORT < REQUEST

with REQUEST such as {"kind": "sft", "module": "finetune.sft", "words": [...], "world_size": 2}.

Data up to LARGE_BYTES is tokenized whole, into a temporary cache; of larger data only the form of the first
SAMPLED_RECORDS records of each file is checked.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.commands.doctor.check import Check, failed, ok, problems_of, warn
from finetune.config.kinds import register, run_kind
from finetune.config.pretrain_config import PretrainConfig
from finetune.config.resolution import resolve
from finetune.config.run_config import RunConfig
from finetune.errors import FinetuneError

LARGE_BYTES = 32 << 20
SAMPLED_RECORDS = 20_000


def probe_sft(config: RunConfig) -> Iterator[Check]:
    """Model, tokenizer and template, then the data."""
    from finetune.data.templates import load_tokenizer
    from finetune.modeling.pretrained import check_embeddings, check_lora_targets, check_weights, load_model_config

    model_config = load_model_config(config.model, trust_remote_code=config.trust_remote_code)
    check_weights(config.model)
    if config.finetuning == "lora":
        check_lora_targets(model_config, config.lora_target_modules, trust_remote_code=config.trust_remote_code)
    said = f"{config.model}: {model_config.model_type}"
    yield ok("model", said, said, model_type=model_config.model_type)
    tokenizer = load_tokenizer(config.model, template=config.template, trust_remote_code=config.trust_remote_code)
    check_embeddings(model_config, tokenizer, config.model)
    english, chinese = (config.template,) * 2 if config.template else ("the tokenizer's own", "分词器自带")
    said = f"{len(tokenizer):,} tokens, template: {english}"
    yield ok("tokenizer", said, f"{len(tokenizer):,} 个 token，模板：{chinese}")
    for paths in filter(None, (config.data, config.valid_data)):
        yield _data(config, paths, tokenizer)


def _data(config: RunConfig, paths: tuple[str, ...], tokenizer: Any) -> Check:
    from finetune.data.files import expand_paths

    sources = expand_paths(paths)
    size = sum(path.stat().st_size for path in sources)
    names = ", ".join(path.name for path in sources[:3]) + (" ..." if len(sources) > 3 else "")
    if size > LARGE_BYTES:
        return _form(config, sources, names)
    from finetune.data.dataset import prepare_samples

    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as folder:
        report = prepare_samples(
            paths,
            tokenizer,
            cutoff_len=config.cutoff_len,
            difficulties=config.curriculum.levels if config.use_curriculum else None,
            difficulty_field=config.difficulty_field,
            on_bad_row=config.on_bad_row,
            cache_dir=folder,
            num_proc=1,
        ).report
    values = {"rows": report.records_read, "samples": report.samples, "tokens": report.tokens}
    said = f"{names}: {report.records_read:,} rows, {report.samples:,} samples, {report.tokens:,} tokens"
    chinese = f"{names}：{report.records_read:,} 行，{report.samples:,} 个样本，{report.tokens:,} 个 token"
    doubts = "; ".join(report.warnings())
    if doubts:
        return warn("data", (f"{said}; {doubts}", f"{chinese}；{doubts}"), (doubts, doubts), **values)
    return ok("data", said, chinese, **values)


def _form(config: RunConfig, sources: tuple[Path, ...], names: str) -> Check:
    """The form of the first records of large files."""
    from finetune.data.files import read_records
    from finetune.data.formats import detect_format, to_conversation
    from finetune.data.problems import ProblemLog, RecordProblem

    problems, read = ProblemLog(), 0
    for number, path in enumerate(sources):
        form = None
        for line, record in islice(read_records(path), SAMPLED_RECORDS):
            read += 1
            try:
                if isinstance(record, RecordProblem):
                    raise record
                form = form or detect_format(record)
                to_conversation(record, form, config.curriculum.levels, config.difficulty_field)
            except RecordProblem as problem:
                problems.add((number, line), f"{path}:{line}", problem)
    if config.on_bad_row == "refuse":
        problems.refuse(read)
    said = f"{names}: large; the form of {read:,} rows is right, they were not tokenized"
    return ok("data", said, f"{names}：数据较大；已检查 {read:,} 行的格式，未做分词", records=read, bad=problems.total)


def probe_pretrain(config: PretrainConfig) -> Iterator[Check]:
    """Tokenizer and token files, and whether they make a step."""
    from finetune.data.corpus.token_shards import TokenShards, tokenizer_folder, tokenizer_hash
    from finetune.data.corpus.tokenizer import open_tokenizer, vocabulary_of
    from finetune.data.corpus.windows import Windows

    folder = config.tokenizer or tokenizer_folder(config.train_data_path, split="train")
    tokenizer = None if folder is None else open_tokenizer(folder)
    if tokenizer is None:
        yield warn(
            "tokenizer",
            ("no tokenizer: no bits per byte, no samples", "没有分词器：无法计算 bits per byte，也不生成样例"),
            ("give --tokenizer FOLDER", "请用 --tokenizer 指定目录"),
        )
    else:
        yield ok("tokenizer", f"{vocabulary_of(tokenizer):,} tokens", f"{vocabulary_of(tokenizer):,} 个 token")
    known = {
        "vocab_size": config.vocab_size or (None if tokenizer is None else vocabulary_of(tokenizer)),
        "tokenizer_hash": None if tokenizer is None else tokenizer_hash(tokenizer),
    }
    for name, paths, split in (("train", config.train_data_path, "train"), ("valid", config.valid_data_path, "val")):
        if not paths:
            continue
        shards = TokenShards(paths, split=split, **known)
        windows = Windows(shards, config.max_seq_len, document_aligned=config.document_aligned, name=name)
        values = {"tokens": shards.tokens, "windows": len(windows)}
        said = f"{name}: {shards.tokens:,} tokens, {len(windows):,} windows"
        if name == "train" and len(windows) < config.global_batch_size:
            from finetune.errors import DataError

            raise DataError(
                f"{said}, fewer than the {config.global_batch_size:,} of one step",
                "--train-data-path",
                f"give more data, or a --total-batch-size of at most {len(windows) * config.max_seq_len}",
            )
        yield ok("data", said, f"{name}：{shards.tokens:,} 个 token，{len(windows):,} 个窗口", **values)


def main() -> None:
    logging.getLogger("finetune").setLevel(logging.ERROR)  # warnings of the data are part of the report
    request = json.load(sys.stdin)
    register(request["kind"], request["module"])  # a kind from elsewhere is not in the table of this process
    kind = run_kind(request["kind"])
    config = resolve(request["words"], world_size=request["world_size"], model_class=kind.config_class).config
    checks: list[Check] = []
    try:
        checks.extend(kind.call(kind.probe, config))
    except FinetuneError as error:
        done = {check.name for check in checks}
        name = next((name for name in kind.probed if name not in done), "data")
        checks += [failed(name, problem) for problem in problems_of(error)]
    found = [{"name": c.name, "verdict": c.verdict, "what": c.what, "fix": c.fix, "values": c.values} for c in checks]
    Path(sys.argv[1]).write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
