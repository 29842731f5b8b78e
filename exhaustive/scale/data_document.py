"""The tables of exhaustive/scale/data.py."""

from __future__ import annotations

from typing import Any

NAMES = {"ours": "finetune", "trl": "TRL", "llamafactory": "LLaMA-Factory"}
INTRODUCTION = """
The input is short conversations: a question of five words and an answer of four, {tokens:.0f} tokens with the template.
The tokenizer was made locally. Each system uses 2 processes on 2 cores.

- Peak memory is the proportional set size (Pss) summed over all processes, sampled every half second. "Private" leaves
  out file-backed pages.
- Disk is the peak size of all files written, without the input rows.
- Load is the machine's average over 15 minutes. Above 3, other work ran at the same time, which inflates the seconds in
  proportion. Rows per core second (CPU time, without imports) depend less on the load; memory and disk do not depend on
  it.

TRL runs `load_dataset("json")` and the constructor of SFTTrainer with `assistant_only_loss`. LLaMA-Factory runs its own
`get_dataset`. Both use 2 processes and the environments of `make bench`.
"""
PREPARED = """
| | rows | seconds | rows/s | rows per core second | peak memory, GiB | private, GiB | disk, bytes per row | load |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""
EXTRAPOLATED = """
Each result at {rows:,} rows gives this time and disk space for 10 million rows on two free cores (not run):

{each}
"""
KILLED = """
The resumed run was killed (SIGKILL) {before:,.0f} s after its start, with {kept:,} of {rows:,} rows in finished shards.
After a restart it needed {after:,.0f} s more. Finished shards were not prepared again.
"""
STARTED = """
The next table measures a start with {rows:,} samples already in the cache ({gib:.1f} GiB), until `prepare_data`
returns. Then 100 global batches of 128 are read. The tokens were drawn at random instead of tokenized; everything else
is as a run finds it. "Private" is the memory that the data added to a process (Private_Dirty). In an earlier version,
each process held 267 MiB (115 measured, the rest computed): the arrays of lengths, counts, record ids and difficulties,
and the plan's order. One process per node reads the cache entry. It also reads the rows if
their hash is not known.

| processes per node | seconds until all were ready | private per process, MiB | after 100 global batches, MiB | load |
|---|---:|---:|---:|---:|
"""


def section(found: dict[str, Any]) -> str:
    """The text of "Data" from what was found."""
    large = found["large"]["found"]
    text = INTRODUCTION.format(tokens=large["tokens"] / large["rows"]) + PREPARED
    text += "".join(_line(name, **found[name]) for name in found if name.split()[0] in NAMES)
    text += _line("ours, killed and resumed", **found["large"])
    text += _extrapolated(found)
    text += KILLED.format(
        before=large["before_kill"],
        kept=large["kept_records"],
        rows=large["rows"],
        after=large["after_kill"],
    )
    entry = found["entry"]["found"]
    text += STARTED.format(rows=entry["rows"], gib=entry["bytes"] / 2**30)
    for name in found:
        if name.startswith("start "):
            text += _start(name.removeprefix("start "), **found[name])
    largest = (
        f"{large['rows']:,} rows tokenized; a start with {entry['rows']:,} samples by 1 and 8"
        " processes"
    )
    text += (
        "\nOne process has more: it hashed the entry in threads, and the C library keeps their"
        " memory.\n"
    )
    return f"{text}\nLargest case actually run: {largest}.\n\nCommand: `make scale PART=data`.\n"


def _extrapolated(found: dict[str, Any]) -> str:
    """From the largest number of rows that every system prepared."""
    runs = [
        one["found"] | {"name": name.split()[0]}
        for name, one in found.items()
        if name.split()[0] in NAMES
    ]
    rows = max(run["rows"] for run in runs)
    times = 10_000_000 / rows
    each = []
    for run in runs:
        if run["rows"] == rows and not run["code"]:
            hours, gib = run["cpu_seconds"] * times / 2 / 3600, run["disk"] * times / 2**30
            each.append(f"- {NAMES[run['name']]}: {hours:.1f} h, {gib:.0f} GiB")
    return EXTRAPOLATED.format(rows=rows, each="\n".join(each))


def _line(name: str, found: dict[str, Any], load: float) -> str:
    contender, _, more = name.partition(",")
    title = NAMES[contender.split()[0]] + (f",{more}" if more else "")
    rows = found["rows"]
    if found["code"]:
        return (
            f"| {title} | {rows:,} | ended with exit code {found['code']} | | | | | |"
            f" {load:.0f} |\n"
        )
    seconds = (
        found["before_kill"] + found["after_kill"] if "before_kill" in found else found["seconds"]
    )
    memory = f"{found['peak'] / 2**30:.2f} | {found['private'] / 2**30:.2f}"
    rates = f"{rows / seconds:,.0f} | {rows / found['cpu_seconds']:,.0f}"
    return (
        f"| {title} | {rows:,} | {seconds:,.0f} | {rates} | {memory} | {found['disk'] / rows:,.0f}"
        f" | {load:.0f} |\n"
    )


def _start(ranks: str, found: list[dict[str, Any]], load: float) -> str:
    def added(when: str) -> str:
        sizes = [
            (one[when]["Private_Dirty"] - one["before"]["Private_Dirty"]) / 2**20 for one in found
        ]
        return " to ".join(dict.fromkeys(f"{size:.0f}" for size in (min(sizes), max(sizes))))

    seconds = max(one["seconds"] for one in found)
    return f"| {ranks} | {seconds:.1f} | {added('after')} | {added('after_steps')} | {load:.0f} |\n"
