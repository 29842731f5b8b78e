"""Topology records: questions about small networks, answered by the algorithms of graphs.py.

Each kind is a function from a random network to the values of its texts, or to None where the
network does not suit it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drawing import LANGUAGES, Draw, Row, solved_row
from graphs import (
    CITIES,
    NAMES,
    Link,
    Network,
    cut_links,
    cut_nodes,
    disjoint_paths,
    draw_network,
    minimum_spanning_tree,
    parts,
    path_with_fewest_hops,
    shortest_paths,
    with_distinct_costs,
)
from topology_texts import (
    COMMA,
    HEADINGS,
    NONE,
    NOT_REACHED,
    NOTHING_CUTS,
    REACHED,
    TEXTS,
    WITHOUT,
    YES_NO,
)

LEVEL = "topology"
LONG_SHARE = 0.15  # of the rows have 8 to 10 nodes instead of 4 to 6

Values = dict[str, object]


@dataclass(frozen=True)
class Case:
    """What a kind works from."""

    network: Network
    draw: Draw
    language: str
    wish: bool  # the answer that a yes-or-no question is to have

    def ends(self) -> tuple[str, str]:
        """Two different nodes."""
        start, end = self.draw.shuffled(self.network.nodes)[:2]
        return start, end

    def listed(self, items: list[str]) -> str:
        """Items with commas, or the word for none."""
        return COMMA[self.language].join(items) if items else NONE[self.language]


def cheapest(case: Case) -> Values | None:
    """The only cheapest path between two nodes that are not neighbours on it."""
    start, end = case.ends()
    cost, ways, path = shortest_paths(case.network, start)[end]
    if ways > 1 or len(path) < 3:
        return None
    costs = [
        case.network.costs[case.network.link(*step)] for step in zip(path, path[1:], strict=False)
    ]
    return {
        "s": start,
        "t": end,
        "path": "-".join(path),
        "sum": " + ".join(map(str, costs)),
        "cost": cost,
        "hop": path[1],
    }


def fewest_hops(case: Case) -> Values | None:
    start, end = case.ends()
    path = path_with_fewest_hops(case.network, start, end)
    if path is None or len(path) < 3:
        return None
    return {"s": start, "t": end, "path": "-".join(path), "hops": len(path) - 1}


def reach(case: Case, network: Network, start: str, end: str, failed: str) -> Values | None:
    """Whether `end` can be reached after a failure, if that is the answer wished for."""
    path = path_with_fewest_hops(network, start, end)
    if (path is None) == case.wish:
        return None
    if path:
        steps = REACHED[case.language].format(path="-".join(path))
    else:
        part = [node for node in network.nodes if path_with_fewest_hops(network, start, node)]
        steps = NOT_REACHED[case.language].format(s=start, part=" ".join(part))
    return {
        "f": failed,
        "s": start,
        "t": end,
        "steps": steps,
        "result": YES_NO[case.language][path is None],
    }


def reach_without_link(case: Case) -> Values | None:
    start, end = case.ends()
    link = case.draw.pick(list(case.network.costs))
    return reach(case, case.network.without(links=(link,)), start, end, "-".join(link))


def reach_without_node(case: Case) -> Values | None:
    start, end, node = case.draw.shuffled(case.network.nodes)[:3]
    return reach(case, case.network.without(node=node), start, end, node)


def spanning_tree(case: Case) -> Values:
    network = case.network
    taken = minimum_spanning_tree(network)
    return {
        "taken": case.listed([f"{'-'.join(link)} {network.costs[link]}" for link in taken]),
        "sum": " + ".join(str(network.costs[link]) for link in taken),
        "cost": sum(network.costs[link] for link in taken),
        "links": case.listed(["-".join(link) for link in network.ordered_links() if link in taken]),
    }


def blocked_links(case: Case) -> Values:
    nodes, links = len(case.network.nodes), len(case.network.costs)
    return {"n": nodes, "tree": nodes - 1, "m": links, "result": links - nodes + 1}


def parts_without(case: Case, failures: list[tuple[str, Network]]) -> str:
    """For each failure that cuts the network, the parts that remain."""
    lines = []
    for name, network in failures:
        remaining = " | ".join(" ".join(part) for part in parts(network))
        lines.append(WITHOUT[case.language].format(f=name, parts=remaining))
    return "\n".join(lines) or NOTHING_CUTS[case.language]


def single_nodes(case: Case) -> Values:
    found = cut_nodes(case.network)
    failures = [(node, case.network.without(node=node)) for node in found]
    return {"steps": parts_without(case, failures), "result": case.listed(found)}


def single_links(case: Case) -> Values:
    found = cut_links(case.network)
    failures = [("-".join(link), case.network.without(links=(link,))) for link in found]
    return {
        "steps": parts_without(case, failures),
        "result": case.listed(["-".join(link) for link in found]),
    }


def separate_ways(case: Case) -> Values:
    start, end = case.ends()
    paths = disjoint_paths(case.network, start, end)
    return {
        "s": start,
        "t": end,
        "paths": case.listed(["-".join(path) for path in paths]),
        "result": len(paths),
    }


def links_of(network: Network, node: str) -> list[Link]:
    """The links of a node."""
    return [network.link(node, other) for other in network.neighbours(node)]


def degree(case: Case) -> Values:
    node = case.draw.pick(case.network.nodes)
    links = links_of(case.network, node)
    return {
        "x": node,
        "links": case.listed(["-".join(link) for link in links]),
        "result": len(links),
    }


def most_links(case: Case) -> Values | None:
    counts = {node: len(links_of(case.network, node)) for node in case.network.nodes}
    highest = [node for node, count in counts.items() if count == max(counts.values())]
    if len(highest) > 1:
        return None
    return {
        "counts": case.listed([f"{node} {count}" for node, count in counts.items()]),
        "result": highest[0],
    }


def separate_parts(case: Case) -> Values | None:
    found = parts(case.network)
    if min(map(len, found)) < 2:  # a node without links would not be in the list of links
        return None
    return {"parts": " | ".join(" ".join(part) for part in found), "result": len(found)}


KINDS: dict[str, Callable[[Case], Values | None]] = {
    "cheapest_cost": cheapest,
    "cheapest_path": cheapest,
    "next_hop": cheapest,
    "hop_count": fewest_hops,
    "reach_without_link": reach_without_link,
    "reach_without_node": reach_without_node,
    "tree_cost": spanning_tree,
    "tree_links": spanning_tree,
    "blocked_links": blocked_links,
    "single_nodes": single_nodes,
    "single_links": single_links,
    "separate_ways": separate_ways,
    "degree": degree,
    "most_links": most_links,
    "separate_parts": separate_parts,
}
WITH_COSTS = ("cheapest_cost", "cheapest_path", "next_hop", "tree_cost", "tree_links")


def topology_case(kind: str, language: str, draw: Draw, wish: bool) -> Case:
    """A random network for a kind."""
    long = draw.chance(LONG_SHARE)
    names = draw.pick((*NAMES, CITIES[language])) if long else draw.pick(NAMES)
    nodes = names[: draw.integer(8, 10) if long else draw.integer(4, 6)]
    if kind == "separate_parts":
        network = draw_network(draw, nodes, len(nodes) - draw.integer(0, 3), connected=False)
    else:
        network = draw_network(draw, nodes, len(nodes) - 1 + draw.integer(0, 3))
    if kind in ("tree_cost", "tree_links"):
        network = with_distinct_costs(network, draw)
    return Case(network, draw, language, wish)


def topology_row(kind: str, language: str, draw: Draw) -> Row:
    """Draw one row of a kind."""
    wish = draw.chance(0.5)  # before the search, so that both answers are equally frequent
    while True:
        case = topology_case(kind, language, draw, wish)
        values = KINDS[kind](case)
        if values is not None:
            break
    costs = kind in WITH_COSTS
    links = [
        f"{'-'.join(link)} {cost}" if costs else "-".join(link)
        for link, cost in case.network.costs.items()
    ]
    texts = TEXTS[kind]
    questions, steps = (
        (texts.questions_en, texts.steps_en)
        if language == "en"
        else (texts.questions_zh, texts.steps_zh)
    )
    return solved_row(
        LEVEL,
        language,
        draw.pick(questions).format(**values),
        HEADINGS[language][costs] + COMMA[language].join(links),
        steps.format(**values),
        texts.answer.format(**values),
    )


def topology_rows(counts: dict[str, int]) -> dict[str, list[Row]]:
    """Rows for each split in `counts` (name -> rows), kinds and languages in turn, no question on a
    network twice.
    """
    draws = {
        (kind, language): Draw(LEVEL, kind, language) for kind in KINDS for language in LANGUAGES
    }
    seen: set[tuple[str, str]] = set()
    split: dict[str, list[Row]] = {}
    turn = 0
    for name, count in counts.items():
        split[name] = []
        while len(split[name]) < count:
            kind, language = list(draws)[turn % len(draws)]
            row = topology_row(kind, language, draws[kind, language])
            while (row["instruction"], row["input"]) in seen:
                row = topology_row(kind, language, draws[kind, language])
            seen.add((row["instruction"], row["input"]))
            split[name].append(row)
            turn += 1
    return split
