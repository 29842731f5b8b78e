"""Preference records: a checkable record's right output, and a wrong one of the same form.

The wrong output makes one slip at the end: another number, address, path, node or link, worked into
the last step where that shows the answer. Nothing of it is right by chance: every question has one
answer, and the tests check both sides.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from drawing import ANSWER, Draw, Row
from topology_texts import COMMA, NONE, NOT_REACHED, REACHED, YES_NO

_MASKS = [str(ipaddress.ip_network(f"0.0.0.0/{prefix}").netmask) for prefix in range(8, 31)]


def preference_row(row: Row, language: str) -> Row:
    """The record as an alpaca row of a pair. No `difficulty`: a curriculum asks for records of
    every one.
    """
    draw = Draw("wrong", row["instruction"], row["input"])
    steps = row["output"].rpartition("\n")[0]
    if row["answer"] in YES_NO[language]:
        steps, wrong = _flipped(row, steps, draw, language)
    else:
        wrong = draw.pick(_wrong_answers(row, language))
        steps = _worked_in(steps, row["answer"], wrong)
    return {
        "instruction": row["instruction"],
        "input": row["input"],
        "chosen": row["output"],
        "rejected": f"{steps}\n{ANSWER[language]}{wrong}",
        "topic": row["difficulty"],
        "answer": row["answer"],
    }


def _wrong_answers(row: Row, language: str) -> list[str]:
    """Other answers of the same form."""
    answer = row["answer"]
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(:1| ?\D*)", answer)
    if number:
        return [
            other + number[2] for other in _numbers(number[1], 100 if number[2] == "%" else None)
        ]
    if re.fullmatch(r"/\d+", answer):
        return [f"/{int(answer[1:]) + change}" for change in (-2, -1, 1)]
    if re.fullmatch(r"\d+\.\d+\.\d+\.\d+(/\d+)?", answer):
        return _addresses(answer)
    return _names(row, language)


def _numbers(right: str, most: int | None) -> list[str]:
    """One digit off: the last of a whole number or the one before it, any of a decimal fraction."""
    whole, _, fraction = right.partition(".")
    if not fraction:
        changes = (-10, -2, -1, 1, 2, 10) if int(right) > 10 else (-2, -1, 1, 2)
        others = [int(right) + change for change in changes]
        return [str(other) for other in others if 0 < other <= (most or other)]
    found = []
    for place, digit in enumerate(whole + fraction):
        for change in (1, 9):
            digits = list(whole + fraction)
            digits[place] = str((int(digit) + change) % 10)
            text = "".join(digits[: len(whole)]) + "." + "".join(digits[len(whole) :])
            if (
                text[-1] != "0"
                and (text[0] != "0" or whole == "0")
                and float(text) <= (most or float(text))
            ):
                found.append(text)
    return found


def _addresses(right: str) -> list[str]:
    """A network one block further, or of half the size; a mask one bit longer or shorter; another
    last octet.
    """
    if right in _MASKS:
        place = _MASKS.index(right)
        return _MASKS[max(place - 1, 0) : place] + _MASKS[place + 1 : place + 2]
    if "/" not in right:
        front, _, octet = right.rpartition(".")
        others = [int(octet) + change for change in (-32, -16, -8, 8, 16, 32)]
        return [f"{front}.{other}" for other in others if 0 < other < 256]
    network = ipaddress.IPv4Network(right)
    starts = [int(network.network_address) + sign * network.num_addresses for sign in (-1, 1)]
    return [
        *(f"{ipaddress.IPv4Address(start)}/{network.prefixlen}" for start in starts),
        f"{network.network_address}/{network.prefixlen + 1}",
    ]


def _names(row: Row, language: str) -> list[str]:
    """Another node, link or path, or a list with one more, one less or another one."""
    comma = COMMA[language]
    links = _links(row, language)
    nodes = _nodes(links)
    right = [] if row["answer"] == NONE[language] else row["answer"].split(comma)
    if len(right) == 1 and right[0].count("-") > 1:
        return _paths(right[0].split("-"), links, nodes)
    of_links = "-" in right[0] if right else re.search("link|链路", row["instruction"]) is not None
    # Links stand with their nodes in order in an answer; in a question they stand in any.
    known = {frozenset(link.split("-")) for link in right}
    others = [
        name for name in (links if of_links else nodes) if frozenset(name.split("-")) not in known
    ]
    if re.search("next hop|下一跳|most links|highest degree|链路最多|度最大", row["instruction"]):
        return others
    halves = [(right[:place], right[place + 1 :]) for place in range(len(right))]
    replaced = [
        comma.join([*before, other, *after]) for before, after in halves for other in others
    ]
    shorter = [comma.join(before + after) for before, after in halves if len(right) > 1]
    return replaced or shorter or others or [NONE[language]]


def _links(row: Row, language: str) -> list[str]:
    """The links of a question on a network, without costs."""
    return [
        link.split(" ")[0] for link in re.split("：|: ", row["input"])[1].split(COMMA[language])
    ]


def _nodes(links: list[str]) -> list[str]:
    return list(dict.fromkeys(node for link in links for node in link.split("-")))


def _paths(right: list[str], links: list[str], nodes: list[str]) -> list[str]:
    """Other ways between the ends; without any, one through another node."""
    neighbours: dict[str, list[str]] = {node: [] for node in nodes}
    for one, other in (link.split("-") for link in links):
        neighbours[one].append(other)
        neighbours[other].append(one)
    found = [
        "-".join(path) for path in _ways(neighbours, (right[0],), right[-1]) if list(path) != right
    ]
    strange = [node for node in nodes if node not in right]
    return (
        found
        or ["-".join([right[0], node, right[-1]]) for node in strange]
        or ["-".join([right[0], right[-1]])]
    )


def _ways(
    neighbours: dict[str, list[str]], before: tuple[str, ...], end: str
) -> Iterator[tuple[str, ...]]:
    if before[-1] == end:
        yield before
        return
    for node in neighbours[before[-1]]:
        if node not in before:
            yield from _ways(neighbours, (*before, node), end)


def _flipped(row: Row, steps: str, draw: Draw, language: str) -> tuple[str, str]:
    """Yes for no or no for yes, with steps that say so."""
    yes, no = YES_NO[language]
    if row["answer"] == yes:
        path = re.split("[：:] ?", steps)[1].rstrip(".。").split("-")
        return NOT_REACHED[language].format(s=path[0], part=" ".join(path[:-1])), no
    start = re.match(r"(?:From|从) (\S+)", steps)
    end = re.search(r"reach (\S+)\?|Is (\S+) reachable|能到达? (\S+) 吗", row["instruction"])
    assert start and end
    ends = (start[1], end[1] or end[2] or end[3])
    between = draw.pick([node for node in _nodes(_links(row, language)) if node not in ends])
    return REACHED[language].format(path="-".join([ends[0], between, ends[1]])), yes


def _worked_in(steps: str, right: str, wrong: str) -> str:
    """The steps with the wrong answer, or its number or last octet, where the right one is what
    they end with.
    """
    number = r"\d+(?:\.\d+)?"
    octet = r"(?<=\.)\d+(?=/|$)"
    for pattern in (r".*", number, octet):
        found, other = re.search(pattern, right), re.search(pattern, wrong)
        if not found or not other or found[0] == other[0]:
            continue
        ends = re.search(rf"(?<=[=:：] |.：){re.escape(found[0])}(?=[.。]?$)", steps)
        if ends:
            return steps[: ends.start()] + other[0] + steps[ends.end() :]
    return steps
