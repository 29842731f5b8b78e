"""Bits per byte of texts: how well a model predicts them, comparable between tokenizers.

Each document is read alone, after the separator that pretraining puts before it (`data/corpus`).
Every token in the text is a target once: nats of all targets / (ln 2 x UTF-8 bytes of the text).
A document longer than a window is split. The first window has `max_seq_len` targets. Each later
window has the next `stride` targets, preceded by as much of the text as fits. If the stride is a
whole window, the windows match pretraining's within a document, and lm_eval's
`loglikelihood_rolling`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.batching.collate import Microbatch, collate_windows
from finetune.batching.steps import StepBatches
from finetune.commands.evaluate.measure_loss import progress, sample_sums
from finetune.commands.evaluate.options import EvalOptions
from finetune.commands.evaluate.scores import ModelScores, distinct_names, ratios
from finetune.data.corpus.documents import documents_of, find_files, units_of
from finetune.data.corpus.tokenizer import DocumentEncoder, separator_of
from finetune.data.report import RecordProblem
from finetune.errors import ConfigError, DataError
from finetune.modeling.model_config import load_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("finetune")

DEFAULT_WINDOW_TOKENS = 2048  # as in pretraining


class TextWindows:
    """Windows of documents; a `batching.steps.SampleSource` for `WindowBatches`.

    Args:
        documents: token ids of each, int32, the separator first.
        max_seq_len: maximum input tokens of a window.
        stride: targets of each window of a document after its first.

    Attributes:
        lengths: int64 `(N,)`: input tokens of each window.
        supervised_counts: int64 `(N,)`: targets of each window.
        record_ids: int64 `(N,)`: document of each window.
    """

    def __init__(self, documents: list[np.ndarray], max_seq_len: int, stride: int) -> None:
        self.documents = documents
        windows = []  # document, first token, first target, end
        for number, ids in enumerate(documents):
            first = 1  # token 0 is no target
            while first < len(ids):
                end = min(len(ids), first + (max_seq_len if first == 1 else stride))
                windows.append((number, max(0, end - 1 - max_seq_len), first, end))
                first = end
        self.windows = np.array(windows)
        self.record_ids, starts, first, ends = self.windows.T
        self.lengths = ends - starts - 1
        self.supervised_counts = ends - first

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids `(t,)`, the last of which is only a target, and bool targets `(t,)`."""
        document, start, first, end = self.windows[index]
        return self.documents[document][start:end], np.arange(start, end) >= first


class WindowBatches(StepBatches):
    """The steps of `TextWindows`."""

    samples: TextWindows

    def microbatch(self, indices: np.ndarray, *, packing: bool) -> Microbatch:
        pairs = zip(indices.tolist(), self._groups_of(indices).tolist(), strict=True)
        windows = [(*self.samples[index], group) for index, group in pairs]
        return collate_windows(windows, packing=packing, pad_token_id=self.pad_token_id)


class Texts:
    """The documents of `--text` as windows. Each entry of `--text` is measured separately.

    Args:
        base: the model whose context limits a window.
        run: settings of the run that made the model, for the default window; may be empty.

    Raises:
        ConfigError: a window longer than the model's context, or a stride that skips tokens.
        DataError: no text, or a file or record without text.
    """

    def __init__(
        self,
        options: EvalOptions,
        tokenizer: PreTrainedTokenizerBase,
        base: str,
        run: Mapping[str, Any],
    ) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.max_seq_len = self._window_of(base, run)
        self.stride = options.stride or self.max_seq_len
        if self.stride > self.max_seq_len:
            raise ConfigError(
                f"a stride of {self.stride} tokens is more than a window of {self.max_seq_len}",
                "--stride",
                "use at most --max-seq-len; half of it gives each target half a window of context",
            )
        separator = separator_of(tokenizer)
        encoder = DocumentEncoder(tokenizer.backend_tokenizer.to_str(), separator)
        documents: list[np.ndarray] = []
        self.sources: list[str] = []  # of each document
        sizes = []
        names = distinct_names([Path(entry).name or entry for entry in options.text])
        for name, entry in zip(names, options.text, strict=True):
            for text in self._read(entry):
                documents.append(encoder.encode([text], "int32")[0])
                sizes.append(len(text.encode()))
                self.sources.append(name)
            if name not in self.sources:
                raise DataError(
                    "there is no text",
                    entry,
                    "name files with text, or their field with --text-field",
                )
        self.bytes = np.array(sizes, dtype=np.int64)
        self.windows = TextWindows(documents, self.max_seq_len, self.stride)
        unknown = tokenizer.unk_token_id
        known = unknown is None or unknown == separator
        if not known and any((ids[1:] == unknown).any() for ids in documents):
            logger.warning(
                "the tokenizer does not know all of the text, and predicting '%s' instead is easy:"
                " the bits per byte are too low (fix: compare with models of this tokenizer only)",
                tokenizer.unk_token,
            )

    def _window_of(self, base: str, run: Mapping[str, Any]) -> int:
        trust = self.options.trust_remote_code
        config = load_model_config(base, trust_remote_code=trust).get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or DEFAULT_WINDOW_TOKENS
        default = run.get("max_seq_len") or min(DEFAULT_WINDOW_TOKENS, limit)
        window = self.options.max_seq_len or default
        if window > limit:
            raise ConfigError(
                f"windows of {window} tokens, but the model was made for {limit}",
                "--max-seq-len",
                f"use at most {limit}",
            )
        return window

    def _read(self, entry: str) -> Iterator[str]:
        """Yield the documents of an entry, except blank ones."""
        dropped = 0
        for unit in units_of(find_files([entry])):
            for (path, line), found in documents_of(unit, self.options.text_field):
                if not isinstance(found, RecordProblem):
                    if found.strip():
                        yield found
                    continue
                if self.options.on_bad_row == "refuse":
                    where = f"{path}:{line}" if line else path
                    raise DataError(
                        str(found),
                        where,
                        "name the field with --text-field, or leave such records out with"
                        " --on-bad-row drop",
                    )
                dropped += 1
        if dropped:
            logger.warning(
                "%s: %d records or files without text are left out", Path(entry).name, dropped
            )

    def facts(self) -> dict[str, Any]:
        """Return what is evaluated, as JSON without a path of this machine."""
        return {
            "files": list(dict.fromkeys(self.sources)),
            "documents": len(self.bytes),
            "max_seq_len": self.max_seq_len,
            "stride": self.stride,
        }

    def measure(self, scores: ModelScores, model: PreTrainedModel) -> None:
        """Add bits per byte of each text and of all together.

        Raises:
            FinetuneError: one window does not fit into the device's memory.
        """
        windows = self.windows
        pad = self.tokenizer.pad_token_id
        with progress(f"{scores.name}: text", len(windows)) as advance:
            losses = sample_sums(
                model,
                windows,
                np.arange(len(windows)),
                WindowBatches,
                pad_token_id=0 if pad is None else pad,
                on_progress=advance,
            )[:, 0]
        documents = len(self.bytes)
        nats = np.bincount(windows.record_ids, losses, documents)
        tokens = np.bincount(windows.record_ids, windows.supervised_counts, documents)
        bits = ratios("bits per byte", self.sources, nats / math.log(2), self.bytes)
        # "all" of a single text would repeat it
        scores.measures += bits[:1] if len(bits) == 2 else bits
        sources = np.array(self.sources, dtype=object)

        def sums(members: np.ndarray) -> dict[str, Any]:
            text_nats = float(nats[members].sum())
            text_bytes = int(self.bytes[members].sum())
            return {
                "documents": int(members.sum()),
                "tokens": int(tokens[members].sum()),
                "bytes": text_bytes,
                "nats": text_nats,
                "bits_per_byte": text_nats / (math.log(2) * text_bytes),
            }

        files = {name: sums(sources == name) for name in dict.fromkeys(self.sources)}
        scores.text = {"overall": sums(np.full(documents, True)), "files": files}
