"""Bits per byte of texts: how well a model predicts them, whatever its tokenizer.

Each document is read alone, after the separator that pretraining puts before it (`data/corpus`).
Every token of the text is a target once: nats of all of them / (ln 2 x bytes of the text in UTF-8).
A document longer than a window is read in several. The first has `max_seq_len` targets; each
further one has the next `stride` targets, and before them as much of the text as fits. With a
stride of a whole window, these are the windows of pretraining within a document, and those of
lm_eval's `loglikelihood_rolling`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.batching.collate import Microbatch, collate_windows
from finetune.batching.steps import StepBatches
from finetune.commands.evaluate.measure_loss import progress, sample_sums
from finetune.commands.evaluate.options import EvalOptions
from finetune.commands.evaluate.scores import ModelScores, ratios
from finetune.data.corpus.documents import documents_of, find_files, units_of
from finetune.data.corpus.tokenizer import DocumentEncoder, separator_of
from finetune.data.report import RecordProblem
from finetune.errors import ConfigError, DataError
from finetune.modeling.model_config import load_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("finetune")

DEFAULT_WINDOW_TOKENS = 2048  # that of pretraining


class TextWindows:
    """Windows of documents; a `batching.steps.SampleSource` for `WindowBatches`.

    Args:
        documents: ids of each, int32, the separator first.
        max_seq_len: tokens that the model computes of a window, at most.
        stride: targets of each window of a document after its first.

    Attributes:
        lengths: int64 `(N,)`: tokens that the model computes for each window.
        supervised_counts: int64 `(N,)`: targets of each window.
        record_ids: int64 `(N,)`: its document.
    """

    def __init__(self, documents: list[np.ndarray], max_seq_len: int, stride: int) -> None:
        self.documents = documents
        # Document, first token, first target, end.
        self.windows = np.array(
            [
                (n, *window)
                for n, ids in enumerate(documents)
                for window in _windows(len(ids), max_seq_len, stride)
            ]
        )
        self.record_ids, starts, first, ends = self.windows.T
        self.lengths = ends - starts - 1
        self.supervised_counts = ends - first

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids `(t,)`, whose last is a target alone; and which of them are targets, bool `(t,)`."""
        document, start, first, end = self.windows[index]
        return self.documents[document][start:end], np.arange(start, end) >= first


def _windows(tokens: int, max_seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """First token, first target and end of each window of a document; its token 0 is no target."""
    first = 1
    while first < tokens:
        end = min(tokens, first + (max_seq_len if first == 1 else stride))
        yield max(0, end - 1 - max_seq_len), first, end
        first = end


class WindowBatches(StepBatches):
    """The steps of `TextWindows`."""

    samples: TextWindows

    def microbatch(self, indices: np.ndarray, *, packing: bool) -> Microbatch:
        pairs = zip(indices.tolist(), self._groups_of(indices).tolist(), strict=True)
        windows = [(*self.samples[index], group) for index, group in pairs]
        return collate_windows(windows, packing=packing, pad_token_id=self.pad_token_id)


class Texts:
    """The documents of `--text` as windows; each of its entries is a text with a value of its own.

    Args:
        base: the model whose context bounds a window.
        run: settings of the run that made the model, whose windows are the default; empty where
            there is none.

    Raises:
        ConfigError: a window that the model was not made for, or a stride that leaves tokens out.
        DataError: no text, or a file or record that is none.
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
        names, sizes = [], []
        for number, entry in enumerate(options.text):
            before = len(documents)
            for text in self._read(entry):
                documents.append(encoder.encode([text], "int32")[0])
                sizes.append(len(text.encode()))
            if len(documents) == before:
                raise DataError(
                    "there is no text",
                    entry,
                    "name files with text, or their field with --text-field",
                )
            names += [_names(options.text)[number]] * (len(documents) - before)
        self.sources = names
        self.bytes = np.array(sizes, dtype=np.int64)
        self.windows = TextWindows(documents, self.max_seq_len, self.stride)
        unknown = tokenizer.unk_token_id
        if (
            unknown is not None
            and unknown != separator
            and any((ids[1:] == unknown).any() for ids in documents)
        ):
            logger.warning(
                "the tokenizer does not know all of the text, and predicting '%s' instead is easy:"
                " the bits per byte are too low (fix: compare with models of this tokenizer only)",
                tokenizer.unk_token,
            )

    def _window_of(self, base: str, run: Mapping[str, Any]) -> int:
        config = load_model_config(
            base, trust_remote_code=self.options.trust_remote_code
        ).get_text_config()
        made_for = getattr(config, "max_position_embeddings", None) or DEFAULT_WINDOW_TOKENS
        trained = run.get("max_seq_len")
        default = trained if isinstance(trained, int) else min(DEFAULT_WINDOW_TOKENS, made_for)
        window = self.options.max_seq_len or default
        if window > made_for:
            raise ConfigError(
                f"windows of {window} tokens, but the model was made for {made_for}",
                "--max-seq-len",
                f"use at most {made_for}",
            )
        return window

    def _read(self, entry: str) -> Iterator[str]:
        """The documents of an entry, those of white space alone left out."""
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
        settings = {"max_seq_len": self.max_seq_len, "stride": self.stride}
        return {
            "files": list(dict.fromkeys(self.sources)),
            "documents": len(self.bytes),
            **settings,
        }

    def measure(self, scores: ModelScores, model: PreTrainedModel) -> None:
        """Bits per byte of each text, and of all together.

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
        of_document = partial(np.bincount, windows.record_ids, minlength=len(self.bytes))
        nats, tokens = of_document(losses), of_document(windows.supervised_counts)
        bits = ratios("bits per byte", self.sources, nats / math.log(2), self.bytes)
        # "all" of one text would say the same
        scores.measures += bits[:1] if len(bits) == 2 else bits

        def sums(members: np.ndarray | slice) -> dict[str, Any]:
            counts = {"documents": len(self.bytes[members]), "tokens": int(tokens[members].sum())}
            of_text = float(nats[members].sum()), int(self.bytes[members].sum())
            return {
                **counts, "bytes": of_text[1], "nats": of_text[0],
                "bits_per_byte": of_text[0] / (math.log(2) * of_text[1]),
            }  # fmt: skip

        sources = np.array(self.sources, dtype=object)
        files = {name: sums(sources == name) for name in dict.fromkeys(self.sources)}
        scores.text = {"overall": sums(slice(None)), "files": files}


def _names(entries: tuple[str, ...]) -> list[str]:
    """Of each entry a short name that no other has, without the machine's folders."""
    names = [Path(entry).name or entry for entry in entries]
    return [
        n if names.count(n) == 1 else f"{n} ({names[: i + 1].count(n)})"
        for i, n in enumerate(names)
    ]
