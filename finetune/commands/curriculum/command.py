"""`python -m finetune curriculum show`: what a run would draw of each difficulty, stage by stage,
before it starts.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from finetune.batching.curriculum import Schedule, choose_schedule, plan_counts
from finetune.batching.mixing import SourceDraws, mix_of, source_line, source_warnings
from finetune.batching.sampler import GlobalBatches, count_steps
from finetune.config.fields import setting
from finetune.config.options import Options, read_known_options
from finetune.errors import ExitCode
from finetune.planning.learning_defaults import batch_for
from finetune.runtime.terminal import console as terminal_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from finetune.config.run_config import RunConfig

# Repeating data up to four times was found nearly as good as new data, more often much worse
# (Muennighoff et al., 2023).
MANY_PASSES = 4.0
CHART_COLUMNS, CHART_ROWS = 60, 10
_COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")
_GLYPHS, _ASCII_GLYPHS = "█▒░▓▚▤", "#+.ox="


class CurriculumOptions(Options):
    """The command line, except for the flags of training."""

    usage: ClassVar[str] = (
        "python -m finetune curriculum show [--json] [--config FILE] [FLAGS OF TRAINING]"
    )
    summary: ClassVar[str] = (
        "Shows how many samples of each difficulty every stage has, how often the data of each is"
        " repeated, and the\nmix over the progress of the run. Reads the configuration and the"
        " data; needs no model, and writes nothing."
    )
    epilog: ClassVar[str] = (
        "The other flags are those of `python -m finetune sft --help`, or of `dpo --help`."
    )
    positional: ClassVar[tuple[str, ...]] = ("action",)

    action: Literal["show"] = setting(group="options", unit="show", description="What to do.")
    as_json: bool = setting(
        False, alias="json", group="output", description="One JSON object instead of tables."
    )


@dataclass(frozen=True)
class StageReport:
    """One stage: first and last step counted from 1 (first > last: it has none), and its samples
    per difficulty.
    """

    until: float
    ramp: str
    first_step: int
    last_step: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class CurriculumReport:
    """What a run will draw. Tuples of numbers are per difficulty, in the order of `difficulties`.

    Attributes:
        records: records of the data; a difficulty whose weight is always zero counts its records
            too.
        samples: draws of the whole run.
        passes: samples / records, 0 without draws.
        chart: for each of CHART_COLUMNS equal parts of the run, the shares that are drawn.
    """

    difficulties: tuple[str, ...]
    total_steps: int
    global_batch_size: int
    records: tuple[int, ...]
    samples: tuple[int, ...]
    passes: tuple[float, ...]
    stages: tuple[StageReport, ...]
    chart: tuple[tuple[float, ...], ...]
    warnings: tuple[str, ...]
    sources: tuple[SourceDraws, ...] = ()  # that are mixed

    @property
    def mix(self) -> tuple[float, ...]:
        """Shares of the whole run."""
        return _shares(self.samples)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serializable values; values per difficulty are objects keyed by its name."""

        def by_difficulty(values: Sequence[float]) -> dict[str, float]:
            return dict(zip(self.difficulties, values, strict=True))

        def stage_json(stage: StageReport) -> dict[str, Any]:
            shown = {
                "samples": by_difficulty(stage.samples),
                "mix": by_difficulty(_shares(stage.samples)),
            }
            return {**asdict(stage), **shown}

        return {
            "levels": list(self.difficulties),
            "total_steps": self.total_steps,
            "global_batch_size": self.global_batch_size,
            "rows": by_difficulty(self.records),
            "samples": by_difficulty(self.samples),
            "passes": by_difficulty(self.passes),
            "mix": by_difficulty(self.mix),
            "stages": list(map(stage_json, self.stages)),
            "sources": [asdict(source) for source in self.sources],
            "warnings": list(self.warnings),
        }


def report_curriculum(
    schedule: Schedule,
    records_per_difficulty: np.ndarray,
    global_batch_size: int,
    total_steps: int,
    warnings: Sequence[str] = (),
    sources: Sequence[SourceDraws] = (),
) -> CurriculumReport:
    """Report what a run with this schedule draws from data with int[difficulties] records.

    `warnings` come before the report's own; `sources` are those that are mixed.
    """
    counts = plan_counts(schedule, total_steps, global_batch_size)

    def drawn(start: int, end: int) -> tuple[int, ...]:
        return tuple(counts[start:end].sum(axis=0).tolist())

    stage_of_step = schedule.stage_of_steps(total_steps)
    ends = np.searchsorted(stage_of_step, np.arange(len(schedule.stages)), side="right").tolist()
    stages = [
        StageReport(stage.until, stage.ramp, start + 1, end, drawn(start, end))
        for stage, start, end in zip(schedule.stages, [0, *ends], ends, strict=False)
    ]
    samples = drawn(0, total_steps)
    records = np.asarray(records_per_difficulty).tolist()
    passes = [
        count / there if count else 0.0 for count, there in zip(samples, records, strict=True)
    ]
    chart = []
    for column in range(CHART_COLUMNS):  # of fewer steps, several columns show one
        start = column * total_steps // CHART_COLUMNS
        end = (column + 1) * total_steps // CHART_COLUMNS
        chart.append(_shares(drawn(start, max(start + 1, end))))
    often = [
        f"difficulty '{name}' is repeated {times:.1f} times (fix: add records, train fewer steps,"
        " or lower its weight)"
        for name, times in zip(schedule.difficulties, passes, strict=True)
        if times > MANY_PASSES
    ]
    used = schedule.ever_used()
    never = [
        f"difficulty '{name}' has weight 0 in every stage: its {there:,} records are not trained on"
        for name, there, is_used in zip(schedule.difficulties, records, used, strict=True)
        if there and not is_used
    ]
    return CurriculumReport(
        difficulties=schedule.difficulties,
        total_steps=total_steps,
        global_batch_size=global_batch_size,
        records=tuple(records),
        samples=samples,
        passes=tuple(passes),
        stages=tuple(stages),
        chart=tuple(chart),
        warnings=(*warnings, *source_warnings(sources), *often, *never),
        sources=tuple(sources),
    )


def _shares(samples: Sequence[int]) -> tuple[float, ...]:
    total = sum(samples)
    return tuple(count / total if total else 0.0 for count in samples)


def chart_cells(report: CurriculumReport) -> list[list[int]]:
    """Lines of the chart from the top, each CHART_COLUMNS indices of difficulties, stacked from the
    bottom.
    """
    tops = np.cumsum(np.array(report.chart), axis=1)
    heights = (np.arange(CHART_ROWS)[::-1] + 0.5) / CHART_ROWS
    return [
        [min(int((top <= height).sum()), len(report.difficulties) - 1) for top in tops]
        for height in heights
    ]


def print_report(report: CurriculumReport, console: Console) -> None:
    """Print the report for a person."""
    from rich.text import Text

    seen = (
        f"{sum(report.samples):,} samples in {report.total_steps:,} steps of"
        f" {report.global_batch_size:,}"
    )
    console.print(f"curriculum: {seen}, from {sum(report.records):,} records", highlight=False)
    console.print(_table(report))
    unicode = (console.encoding or "").lower().startswith("utf")
    glyphs = _GLYPHS if unicode else _ASCII_GLYPHS
    mark = [
        (glyphs[number % len(glyphs)], _COLORS[number % len(_COLORS)])
        for number in range(len(report.difficulties))
    ]
    for number, line in enumerate(chart_cells(report)):
        label = {0: "100%", CHART_ROWS // 2: " 50%"}.get(number, "    ")
        console.print(
            Text(f"{label} ").append_text(Text.assemble(*(mark[difficulty] for difficulty in line)))
        )
    console.print(f"  0% {'progress':^{CHART_COLUMNS - 5}} 100%", highlight=False)
    legend = [
        (f"{glyph} {name}   ", color)
        for (glyph, color), name in zip(mark, report.difficulties, strict=True)
    ]
    console.print(Text("     ").append_text(Text.assemble(*legend)))
    whole = not console.is_terminal  # else rich breaks lines, between words
    for source in report.sources:
        console.print(Text(f"source {source.name}: {source_line(source)}"), soft_wrap=whole)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=whole)


def _table(report: CurriculumReport) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("stage", "progress", "steps"):
        table.add_column(heading)
    for name in report.difficulties:
        table.add_column(name, justify="right")

    def cells(samples: Sequence[int]) -> list[str]:
        return [
            f"{count:,} {share:6.1%}"
            for count, share in zip(samples, _shares(samples), strict=True)
        ]

    start = 0.0
    for number, stage in enumerate(report.stages, 1):
        ramp = " (ramp)" if stage.ramp == "linear" else ""
        steps = (
            f"{stage.first_step:,}-{stage.last_step:,}"
            if stage.first_step <= stage.last_step
            else "none"
        )
        table.add_row(
            f"{number}{ramp}", f"{start:.4g}-{stage.until:.4g}", steps, *cells(stage.samples)
        )
        start = stage.until
    table.add_section()
    table.add_row("whole run", "", f"{report.total_steps:,}", *cells(report.samples))
    table.add_row("records", "", "", *(f"{count:,}" for count in report.records))
    table.add_row("passes", "", "", *(f"{times:.2f}" for times in report.passes))
    return table


def read_difficulties(config: RunConfig) -> tuple[np.ndarray, np.ndarray, list[int], list[str]]:
    """Read the records that can be trained on.

    Returns int64[N] difficulties, -1 for none; int64[N] record numbers; the first record of each
    source, and N; and warnings about the others.

    Raises:
        DataError: a file cannot be read; a column that no record has; records are bad and
            `on_bad_row` is refuse.
    """
    from finetune.data.formats import MediaLeftOut
    from finetune.data.preference.reader import reader_of
    from finetune.data.reading.files import expand_sources
    from finetune.data.records import refuse_unmapped
    from finetune.data.report import ProblemLog, RecordProblem
    from finetune.data.selection import KEYS, selection_of

    names = config.curriculum.levels if config.use_curriculum else None
    index = {name: number for number, name in enumerate([None, *(names or ())], -1)}
    good: list[tuple[int, int, int]] = []  # difficulty, record, source
    problems, read, others = ProblemLog(), 0, Counter[str]()
    selection, keys = selection_of(config), []
    files = expand_sources(config.sources)
    make_reader = reader_of(config.preference_form)
    readers = [
        make_reader(names, config.difficulty_field, file.source, config.on_media) for file in files
    ]
    columns: dict[int, set[str]] = {number: set() for number in range(len(files))}
    for number, (file, reader) in enumerate(zip(files, readers, strict=True)):
        for line, record, found in reader.file(file.path):
            read += 1
            columns[number] |= reader.mapped_in(record)
            try:
                if isinstance(found, RecordProblem):
                    raise found
                if selection:
                    keys.append(selection.key(read - 1, record, found, reader))
            except MediaLeftOut:
                others["with images, video or sound"] += 1
                continue
            except RecordProblem as problem:
                problems.add((number, line), f"{file.path}:{line}", problem)
                continue
            good.append((index[found.difficulty], read - 1, file.number))
    refuse_unmapped(readers, [file.path for file in files], columns)
    if config.on_bad_row == "refuse":
        problems.refuse(read)
    difficulties, record_ids, sources = np.array(good, dtype=np.int64).reshape(-1, 3).T
    if selection:
        chosen = selection.choose(np.array(keys, dtype=KEYS), read, f"{files[0].path}:1")
        others["duplicates"] = chosen.duplicates
        others["on the other side of the split"] = chosen.other_side
        taken = chosen.mask[record_ids]
        difficulties, record_ids, sources = difficulties[taken], record_ids[taken], sources[taken]
    counts = problems.counts + others
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    dropped = [f"{counts.total():,} of {read:,} records are dropped: {kinds}"] if kinds else []
    starts = [0, *accumulate(np.bincount(sources, minlength=len(config.sources)).tolist())]
    return difficulties, record_ids, starts, dropped


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; what is wrong is raised as FinetuneError."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, rest = read_known_options(CurriculumOptions, arguments or ["--help"])
    from finetune.config.kinds import kind_of_arguments
    from finetune.config.resolution import resolve
    from finetune.config.run_config import RunConfig
    from finetune.runtime.launch_environment import launch_world

    settings = kind_of_arguments(rest, RunConfig).config_class
    config: Any = resolve(rest, world_size=launch_world().world_size, model_class=settings).config
    difficulties, record_ids, starts, dropped = read_difficulties(config)
    schedule, difficulty_ids, warnings = choose_schedule(config, difficulties, record_ids)
    if config.global_batch_size == "auto":
        config = config.model_copy(
            update={"global_batch_size": batch_for(config, len(difficulty_ids))}
        )
    steps = count_steps(
        len(difficulty_ids), config.global_batch_size, config.num_epochs, config.max_steps
    )
    records = np.bincount(difficulty_ids, minlength=len(schedule.difficulties))
    mix = mix_of(config.sources, starts)
    plan = GlobalBatches(
        difficulty_ids, schedule, config.global_batch_size, steps, config.curriculum_seed, mix=mix
    )
    problems = [*dropped, *warnings]
    report = report_curriculum(
        schedule, records, config.global_batch_size, steps, problems, plan.source_draws()
    )
    if options.as_json:
        sys.stdout.write(json.dumps(report.to_json(), ensure_ascii=False, indent=2) + "\n")
    else:
        print_report(report, terminal_console())
    return int(ExitCode.DONE)
