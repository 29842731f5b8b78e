"""What stands before a line: colours, times, ranks, nodes, containers."""

from __future__ import annotations

import re
import time

from finetune.plain_text import plain_lines

_STAMP = (
    r"(?P<year>20\d\d)[-/](?P<month>\d\d)[-/](?P<day>\d\d)["
    r" T_-](?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?:[.,](?P<fraction>\d{1,9})(?:\.(?P<micro>\d{3}))?)?(?:Z|[+-]\d\d:?\d\d)?"
)
_AMERICAN = (
    r"(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>20\d\d)["
    r" -](?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?:[.,](?P<fraction>\d{1,9}))?"
)
_GLOG = (
    r"[IWEFDV](?P<month>\d\d?)(?P<day>\d\d)"
    r" (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\.(?P<fraction>\d{3,9})"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SYSLOG = (
    rf"(?P<name>{'|'.join(_MONTHS)}) +(?P<day>\d\d?)"
    r" (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?: (?P<year>20\d\d))?"
)
_EPOCH = r"(?P<epoch>1[6-9]\d{8})\.(?P<fraction>\d{3,6})"
_ALL = (_STAMP, _AMERICAN, _GLOG, _SYSLOG, _EPOCH)
_FORMS = tuple(re.compile(rf"(?<![\w.]){form}") for form in _ALL)
_STAMPS, _US, _GLOGS, _SYS, _SECONDS = (re.sub(r"\?P<\w+>", "?:", form) for form in _ALL)
_YEAR = re.compile(
    r"(?<!\d)20\d\d(?=[-/]\d\d[-/]\d\d)|(?<=\d\d/\d\d/)20\d\d|(?<=:\d\d )20\d\d(?!\d)"
)
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,6})?"
_UPTIME = r" *\d+\.\d{6}"  # the kernel's, in brackets
_TIME_PREFIX = re.compile(
    rf"\[?(?:{_STAMPS}|{_US}|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?{_SYS}|{_SECONDS}"
    rf"|{_CLOCK}(?![\d<,:]))\]?[:,]? ?(?:[-|] )?"
    rf"|\[{_UPTIME}\] ?"
)

_LEVELS = r"(?!(?:INFO|WARN|ERROR|DEBUG|CRIT|SUCCESS|TRACE|NOTICE|c10d)\b)"
_HOST = rf"{_LEVELS}(?!python)[a-z][a-z_.-]*\d[a-z\d_.-]*|(?:\d{{1,3}}\.){{3}}\d{{1,3}}"
# Each names its rank or its node; letters after the names keep them apart.
_PREFIX = re.compile(
    r"\[rank(?P<rank_a>\d{1,5})\]:?\s?"  # torch
    r"|[\[(<](?:[\w.-]+[:/, ])?[Rr](?:ank|ANK)[ =:_-]?(?P<rank_b>\d{1,5})[\])>]:?\s?"
    r"|\[(?:default|default_)?(?P<rank_c>\d{1,5})\]:\s?"  # torch elastic's --tee, pdsh
    r"|\[(?P<rank_d>\d{1,4})\] (?=\S)"
    r"|\[\d+,(?P<rank_e>\d{1,5})\](?:<std\w+>)?:\s?"  # mpirun --tag-output
    r"|(?P<rank_f>\d{1,5}): (?=\S|  )"  # srun --label
    r"|[Rr]ank ?(?P<rank_g>\d{1,5})(?:: | *\| )"  # ours, foreman and others
    r"|(?P<node_a>\([\w.<>-]+ pid=\d+(?:, ip=[\d.:a-fA-F]+)?\))\s?"  # ray and others
    # pdsh, DeepSpeed on several nodes, docker compose
    rf"|(?P<node_b>{_HOST})(?::\s(?=\S|  )| *\| ?)"
    r"|\[(?:pod/)?(?P<node_c>(?!c10d)[a-z][\w./-]*-\d[\w./-]*)\]:?\s"  # kubectl, stern
    r"|(?P<node_d>[\w.-]+) (?=kernel: |slurmstepd\[|systemd\[|dockerd\[|kubelet\[)"  # syslog
    r"|kernel: (?:\[ *\d+\.\d{6}\] )?"
    r"|(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]+:\d+\] "  # vLLM
    r"|(?:ERROR|CRITICAL) +\| [\w.<>]+:[\w.<>]+:\d+ - "  # loguru
)
_RANK_INSIDE = re.compile(r"\[(?:[^][]*\b)?Rank (\d{1,5})\b|RankID:(\d{1,5})\b")


def decode(raw: bytes) -> str:
    """Return text without what a terminal would obey; what is not UTF-8 is replaced."""
    return plain_lines(raw.decode("utf-8", errors="replace"))


def strip_prefixes(text: str) -> tuple[str, int | None, str]:
    """The line without what launchers and loggers put before it, the rank and the node they
    name.
    """
    rank, node = None, ""
    for _ in range(6):
        match = _TIME_PREFIX.match(text) or _PREFIX.match(text)
        if match is None or match.end() == 0:
            break
        for name, value in match.groupdict().items():
            if value and name.startswith("rank"):
                rank = int(value)
            elif value:
                node = value
        text = text[match.end() :]
    if rank is None and (named_inside := _RANK_INSIDE.search(text)):
        rank = int(next(filter(None, named_inside.groups())))
    return text, rank, node


def tells_time(text: str) -> bool:
    """Whether `read_time` may find a time."""
    return any(form.search(text) for form in _FORMS)


def year_in(text: str) -> int | None:
    """Return the year of the first time in a text that tells one."""
    match = _YEAR.search(text)
    return int(match[0]) if match else None


def read_time(text: str, year: int) -> float | None:
    """The first time in a line, by the local clock: seconds since the epoch. Offsets from UTC are
    not looked at.
    """
    for form in _FORMS:
        if match := form.search(text):
            parts = match.groupdict()
            fraction = float(f"0.{parts.get('fraction') or 0}")
            if parts.get("epoch"):
                return int(parts["epoch"]) + fraction
            month = int(parts["month"]) if parts.get("month") else _MONTHS.index(parts["name"]) + 1
            day, hour, minute, second = (
                int(parts[name]) for name in ("day", "hour", "minute", "second")
            )
            try:
                seconds = time.mktime(
                    (int(parts.get("year") or year), month, day, hour, minute, second, 0, 0, -1)
                )
            except (OverflowError, ValueError):
                continue
            return seconds + fraction
    return None
