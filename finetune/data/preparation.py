"""The work behind `prepare_samples`: records are read and checked, rendered in parallel, and written as flat arrays.

Records that are bad are found before anything is tokenized; records that only the chat template refuses, while it is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from finetune.data.files import read_records
from finetune.data.formats import Conversation, Message, detect_format, to_conversation
from finetune.data.problems import ProblemLog, RecordProblem
from finetune.data.render import Rendered, Renderer
from finetune.data.report import DataReport
from finetune.data.samples import write_arrays
from finetune.errors import DataError
from finetune.runtime.host import usable_cores

if TYPE_CHECKING:
    from datasets import Dataset

NO_DIFFICULTY = -1
NO_ROOM = "no room for an answer within cutoff_len"

_RECORDS_PER_PROCESS = 2_000  # below this, starting another process costs more than it saves
_MOST_PROCESSES = 16
_BATCH_RECORDS = 200
_MESSAGE = pa.struct(
    [("role", pa.string()), ("content", pa.large_string()), ("trained", pa.bool_()), ("reasoning", pa.large_string())]
)
_RECORD_SCHEMA = pa.schema(
    [*((name, pa.int64()) for name in ("row", "file", "line")), ("level", pa.int16()), ("messages", pa.list_(_MESSAGE))]
)
_SAMPLE_SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in ("row", "file", "line")),
        ("level", pa.int16()),
        *((name, pa.int32()) for name in ("length", "targets", "trimmed_tokens", "dropped_turns")),
        *((name, pa.bool_()) for name in ("cut_answer", "ends", "follows_prompt")),
        *((name, pa.string()) for name in ("problem_kind", "problem_detail")),
        *(("input_ids", pa.list_(pa.int32())), ("supervised", pa.list_(pa.uint8()))),
    ]
)
_COUNTED = ("trimmed_tokens", "dropped_turns", "cut_answer", "ends", "follows_prompt")
_COLUMNS = ("row", "file", "line", "level", "length", "targets", *_COUNTED)


@dataclass
class Preparation:
    """One set of data files and how to make samples of them."""

    sources: tuple[Path, ...]
    renderer: Renderer  # is sent to the processes that tokenize
    difficulties: tuple[str, ...] | None  # their names; None: difficulties are not looked at
    difficulty_field: str  # the key that holds a record's difficulty
    drop_bad_records: bool  # leave bad records out and count them, instead of refusing them
    num_proc: int | None = None  # processes that tokenize; None: as many as pay

    def options(self) -> str:
        """What the samples depend on besides data, tokenizer and template, as JSON."""
        return json.dumps(
            {
                "cutoff_len": self.renderer.cutoff_len,
                "levels": self.difficulties,
                "difficulty_field": self.difficulty_field,
                "drop_bad_rows": self.drop_bad_records,
            }
        )

    def write_samples(self, folder: Path) -> dict[str, Any]:
        """Fill the folder with `ARRAYS` and return what belongs beside them; scratch files are removed.

        Raises:
            DataError: bad records (unless they are dropped), no records, or none left.
        """
        scratch = folder / "scratch"
        scratch.mkdir()
        try:
            report, records = self._read(scratch / "records.arrow")
            return self._write(self._tokenize(records, scratch), report, folder)
        finally:
            shutil.rmtree(scratch)

    def _read(self, path: Path) -> tuple[DataReport, Dataset]:
        """Read and check all records into an Arrow file; refuse bad ones or count them."""
        import datasets

        report, problems, unlabelled = DataReport(), ProblemLog(), ProblemLog()
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _RECORD_SCHEMA) as writer:
            batch: list[dict[str, Any]] = []
            for record in self._conversations(report, problems):
                if record["level"] == NO_DIFFICULTY:
                    detail = f"other records have a '{self.difficulty_field}', this one has none"
                    self._note(unlabelled, record["file"], record["line"], RecordProblem("no difficulty", detail))
                report.difficulty_field_found |= record["level"] != NO_DIFFICULTY
                batch.append(record)
                if len(batch) == _BATCH_RECORDS:
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=_RECORD_SCHEMA))
                    batch = []
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=_RECORD_SCHEMA))
        if report.difficulty_field_found:
            problems.merge(unlabelled)
        if not report.records_read:
            raise DataError("the data files hold no record", where=self._where(), fix="give --data files with records")
        if not self.drop_bad_records:
            problems.refuse(report.records_read)
        report.dropped = dict(problems.counts)
        if problems.total == report.records_read:
            raise self._none_left(report)
        return report, datasets.Dataset.from_file(str(path))

    def _conversations(self, report: DataReport, problems: ProblemLog) -> Iterator[dict[str, Any]]:
        names: tuple[str | None, ...] = (None, *(self.difficulties or ()))
        difficulties = {name: number for number, name in enumerate(names, NO_DIFFICULTY)}
        for file, path in enumerate(self.sources):
            form = None
            for line, record in read_records(path):
                number = report.records_read
                report.records_read += 1
                try:
                    if isinstance(record, RecordProblem):
                        raise record
                    form = form or detect_format(record)
                    conversation = to_conversation(record, form, self.difficulties, self.difficulty_field)
                except RecordProblem as problem:
                    self._note(problems, file, line, problem)
                    continue
                report.control_token_records += self.renderer.has_control_tokens(conversation)
                messages = [asdict(message) for message in conversation.messages]
                difficulty = difficulties[conversation.difficulty]
                yield {"row": number, "file": file, "line": line, "level": difficulty, "messages": messages}

    def _tokenize(self, records: Dataset, scratch: Path) -> Dataset:
        import datasets

        return records.map(
            partial(_render_batch, self.renderer),
            batched=True,
            batch_size=_BATCH_RECORDS,
            num_proc=self._processes(len(records)),
            remove_columns=records.column_names,
            features=datasets.Features.from_arrow_schema(_SAMPLE_SCHEMA),
            load_from_cache_file=False,
            new_fingerprint="samples",  # the entry's own key covers what it depends on; hashing the tokenizer is slow
            cache_file_name=str(scratch / "samples.arrow"),
            desc="tokenizing",
        )

    def _processes(self, records: int) -> int | None:
        """None means this process alone."""
        processes = self.num_proc or min(usable_cores(), _MOST_PROCESSES, records // _RECORDS_PER_PROCESS)
        return min(processes, records) if processes > 1 and records > 1 else None

    def _write(self, rendered: Dataset, report: DataReport, folder: Path) -> dict[str, Any]:
        """Write the arrays of all samples that are kept, and complete the report."""
        columns = {name: rendered.data.column(name).to_numpy() for name in _COLUMNS}
        kept = np.ones(len(rendered), dtype=np.bool_)
        if report.difficulty_field_found:
            kept &= columns["level"] != NO_DIFFICULTY  # counted as bad records already
        refused = kept & (rendered.data.column("problem_kind").to_numpy() != "")
        kept &= ~refused
        problems = self._refused(rendered, columns, np.flatnonzero(refused))
        if not self.drop_bad_records:
            problems.refuse(report.records_read)
        roomless = kept & (columns["targets"] == 0)
        kept &= ~roomless
        dropped = Counter(report.dropped) + problems.counts
        dropped[NO_ROOM] += len(np.setdiff1d(columns["row"][roomless], columns["row"][kept]))
        report.dropped = {reason: count for reason, count in dropped.items() if count}
        if not kept.any():
            raise self._none_left(report)
        self._count(columns, kept, report)
        facts = write_arrays(rendered, columns, kept, folder)
        names = list(self.difficulties or ())
        fingerprint = hashlib.sha256(json.dumps([facts.pop("content"), names]).encode()).hexdigest()
        return {"fingerprint": fingerprint, "level_names": names, "report": asdict(report), **facts}

    def _refused(self, rendered: Dataset, columns: dict[str, np.ndarray], records: np.ndarray) -> ProblemLog:
        """The records that the chat template or the renderer refused."""
        kinds, details = rendered.data.column("problem_kind"), rendered.data.column("problem_detail")
        problems = ProblemLog()
        for record in records.tolist():
            problem = RecordProblem(kinds[record].as_py(), details[record].as_py())
            self._note(problems, int(columns["file"][record]), int(columns["line"][record]), problem)
        return problems

    def _count(self, columns: dict[str, np.ndarray], kept: np.ndarray, report: DataReport) -> None:
        used = {name: values[kept] for name, values in columns.items()}
        report.samples = int(kept.sum())
        _, first = np.unique(used["row"], return_index=True)
        report.records_kept = len(first)
        report.tokens, report.longest_tokens = int(used["length"].sum()), int(used["length"].max())
        report.supervised_tokens = int(used["targets"].sum())
        report.trimmed_records = int((used["trimmed_tokens"] > 0).sum())
        report.trimmed_tokens = int(used["trimmed_tokens"].sum())
        report.dropped_turns = int(used["dropped_turns"].sum())
        report.cut_answers = int(used["cut_answer"].sum())
        report.unended_samples = int((~used["ends"]).sum())
        report.off_prompt_samples = int((~used["follows_prompt"]).sum())
        if report.difficulty_field_found:
            names = self.difficulties or ()
            records = np.bincount(used["level"][first], minlength=len(names)).tolist()
            report.records_per_difficulty = dict(zip(names, records, strict=True))

    def _none_left(self, report: DataReport) -> DataError:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
        return DataError(
            f"no record is left to train on ({reasons})",
            where=self._where(),
            fix="see the reasons; --on-bad-row refuse names the records, and a larger --cutoff-len gives answers room",
        )

    def _note(self, problems: ProblemLog, file: int, line: int, problem: RecordProblem) -> None:
        problems.add((file, line), f"{self.sources[file]}:{line}", problem)

    def _where(self) -> str:
        named = ", ".join(map(str, self.sources[:3]))
        return named if len(self.sources) <= 3 else f"{named} and {len(self.sources) - 3} more"


def _render_batch(renderer: Renderer, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What a tokenizing process does with a batch of records."""
    columns: dict[str, list[Any]] = {name: [] for name in _SAMPLE_SCHEMA.names}
    for number, messages in enumerate(batch["messages"]):
        kind = detail = ""
        samples = [Rendered(np.zeros(0, np.int32), np.zeros(0, np.bool_))]
        try:
            samples = renderer(Conversation(tuple(Message(**message) for message in messages)))
        except RecordProblem as problem:
            kind, detail = problem.kind, problem.detail
        for sample in samples:
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
