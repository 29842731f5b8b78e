"""The tables of tests/scale/data.py."""

from __future__ import annotations

from typing import Any

NAMES = {"ours": "finetune", "trl": "TRL", "llamafactory": "LLaMA-Factory"}
INTRODUCTION = """
Short conversations (a question of five words, an answer of four; {tokens:.0f} tokens with the template), a tokenizer
made locally, 2 processes on 2 cores. Memory is the sum over all processes of their share of each page (Pss), highest
of looks every half second; "private" leaves out the pages of files. Disk is all that was written at the highest, the
rows themselves apart. The load is the machine's average over 15 minutes: above 3, other work ran beside it, and
seconds are too many by as much; rows per core second (of processor time, imports apart) depend on it less, memory
and disk do not.

TRL: `load_dataset("json")` and the constructor of SFTTrainer with `assistant_only_loss`. LLaMA-Factory: its own
`get_dataset`. Both with 2 processes, as they come in the environments of `make bench`.
"""
PREPARED = """
| | rows | seconds | rows/s | rows per core second | peak memory, GiB | private, GiB | disk, B a row | load |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""
EXTRAPOLATED = """
Extrapolated to 10 million rows on two free cores from {rows:,} each, not run: {each}.
"""
KILLED = """
Killed (SIGKILL) {before:,.0f} s after its start, with {kept:,} of {rows:,} rows in finished shards, and started again:
done after {after:,.0f} s more. What was finished was not made again.
"""
STARTED = """
A start with {rows:,} samples that are there ({gib:.1f} GiB; their tokens were drawn at random instead of tokenized, all
else is what a run finds), until `prepare_data` returns, and 100 global batches of 128 read after it. Private is what
the data added to a process (Private_Dirty); before, the arrays of lengths, counts, record ids and difficulties and the
plan's order were 267 MiB in each (115 measured, the rest by their sizes). One process of a node reads the entry and,
where their hash is not known, the rows.

| processes of a node | seconds until all were ready | private of each, MiB | after 100 global batches, MiB | load |
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
        f"{large['rows']:,} rows tokenized, {entry['rows']:,} samples started with by 1 and 8"
        " processes"
    )
    text += (
        "\nOne process has more: it has hashed the entry in threads, whose memory the C library"
        " keeps.\n"
    )
    return (
        f"{text}\nLargest case that was really run: {largest}.\n\nCommand: `make scale"
        " PART=data`.\n"
    )


def _extrapolated(found: dict[str, Any]) -> str:
    """From the most rows that all contenders prepared."""
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
            each.append(f"{NAMES[run['name']]} {hours:.1f} h, {gib:.0f} GiB of disk")
    return EXTRAPOLATED.format(rows=rows, each="; ".join(each))


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
