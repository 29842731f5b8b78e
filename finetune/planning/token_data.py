"""Pretraining's token files as a plan counts them, where they are at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.config.pretrain_config import PretrainConfig
from finetune.errors import FinetuneError

DEFAULT_VOCABULARY = 32768  # of `prepare` where there are no token files yet
# A process holds where each document begins and, of best-fit windows, in which order they are
# taken.
BYTES_PER_DOCUMENT = {"stream": 0, "document": 8, "best-fit": 12}


def token_data(config: PretrainConfig) -> dict[str, Any] | None:
    """The windows of a run's training data, as `plan --json` has them; None without its files.

    Raises:
        DataError: what the run itself would refuse.
    """
    from finetune.data.corpus.windows import training_windows

    if not _shards(config):
        return None
    windows = training_windows(config, vocab_size=config.vocab_size or stream_vocabulary(config))
    return {
        "tokens": windows.tokens,
        "windows": len(windows),
        "window_kind": config.windows,
        "cut_tokens": windows.cut_tokens,
        "steps_per_pass": len(windows) / config.global_batch_size,
    }


def stream_vocabulary(config: PretrainConfig) -> int:
    """The vocabulary in the header of the first token file that has one."""
    from finetune.data.corpus.token_shards import read_header

    headers = filter(None, map(read_header, _shards(config)))
    return next((header.vocabulary for header in headers), DEFAULT_VOCABULARY)


def document_bytes(config: PretrainConfig) -> int:
    """What a process holds to know where windows begin, by the indexes of the files."""
    from finetune.data.corpus.token_shards import index_path

    each = BYTES_PER_DOCUMENT[config.windows]
    indexes = map(index_path, _shards(config) if each else ())
    return sum(path.stat().st_size // 8 for path in indexes if path.is_file()) * each


def _shards(config: PretrainConfig) -> tuple[Path, ...]:
    """The training files; none where what is named is not there."""
    from finetune.data.corpus.token_shards import find_shards

    try:
        return find_shards(config.train_data_path, "train")
    except FinetuneError:
        return ()
