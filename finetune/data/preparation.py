"""The work behind `prepare_samples`: rows are read and checked, rendered in parallel, and written as flat arrays.

Rows that are bad are found before anything is tokenized; rows that only the chat template refuses, while it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from finetune.data.files import read_rows
from finetune.data.formats import Conversation, Message, detect_format, to_conversation
from finetune.data.problems import ProblemLog, RowProblem
from finetune.data.render import Rendered, Renderer
from finetune.data.report import DataReport
from finetune.data.samples import write_arrays
from finetune.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

NO_LEVEL = -1
NO_ROOM = "no room for an answer within cutoff_len"

_ROWS_PER_PROCESS = 2_000  # below this, starting another process costs more than it saves
_MOST_PROCESSES = 16
_BATCH_ROWS = 200
_MESSAGE = pa.struct(
    [("role", pa.string()), ("content", pa.large_string()), ("trained", pa.bool_()), ("reasoning", pa.large_string())]
)
_ROW_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("file", pa.int64()),
        ("line", pa.int64()),
        ("level", pa.int16()),
        ("messages", pa.list_(_MESSAGE)),
    ]
)
_COUNTED = ("trimmed_tokens", "dropped_turns", "cut_answer", "ends", "follows_prompt")
_COLUMNS = ("row", "file", "line", "level", "length", "targets", *_COUNTED)


@dataclass
class Preparation:
    """One set of data files and how to make samples of them.

    Attributes:
        sources: the files, in order.
        renderer: makes samples of conversations; is sent to the processes that tokenize.
        levels: names of the levels; None: levels are not looked at.
        difficulty_field: the key that holds a row's level.
        drop_bad_rows: leave bad rows out and count them, instead of refusing them.
        num_proc: processes that tokenize; None: as many as pay.
    """

    sources: tuple[Path, ...]
    renderer: Renderer
    levels: tuple[str, ...] | None
    difficulty_field: str
    drop_bad_rows: bool
    num_proc: int | None = None

    def options(self) -> str:
        """What the samples depend on besides data, tokenizer and template, as JSON."""
        return json.dumps(
            {
                "cutoff_len": self.renderer.cutoff_len,
                "levels": self.levels,
                "difficulty_field": self.difficulty_field,
                "drop_bad_rows": self.drop_bad_rows,
            }
        )

    def write_samples(self, folder: Path) -> dict[str, Any]:
        """Fill the folder with `ARRAYS` and return what belongs beside them; scratch files are removed.

        Raises:
            DataError: bad rows (unless they are dropped), no rows, or none left.
        """
        scratch = folder / "scratch"
        scratch.mkdir()
        try:
            report, rows = self._read(scratch / "rows.arrow")
            return self._write(self._tokenize(rows, scratch), report, folder)
        finally:
            shutil.rmtree(scratch)

    def _read(self, path: Path) -> tuple[DataReport, Dataset]:
        """Read and check all rows into an Arrow file; refuse bad ones or count them."""
        import datasets

        report, problems, unlabelled = DataReport(), ProblemLog(), ProblemLog()
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _ROW_SCHEMA) as writer:
            batch: list[dict[str, Any]] = []
            for row in self._rows(report, problems):
                if row["level"] == NO_LEVEL:
                    place = (row["file"], row["line"])
                    unlabelled.add(place, self._location(*place), self._no_level())
                report.level_field_found |= row["level"] != NO_LEVEL
                batch.append(row)
                if len(batch) == _BATCH_ROWS:
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=_ROW_SCHEMA))
                    batch = []
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=_ROW_SCHEMA))
        if report.level_field_found:
            problems.merge(unlabelled)
        if not report.rows_read:
            raise DataError("the data files hold no row", where=self._where(), fix="give --data files with rows")
        if not self.drop_bad_rows:
            problems.refuse(report.rows_read)
        report.dropped = dict(problems.counts)
        if problems.total == report.rows_read:
            raise self._none_left(report)
        return report, datasets.Dataset.from_file(str(path))

    def _rows(self, report: DataReport, problems: ProblemLog) -> Iterator[dict[str, Any]]:
        levels = {None: NO_LEVEL, **{name: number for number, name in enumerate(self.levels or ())}}
        for file, path in enumerate(self.sources):
            form = None
            for line, row in read_rows(path):
                number = report.rows_read
                report.rows_read += 1
                try:
                    if isinstance(row, RowProblem):
                        raise row
                    form = form or detect_format(row)
                    conversation = to_conversation(row, form, self.levels, self.difficulty_field)
                except RowProblem as problem:
                    problems.add((file, line), f"{path}:{line}", problem)
                    continue
                report.control_token_rows += self.renderer.has_control_tokens(conversation)
                messages = [asdict(message) for message in conversation.messages]
                yield {
                    "row": number,
                    "file": file,
                    "line": line,
                    "level": levels[conversation.level],
                    "messages": messages,
                }

    def _no_level(self) -> RowProblem:
        return RowProblem("no level", f"other rows have a '{self.difficulty_field}', this one has none")

    def _tokenize(self, rows: Dataset, scratch: Path) -> Dataset:
        import datasets

        return rows.map(
            _RenderBatch(self.renderer),
            batched=True,
            batch_size=_BATCH_ROWS,
            num_proc=self._processes(len(rows)),
            remove_columns=rows.column_names,
            features=_sample_features(datasets),
            load_from_cache_file=False,
            new_fingerprint="samples",  # the entry's own key covers what it depends on; hashing the tokenizer is slow
            cache_file_name=str(scratch / "samples.arrow"),
            desc="tokenizing",
        )

    def _processes(self, rows: int) -> int | None:
        """None means this process alone."""
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = self.num_proc or min(cpus, _MOST_PROCESSES, rows // _ROWS_PER_PROCESS)
        return min(processes, rows) if processes > 1 and rows > 1 else None

    def _write(self, rendered: Dataset, report: DataReport, folder: Path) -> dict[str, Any]:
        """Write the arrays of all samples that are kept, and complete the report."""
        columns = {name: rendered.data.column(name).to_numpy() for name in _COLUMNS}
        kept = np.ones(len(rendered), dtype=np.bool_)
        if report.level_field_found:
            kept &= columns["level"] != NO_LEVEL  # counted as bad rows already
        refused = kept & (rendered.data.column("problem_kind").to_numpy() != "")
        kept &= ~refused
        problems = self._refused(rendered, columns, np.flatnonzero(refused))
        if not self.drop_bad_rows:
            problems.refuse(report.rows_read)
        roomless = kept & (columns["targets"] == 0)
        kept &= ~roomless
        dropped = Counter(report.dropped) + problems.counts
        dropped[NO_ROOM] += len(np.setdiff1d(columns["row"][roomless], columns["row"][kept]))
        report.dropped = {reason: count for reason, count in dropped.items() if count}
        if not kept.any():
            raise self._none_left(report)
        self._count(columns, kept, report)
        content = write_arrays(rendered, columns, kept, folder)
        names = list(self.levels or ())
        fingerprint = hashlib.sha256(json.dumps([content, names]).encode()).hexdigest()
        return {"fingerprint": fingerprint, "level_names": names, "report": report.to_dict()}

    def _refused(self, rendered: Dataset, columns: dict[str, np.ndarray], rows: np.ndarray) -> ProblemLog:
        """The rows that the chat template or the renderer refused."""
        kinds, details = rendered.data.column("problem_kind"), rendered.data.column("problem_detail")
        problems = ProblemLog()
        for row in rows.tolist():
            place = (int(columns["file"][row]), int(columns["line"][row]))
            problems.add(place, self._location(*place), RowProblem(kinds[row].as_py(), details[row].as_py()))
        return problems

    def _count(self, columns: dict[str, np.ndarray], kept: np.ndarray, report: DataReport) -> None:
        used = {name: values[kept] for name, values in columns.items()}
        report.samples = int(kept.sum())
        _, first = np.unique(used["row"], return_index=True)
        report.rows_kept = len(first)
        report.tokens, report.longest_tokens = int(used["length"].sum()), int(used["length"].max())
        report.supervised_tokens = int(used["targets"].sum())
        report.trimmed_rows = int((used["trimmed_tokens"] > 0).sum())
        report.trimmed_tokens = int(used["trimmed_tokens"].sum())
        report.dropped_turns = int(used["dropped_turns"].sum())
        report.cut_answers = int(used["cut_answer"].sum())
        report.unended_samples = int((~used["ends"]).sum())
        report.off_prompt_samples = int((~used["follows_prompt"]).sum())
        if report.level_field_found:
            rows = np.bincount(used["level"][first], minlength=len(self.levels or ()))
            report.rows_per_level = {name: int(count) for name, count in zip(self.levels or (), rows, strict=True)}

    def _none_left(self, report: DataReport) -> DataError:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
        return DataError(
            f"no row is left to train on ({reasons})",
            where=self._where(),
            fix="see the reasons; --on-bad-row refuse names the rows, and a larger --cutoff-len gives answers room",
        )

    def _location(self, file: int, line: int) -> str:
        return f"{self.sources[file]}:{line}"

    def _where(self) -> str:
        named = ", ".join(map(str, self.sources[:3]))
        return named if len(self.sources) <= 3 else f"{named} and {len(self.sources) - 3} more"


class _RenderBatch:
    """What a tokenizing process does with a batch of rows; a class, so that it can be sent there."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in _SAMPLE_TYPES}
        for number, messages in enumerate(batch["messages"]):
            kind = detail = ""
            samples: list[Rendered] = []
            try:
                samples = self.renderer(Conversation(tuple(Message(**message) for message in messages)))
            except RowProblem as problem:
                kind, detail = problem.kind, problem.detail
            empty = Rendered(np.zeros(0, np.int32), np.zeros(0, np.bool_))
            for sample in samples or [empty]:
                for name in ("row", "file", "line", "level"):
                    columns[name].append(batch[name][number])
                columns["input_ids"].append(sample.input_ids)
                columns["supervised"].append(sample.supervised.view(np.uint8))
                columns["length"].append(len(sample.input_ids))
                columns["targets"].append(int(sample.supervised.sum()))
                for name in _COUNTED:
                    columns[name].append(getattr(sample, name))
                columns["problem_kind"].append(kind)
                columns["problem_detail"].append(detail)
        return columns


_SAMPLE_TYPES = {
    "row": "int64",
    "file": "int64",
    "line": "int64",
    "level": "int16",
    "length": "int32",
    "targets": "int32",
    "trimmed_tokens": "int32",
    "dropped_turns": "int32",
    "cut_answer": "bool",
    "ends": "bool",
    "follows_prompt": "bool",
    "problem_kind": "string",
    "problem_detail": "string",
    "input_ids": ["int32"],
    "supervised": ["uint8"],
}


def _sample_features(datasets: Any) -> Any:
    value = datasets.Value
    return datasets.Features(
        {
            name: datasets.List(value(kind[0])) if isinstance(kind, list) else value(kind)
            for name, kind in _SAMPLE_TYPES.items()
        }
    )
