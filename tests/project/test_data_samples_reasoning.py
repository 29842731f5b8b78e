"""Every reasoning answer is worked out again from the question's text, by other means than the
script's.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from math import prod
from typing import Any

from sample_rows import read_preferences, read_records

EVERY = [*read_records("train.jsonl"), *read_records("valid.jsonl"), *read_preferences()]
ROWS = [row for row in EVERY if row["difficulty"] == "reasoning"]
NUMBER = r"\d+(?:\.\d+)?"
CIDR = r"\d+\.\d+\.\d+\.\d+/\d+"


def numbers(text: str) -> list[Fraction]:
    return [Fraction(found) for found in re.findall(NUMBER, text)]


def amount(text: str, unit: str) -> Fraction:
    """The number before a unit."""
    found = re.search(rf"({NUMBER}) ?{re.escape(unit)}(?![A-Za-z/])", text)
    assert found, (text, unit)
    return Fraction(found[1])


def interface(text: str) -> ipaddress.IPv4Interface:
    found = re.search(CIDR, text)
    assert found, text
    return ipaddress.IPv4Interface(found[0])


def split_network(text: str) -> int:
    prefix = re.search(r"(?<=[ \u4e00-\u9fff])/(\d+)", text)
    assert prefix, text
    return sum(1 for _ in interface(text).network.subnets(new_prefix=int(prefix[1])))


def smallest_prefix(text: str) -> str:
    (hosts,) = numbers(text.replace("IPv4", ""))
    return next(f"/{prefix}" for prefix in range(30, 0, -1) if 2 ** (32 - prefix) - 2 >= hosts)


def vlsm(text: str) -> ipaddress.IPv4Network:
    """First fit: the first aligned block that overlaps nothing given before."""
    network = interface(text).network
    hosts = [int(found) for found in re.findall(r"\d+", re.sub(CIDR, "", text))]
    assert hosts == sorted(hosts, reverse=True)
    given: list[ipaddress.IPv4Network] = []
    for count in hosts:
        prefix = next(length for length in range(30, 0, -1) if 2 ** (32 - length) >= count + 2)
        blocks = network.subnets(new_prefix=prefix)
        given.append(next(block for block in blocks if not any(map(block.overlaps, given))))
    return given[-1]


def utilisation(text: str) -> Fraction:
    sent_bits = amount(text, "MB") * 8 * 10**6
    return 100 * sent_bits / (amount(text, "Mbit/s") * 10**6 * amount(text, "s"))


def availability(text: str, enough: Callable[[tuple[bool, ...]], bool]) -> Fraction:
    """Add up the probability of every pattern of up and down that is enough."""
    up = [Fraction(found) / 100 for found in re.findall(rf"({NUMBER})%", text)]
    return 100 * sum(
        prod(chance if state else 1 - chance for chance, state in zip(up, states, strict=True))
        for states in itertools.product((True, False), repeat=len(up))
        if enough(states)
    )


def downtime(text: str) -> Fraction:
    days = re.search(r"(\d+) (?:days|天)", text)
    assert days
    return int(days[1]) * 24 * 60 * (1 - amount(text, "%") / 100)


def budget(text: str) -> Fraction:
    distance, speed, routers, each, allowed = numbers(text)
    return allowed - sum([each] * int(routers), start=distance / speed)


def serialisation(text: str) -> Fraction:
    size = re.search(r"(\d+) (?:bytes|字节)", text)
    assert size
    return int(size[1]) * 8 / (amount(text, "Mbit/s") * 10**6) * 10**6


def fragments(text: str) -> int:
    """Cut pieces off until nothing is left."""
    mtu = re.search(r"MTU (?:为 )?(\d+)", text)
    size = re.search(r"(\d+) (?:bytes of data|字节数据)", text)
    assert mtu and size
    left, pieces = int(size[1]), 0
    while left > 0:
        room = int(mtu[1]) - 20
        left -= left if left <= room else room // 8 * 8
        pieces += 1
    return pieces


def oversubscription(text: str) -> str:
    ports, speed, uplinks, uplink = numbers(text)
    return f"{float(ports * speed / (uplinks * uplink)):g}:1"


def log_megabytes(text: str) -> Fraction:
    lines, size, minutes = numbers(text)
    return sum([lines * size] * 60) * minutes / 10**6


def usable(text: str) -> int:
    return sum(1 for _ in interface(text).network.hosts())


def in_flight(text: str) -> Fraction:
    return amount(text, "Mbit/s") * amount(text, "ms") / 8


def full_mesh(text: str) -> int:
    return len(list(itertools.combinations(range(int(*numbers(text))), 2)))


SOLVERS: list[tuple[str, str, Callable[[str], Any]]] = [
    ("usable host|hosts fit|可用主机|多少台主机", "", usable),
    ("belong to|network address of|属于哪个|所在的网络", "", lambda q: interface(q).network),
    ("broadcast|广播地址", "", lambda q: interface(q).network.broadcast_address),
    ("/\\d+ subnets|/\\d+ 子网", "", split_network),
    ("prefix|前缀", "", smallest_prefix),
    ("mask|掩码", "", lambda q: interface(q).network.netmask),
    ("offices|办公室", "", vlsm),
    ("file of|, in seconds|多少秒|几秒", " s", lambda q: amount(q, "MB") * 8 / amount(q, "Mbit/s")),
    ("delay product|in flight|时延积|在途", " kB", in_flight),
    ("window|窗口", " Mbit/s", lambda q: amount(q, "kB") * 8 / amount(q, "ms")),
    ("utilisation|How busy|利用率", "%", utilisation),
    ("in a row|all of its|串联|全部设备", "%", lambda q: availability(q, all)),
    ("parallel|Redundant|并联|备份", "%", lambda q: availability(q, any)),
    ("is it down|downtime|中断多少|停机几", " min", downtime),
    ("budget|预算", " ms", budget),
    ("microseconds|delay in us|微秒|时延是多少 us", " us", serialisation),
    ("ragment|分片", "", fragments),
    ("full mesh|joined directly|全互联|两两直连", "", full_mesh),
    ("oversubscription|收敛比", "", oversubscription),
    ("log lines|行日志", " MB", log_megabytes),
]


def test_answers() -> None:
    counts = Counter[str]()
    for row in ROWS:
        question, answer, wrong = row["instruction"], row["answer"], row.get("wrong")
        ((kind, unit, solve),) = [one for one in SOLVERS if re.search(one[0], question)]
        counts[kind] += 1
        expected = solve(question)
        assert answer.endswith(unit), row
        if wrong:  # of the same form
            assert wrong.endswith(unit) and re.sub(r"\d+", "0", wrong) == re.sub(
                r"\d+", "0", answer
            )
        if isinstance(expected, int | Fraction):
            assert Fraction(answer.removesuffix(unit)) == expected, row
            assert not wrong or Fraction(wrong.removesuffix(unit)) != expected, row
        else:
            assert answer == str(expected) != wrong, row
    assert len(counts) == len(SOLVERS) and min(counts.values()) >= 20
    assert max(counts.values()) - min(counts.values()) <= 4


TERM = rf"(?:2\^\(32 - \d+\)|2\^\d+|{NUMBER}%?)"
EQUATION = re.compile(
    rf"({TERM}(?: [-+*/] {TERM})*) = ({TERM}(?: [-+*/] {TERM})*)(, rounded down|（向下取整）)?"
)


def value(expression: str) -> Fraction:
    """The value of a sum of products, powers of two and percentages included."""
    for form, read in (
        (rf"({NUMBER})%", lambda found: format(float(found[1]) / 100, "g")),
        (r"2\^\(32 - (\d+)\)", lambda found: str(2 ** (32 - int(found[1])))),
        (r"2\^(\d+)", lambda found: str(2 ** int(found[1]))),
    ):
        expression = re.sub(form, read, expression)
    total = Fraction(0)
    for sign, product in re.findall(r"(^|[+-] )([^+-]+)", expression):
        factors = product.split()
        result = Fraction(factors[0])
        for operator, factor in zip(factors[1::2], factors[2::2], strict=True):
            result = result * Fraction(factor) if operator == "*" else result / Fraction(factor)
        total += -result if sign.startswith("-") else result
    return total


def test_every_equation_in_the_steps_holds() -> None:
    checked = 0
    for row in ROWS:
        for left, right, rounded in EQUATION.findall(row["output"]):
            expected = value(left)
            assert value(right) == (expected.__floor__() if rounded else expected), row
            checked += 1
    assert checked > 1000
