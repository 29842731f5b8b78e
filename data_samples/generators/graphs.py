"""Small networks as graphs, and the algorithms that answer the topology questions."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from drawing import Draw

Link = tuple[str, str]
NAMES: tuple[tuple[str, ...], ...] = (
    tuple("ABCDEFGHJK"),
    tuple(f"R{number}" for number in range(1, 11)),
    tuple(f"S{number}" for number in range(1, 11)),
)
CITIES = {
    "en": ("Berlin", "Cairo", "Delhi", "Lima", "Oslo", "Paris", "Rome", "Seoul", "Tokyo", "Vienna"),
    "zh": ("北京", "成都", "广州", "杭州", "南京", "上海", "深圳", "武汉", "西安", "重庆"),
}


@dataclass(frozen=True)
class Network:
    """Nodes in their order, and undirected links with costs. A link's nodes follow the order of the
    nodes.
    """

    nodes: tuple[str, ...]
    costs: dict[Link, int]

    def link(self, one: str, other: str) -> Link:
        """The link between two nodes as it is named."""
        return (one, other) if self.nodes.index(one) < self.nodes.index(other) else (other, one)

    def neighbours(self, node: str) -> list[str]:
        """The neighbours of a node, in the order of the nodes."""
        return [
            other for other in self.nodes if other != node and self.link(node, other) in self.costs
        ]

    def without(self, *, links: tuple[Link, ...] = (), node: str | None = None) -> Network:
        """The network after failures."""
        kept = {
            link: cost
            for link, cost in self.costs.items()
            if link not in links and node not in link
        }
        return Network(tuple(name for name in self.nodes if name != node), kept)

    def ordered_links(self) -> list[Link]:
        """The links in the order of their nodes."""
        return sorted(
            self.costs, key=lambda link: (self.nodes.index(link[0]), self.nodes.index(link[1]))
        )


def draw_network(
    draw: Draw, names: tuple[str, ...], links: int, *, connected: bool = True
) -> Network:
    """A random network with `links` links of costs 1 to 9; a random tree first when it must be
    connected.
    """
    order = draw.shuffled(names)
    pairs: list[Link] = []
    if connected:
        pairs = [
            (order[place], order[draw.integer(0, place - 1)]) for place in range(1, len(order))
        ]
    every = [(one, other) for place, one in enumerate(names) for other in names[place + 1 :]]
    pairs = [
        (one, other) if names.index(one) < names.index(other) else (other, one)
        for one, other in pairs
    ]
    pairs += draw.shuffled([pair for pair in every if pair not in pairs])[
        : max(0, links - len(pairs))
    ]
    return Network(names, {pair: draw.integer(1, 9) for pair in draw.shuffled(pairs)})


def with_distinct_costs(network: Network, draw: Draw) -> Network:
    """The same links with costs that all differ, so that the cheapest tree is one."""
    costs = draw.shuffled(range(1, max(10, len(network.costs) + 3)))
    return Network(network.nodes, dict(zip(network.costs, costs, strict=False)))


def shortest_paths(network: Network, start: str) -> dict[str, tuple[int, int, tuple[str, ...]]]:
    """Dijkstra from `start`: for each reachable node the cost, how many cheapest paths there are,
    and one of them.
    """
    best: dict[str, tuple[int, int, tuple[str, ...]]] = {start: (0, 1, (start,))}
    queue, done = [(0, start)], set()
    while queue:
        cost, node = heapq.heappop(queue)
        if node in done:
            continue
        done.add(node)
        _, ways, path = best[node]
        for other in network.neighbours(node):
            reached = cost + network.costs[network.link(node, other)]
            if other not in best or reached < best[other][0]:
                best[other] = (reached, ways, (*path, other))
                heapq.heappush(queue, (reached, other))
            elif reached == best[other][0] and other not in done:
                best[other] = (reached, best[other][1] + ways, best[other][2])
    return best


def path_with_fewest_hops(network: Network, start: str, end: str) -> tuple[str, ...] | None:
    """Breadth-first search; the first found in the order of the nodes, None if there is no path."""
    paths = {start: (start,)}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for other in network.neighbours(node):
            if other not in paths:
                paths[other] = (*paths[node], other)
                queue.append(other)
    return paths.get(end)


def parts(network: Network) -> list[list[str]]:
    """The connected parts, each in the order of the nodes."""
    left, found = list(network.nodes), []
    while left:
        part = [node for node in left if path_with_fewest_hops(network, left[0], node)]
        found.append(part)
        left = [node for node in left if node not in part]
    return found


def minimum_spanning_tree(network: Network) -> list[Link]:
    """Kruskal: the links of the cheapest tree in the order in which they are taken."""
    part = {node: node for node in network.nodes}
    taken = []
    for link in sorted(network.costs, key=lambda link: network.costs[link]):
        one, other = part[link[0]], part[link[1]]
        if one != other:
            taken.append(link)
            part = {node: one if name == other else name for node, name in part.items()}
    return taken


def cut_nodes(network: Network) -> list[str]:
    """The nodes whose failure cuts the others apart."""
    return [node for node in network.nodes if len(parts(network.without(node=node))) > 1]


def cut_links(network: Network) -> list[Link]:
    """The links whose failure cuts the network."""
    return [
        link for link in network.ordered_links() if len(parts(network.without(links=(link,)))) > 1
    ]


def disjoint_paths(network: Network, start: str, end: str) -> list[tuple[str, ...]]:
    """A largest set of paths without a common link (Edmonds-Karp with capacity 1), shortest
    first.
    """
    flow: set[Link] = set()  # directed: (from, to) carries one unit
    while True:
        paths, queue = {start: (start,)}, deque([start])
        while queue and end not in paths:
            node = queue.popleft()
            for other in network.neighbours(node):
                if other not in paths and (node, other) not in flow:
                    paths[other] = (*paths[node], other)
                    queue.append(other)
        if end not in paths:
            break
        path = paths[end]
        for step in zip(path, path[1:], strict=False):
            if step[::-1] in flow:
                flow.remove(step[::-1])
            else:
                flow.add(step)
    return paths_of_flow(network, flow, start, end)


def paths_of_flow(network: Network, flow: set[Link], start: str, end: str) -> list[tuple[str, ...]]:
    """Cut a flow of units into paths, shortest first."""
    found = []
    while True:
        carried = Network(network.nodes, {network.link(*step): 1 for step in flow})
        path: list[str] = [start]
        while path[-1] != end:
            following = [node for node in carried.neighbours(path[-1]) if (path[-1], node) in flow]
            if not following:
                return sorted(found, key=lambda nodes: (len(nodes), nodes))
            flow.discard((path[-1], following[0]))
            path.append(following[0])
        found.append(loop_free(path))


def loop_free(path: list[str]) -> tuple[str, ...]:
    """The path without its loops."""
    result: list[str] = []
    for node in path:
        result = result[: result.index(node) + 1] if node in result else [*result, node]
    return tuple(result)
