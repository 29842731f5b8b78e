"""Every topology answer is found again from the question's text by brute force: all paths, all sets
of links.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from sample_rows import chinese, read_preferences, read_records

Link = frozenset[str]
EVERY = [*read_records("train.jsonl"), *read_records("valid.jsonl"), *read_preferences()]
ROWS = [row for row in EVERY if row["difficulty"] == "topology"]
NAME = r"[A-Za-z][A-Za-z0-9]*|[\u4e00-\u9fff]+"


class Question:
    """The network and the nodes of a row, read from its text alone."""

    def __init__(self, row: dict[str, str]) -> None:
        self.text, self.output = row["instruction"], row["output"]
        links = re.findall(rf"({NAME})-({NAME})(?: (\d+))?", re.split("：|: ", row["input"])[1])
        self.costs = {frozenset(link[:2]): int(link[2] or 1) for link in links}
        assert len(self.costs) == len(links) > 0
        self.nodes = sorted({node for link in self.costs for node in link}, key=self.place)
        self.named = [word for word in re.findall(NAME, self.text) if word in self.nodes]
        self.comma, self.none = ("，", "无") if chinese(self.text) else (", ", "none")

    @staticmethod
    def place(node: str) -> tuple[int, str]:
        """R2 before R10. Chinese cities are in the order of their pinyin."""
        cities = ["北京", "成都", "广州", "杭州", "南京", "上海", "深圳", "武汉", "西安", "重庆"]
        number = re.sub(r"\D", "", node)
        return (cities.index(node) if node in cities else int(number or 0), node)

    def listed(self, items: list[str]) -> str:
        return self.comma.join(items) or self.none

    def listed_links(self, links: Iterable[Link]) -> str:
        pairs = (sorted(link, key=self.place) for link in links)
        ordered = sorted(pairs, key=lambda pair: [self.place(node) for node in pair])
        return self.listed(["-".join(pair) for pair in ordered])

    def is_whole(self, links: Iterable[Link]) -> bool:
        return len(reachable(set(links), self.nodes[0])) == len(self.nodes)


def reachable(links: set[Link], start: str) -> set[str]:
    """Grow the set until it stands still."""
    found = {start}
    while True:
        more = found | {node for link in links if link & found for node in link}
        if more == found:
            return found
        found = more


def paths(
    links: set[Link], start: str, end: str, before: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Every path without a repeated node."""
    before = (*before, start)
    if start == end:
        yield before
        return
    for link in links:
        if start in link:
            (other,) = link - {start}
            if other not in before:
                yield from paths(links, other, end, before)


def steps(path: tuple[str, ...]) -> list[Link]:
    return [frozenset(pair) for pair in itertools.pairwise(path)]


def ends(question: Question) -> tuple[str, str]:
    start, end = question.named
    # "在到 T 的最短路径上，S 的下一跳" names the end first.
    return (end, start) if question.text.startswith("在到") else (start, end)


def cheapest(question: Question) -> tuple[int, tuple[str, ...]]:
    start, end = ends(question)
    costs = sorted(
        (sum(question.costs[s] for s in steps(p)), p)
        for p in paths(set(question.costs), start, end)
    )
    assert len(costs) == 1 or costs[0][0] < costs[1][0], "the cheapest path must be one"
    return costs[0]


def hops(question: Question) -> str:
    return str(min(len(path) for path in paths(set(question.costs), *ends(question))) - 1)


def reach(question: Question) -> str:
    links = set(question.costs)
    failed = re.search(r"(?:[Ll]ink|链路) (\S+)-(\S+)", question.text)
    node = re.search(r"(?:[Nn]ode|节点) (\S+)", question.text)
    assert bool(failed) != bool(node)
    gone = set(failed.groups() if failed else node.groups() if node else ())
    start, end = (question.named[:2]) if not set(question.named[:2]) & gone else question.named[-2:]
    if question.text.startswith(("Is", "is")):
        start, end = question.named[1], question.named[0]
    left = {link for link in links if not (link == gone if failed else link & gone)}
    yes, no = ("能", "不能") if chinese(question.text) else ("yes", "no")
    return yes if end in reachable(left, start) else no


def trees(question: Question) -> tuple[int, set[Link]]:
    """The cheapest of all sets of n - 1 links that reach every node."""
    sets = itertools.combinations(question.costs, len(question.nodes) - 1)
    whole = filter(question.is_whole, sets)
    every = [(sum(question.costs[link] for link in chosen), chosen) for chosen in whole]
    least = min(cost for cost, _ in every)
    (tree,) = [set(chosen) for cost, chosen in every if cost == least]
    return least, tree


def blocked(question: Question) -> str:
    """Take links away as long as nothing is cut off."""
    links, count = set(question.costs), 0
    for link in question.costs:
        if question.is_whole(links - {link}):
            links, count = links - {link}, count + 1
    return str(count)


def cutting_nodes(question: Question) -> str:
    found = []
    for node in question.nodes:
        others = [other for other in question.nodes if other != node]
        left = {link for link in question.costs if node not in link}
        if len(reachable(left, others[0])) < len(others):
            found.append(node)
    return question.listed(found)


def cutting_links(question: Question) -> str:
    links = set(question.costs)
    return question.listed_links(link for link in links if not question.is_whole(links - {link}))


def separate_ways(question: Question) -> str:
    """Menger: the fewest links whose loss parts the two nodes. The paths shown must exist and be
    disjoint.
    """
    start, end = ends(question)
    links = set(question.costs)
    sets = (lost for n in itertools.count() for lost in itertools.combinations(links, n))
    fewest = len(next(lost for lost in sets if end not in reachable(links - set(lost), start)))
    texts = re.findall(rf"(?:{NAME})(?:-(?:{NAME}))+", question.output)
    shown = [tuple(path.split("-")) for path in texts]
    used = [step for path in shown for step in steps(path)]
    assert len(shown) == fewest and len(set(used)) == len(used) and set(used) <= links
    assert all((path[0], path[-1]) == (start, end) for path in shown)
    return str(fewest)


def degree(question: Question, node: str) -> int:
    return sum(node in link for link in question.costs)


def busiest(question: Question) -> str:
    first, second = sorted(question.nodes, key=lambda node: -degree(question, node))[:2]
    assert degree(question, first) > degree(question, second)
    return first


def components(question: Question) -> str:
    return str(len({frozenset(reachable(set(question.costs), node)) for node in question.nodes}))


SOLVERS: list[tuple[str, Callable[[Question], str]]] = [
    ("path .* cost|cost of the shortest|路径代价|路径的代价", lambda q: str(cheapest(q)[0])),
    ("Which path|nodes on the|哪一条|写出", lambda q: "-".join(cheapest(q)[1])),
    ("next hop|下一跳", lambda q: cheapest(q)[1][1]),
    ("hops|几跳|跳数", hops),
    ("fails|is down|故障后|中断时|停机时", reach),
    ("total cost|sum of|总代价", lambda q: str(trees(q)[0])),
    ("links form|links of the cheapest|由哪些|且代价最小", lambda q: q.listed_links(trees(q)[1])),
    ("block|redundant|阻塞|冗余", blocked),
    ("nodes are single|single node|哪些节点", cutting_nodes),
    ("links are single|single link|哪些链路(?!组成)", cutting_links),
    ("share no|disjoint|不共用|不相交", separate_ways),
    ("links does|the degree of|有几条链路？|的度是", lambda q: str(degree(q, q.named[0]))),
    ("most links|highest degree|链路最多|度最大", busiest),
    ("separate parts|components|互不连通|连通分量", components),
]


def test_answers() -> None:
    counts = Counter[str]()
    for row in ROWS:
        question = Question(row)
        ((kind, solve),) = [one for one in SOLVERS if re.search(one[0], question.text)]
        counts[kind] += 1
        right, wrong = solve(question), row.get("wrong")
        assert right == row["answer"], row
        if wrong:
            # whatever the order of its names; a node for a node, a number for a number
            given, names = (set(re.split(question.comma, text)) for text in (wrong, right))
            assert given != names and wrong.isdigit() == right.isdigit(), row
            of_nodes = names <= set(question.nodes)
            assert not of_nodes or given <= {*question.nodes, question.none}, row
    assert len(counts) == len(SOLVERS) and min(counts.values()) >= 20


def test_neither_answer_is_the_usual_one() -> None:
    counts = Counter(row["answer"] for row in ROWS if row["answer"] in ("yes", "no", "能", "不能"))
    assert len(counts) == 4
    assert 0.35 < (counts["yes"] + counts["能"]) / counts.total() < 0.65
    weak = [row["answer"] for row in ROWS if re.search("single|单点故障", row["instruction"])]
    assert 0 < sum(answer in ("none", "无") for answer in weak) < len(weak)
