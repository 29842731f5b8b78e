"""Data files -> samples on disk: read, checked, rendered in parallel and cached, before any process
group exists.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedTokenizerBase

from finetune.config.fields import DataSource
from finetune.data import cache
from finetune.data.encoding.render import Renderer
from finetune.data.encoding.spans import model_stop_tokens
from finetune.data.passes import Preparation
from finetune.data.preference.reader import PreferenceForm
from finetune.data.preference.render import PreferenceRenderer
from finetune.data.reading.files import expand_sources
from finetune.data.samples import PreferenceSamples, Samples
from finetune.data.selection import Selection, selection_of
from finetune.errors import DataError

if TYPE_CHECKING:
    from finetune.config.run_config import RunConfig

__all__ = ["PreferenceSamples", "Samples", "prepare_samples", "samples_of"]

logger = logging.getLogger("finetune")


def prepare_samples(
    entries: Sequence[str | Path | DataSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    cutoff_len: int,
    difficulties: Sequence[str] | None = None,
    difficulty_field: str = "difficulty",
    on_bad_row: str = "refuse",
    cache_dir: str | Path | None = None,
    num_proc: int | None = None,
    selection: Selection | None = None,
    on_media: str = "refuse",
    train_thinking: bool = True,
    preference: PreferenceForm | None = None,
) -> Samples:
    """Read data files and make their samples, or reuse them from the cache. Logs warnings of the
    report.

    Every rank may call this at the same time, before any process group exists: one does the work,
    the others wait.

    Args:
        entries: files, folders and globs, in order, or sources that say more of theirs.
        tokenizer: a fast tokenizer with a chat template (see `load_tokenizer`).
        cutoff_len: maximum tokens of a sample.
        difficulties: the difficulties' names, in order; None: difficulties are ignored.
        difficulty_field: the key that holds a record's difficulty.
        on_bad_row: "refuse" raises for bad records, "drop" leaves them out and counts them.
        cache_dir: where tokenized data is kept; None: `default_cache_dir()`.
        num_proc: processes that tokenize; None: as many as pay, up to the CPUs of this process.
        selection: which of the records; None: all.
        on_media: what becomes of records with images, video or sound: "refuse", "drop-row", or
            "drop-media", which reads their text.
        train_thinking: whether the think blocks of answers are targets, or context only.
        preference: the records are pairs of answers, or answers with labels; returns
            `PreferenceSamples`.

    Raises:
        DataError: files, records, template or cutoff are wrong (the message names them), or no
            record is left.
    """
    if on_bad_row not in ("refuse", "drop"):
        raise ValueError(f"on_bad_row is {on_bad_row!r}; it is 'refuse' or 'drop'")
    make_renderer = PreferenceRenderer if preference else Renderer
    task = Preparation(
        files=expand_sources(entries),
        renderer=make_renderer(tokenizer, cutoff_len, train_thinking=train_thinking),
        difficulties=None if difficulties is None else tuple(difficulties),
        difficulty_field=difficulty_field,
        drop_bad_records=on_bad_row == "drop",
        num_proc=num_proc,
        selection=selection or Selection(),
        on_media=on_media,
        preference=preference,
    )
    folder_of_caches = Path(cache_dir).expanduser() if cache_dir else cache.default_cache_dir()
    with cache.wrap_write_errors(folder_of_caches):
        folder_of_caches.mkdir(parents=True, exist_ok=True)
        hashes = cache.source_hashes(task.paths, folder_of_caches)

    def make(folder: Path) -> dict[str, Any]:
        made = task.write_samples(folder)
        if cache.source_hashes(task.paths, folder_of_caches) != hashes:
            raise DataError(
                "the data files were changed while they were read",
                fix="start again when they are whole",
            )
        return made

    key = {
        "data": _hash(*hashes),
        "tokenizer": _tokenizer_hash(tokenizer),
        "template": _hash(task.renderer.template.source),
        "options": task.options(),
        "code": _code_hash(),
    }
    folder = cache.open_or_make(folder_of_caches, key, make)
    samples = (PreferenceSamples if preference else Samples)(folder, task.files)
    for warning in samples.report.warnings():
        logger.warning("%s", warning)
    return samples


def samples_of(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    difficulties: Sequence[str] | None,
    side: Literal["train", "valid"] = "train",
    **changed: Any,
) -> Samples:
    """Return the samples that a run trains on, or validates on, by its settings.

    Args:
        changed: arguments of `prepare_samples` that are not those of the run.

    Raises:
        DataError: as `prepare_samples`.
    """
    splits = side == "train" or config.valid_split is not None
    arguments: dict[str, Any] = {
        "cutoff_len": config.cutoff_len,
        "difficulties": difficulties,
        "difficulty_field": config.difficulty_field,
        "on_bad_row": config.on_bad_row,
        "cache_dir": config.cache_dir,
        "num_proc": config.preprocessing_num_workers,
        "selection": selection_of(config, side) if splits else None,
        "on_media": config.on_media,
        "train_thinking": config.train_thinking,
        "preference": config.preference_form,
    }
    return prepare_samples(
        config.sources if side == "train" else config.held_out, tokenizer, **(arguments | changed)
    )


def _hash(*parts: str) -> str:
    """SHA-256 over texts, each with its length, so that no two lists of texts run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that decides a text's tokens: the serialized backend (vocabulary, merges, rules)
    and special tokens.

    Truncation and padding are left out: they are states of the moment, and we use neither.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["truncation"] = backend["padding"] = None
    specials = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if name != "pad_token"
    }
    return _hash(
        json.dumps(backend, sort_keys=True),
        json.dumps(specials, sort_keys=True),
        *model_stop_tokens(tokenizer),
    )


def _code_hash() -> str:
    """Hash the source of the modules that turn records into samples, and the versions of the
    libraries that they depend on.
    """
    here = Path(__file__).parent
    code = [
        path.read_text(encoding="utf-8")
        for path in sorted(here.rglob("*.py"))
        if path.parent.name != "corpus"
    ]
    return _hash(*code, *(version(library) for library in ("tokenizers", "transformers", "jinja2")))
