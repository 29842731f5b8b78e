"""The words of the topology rows: question forms and steps of each kind, in both languages."""

from __future__ import annotations

from networks_reasoning import Texts

HEADINGS = {"en": ("Links: ", "Links and costs: "), "zh": ("链路：", "链路和代价：")}
COMMA = {"en": ", ", "zh": "，"}
NONE = {"en": "none", "zh": "无"}
YES_NO = {"en": ("yes", "no"), "zh": ("能", "不能")}
REACHED = {"en": "A way is left: {path}.", "zh": "还有路径：{path}。"}
NOT_REACHED = {"en": "From {s} only these are left: {part}.", "zh": "从 {s} 只能到：{part}。"}
WITHOUT = {"en": "Without {f}: {parts}", "zh": "去掉 {f}：{parts}"}
NOTHING_CUTS = {
    "en": "After any one failure the rest stays connected.",
    "zh": "任意一处故障后其余部分仍然连通。",
}

TEXTS: dict[str, Texts] = {
    "cheapest_cost": Texts(
        (
            "What does the cheapest path from {s} to {t} cost?",
            "Find the cost of the shortest path between {s} and {t}.",
        ),
        ("从 {s} 到 {t} 的最短路径代价是多少？", "求 {s} 与 {t} 之间最短路径的代价。"),
        "Path: {path}. {sum} = {cost}.",
        "路径：{path}。{sum} = {cost}。",
        "{cost}",
    ),
    "cheapest_path": Texts(
        (
            "Which path from {s} to {t} is the cheapest?",
            "Name the nodes on the shortest path from {s} to {t}.",
        ),
        ("从 {s} 到 {t} 代价最小的路径是哪一条？", "写出从 {s} 到 {t} 的最短路径。"),
        "The lowest cost is {sum} = {cost}.",
        "最小代价是 {sum} = {cost}。",
        "{path}",
    ),
    "next_hop": Texts(
        (
            "{s} sends packets for {t} the cheapest way. What is the next hop?",
            "Which neighbour is the next hop of {s} on the shortest path to {t}?",
        ),
        (
            "{s} 按最短路径把数据包发往 {t}，下一跳是谁？",
            "在到 {t} 的最短路径上，{s} 的下一跳是哪个节点？",
        ),
        "Shortest path: {path}, cost {cost}.",
        "最短路径：{path}，代价 {cost}。",
        "{hop}",
    ),
    "hop_count": Texts(
        (
            "How many hops is it at least from {s} to {t}?",
            "Count the links on a way from {s} to {t} with the fewest hops.",
        ),
        ("从 {s} 到 {t} 最少几跳？", "{s} 到 {t} 跳数最少的路径经过几条链路？"),
        "Way: {path}.",
        "路径：{path}。",
        "{hops}",
    ),
    "reach_without_link": Texts(
        (
            "Link {f} fails. Can {s} still reach {t}?",
            "Is {t} reachable from {s} when the link {f} is down?",
        ),
        ("链路 {f} 故障后，{s} 还能到达 {t} 吗？", "链路 {f} 中断时，从 {s} 能到 {t} 吗？"),
        "{steps}",
        "{steps}",
    ),
    "reach_without_node": Texts(
        (
            "Node {f} fails. Can {s} still reach {t}?",
            "Is {t} reachable from {s} when the node {f} is down?",
        ),
        ("节点 {f} 故障后，{s} 还能到达 {t} 吗？", "节点 {f} 停机时，从 {s} 能到 {t} 吗？"),
        "{steps}",
        "{steps}",
    ),
    "tree_cost": Texts(
        (
            "What is the total cost of the minimum spanning tree?",
            "Join all nodes as cheaply as possible. What is the sum of the costs?",
        ),
        ("最小生成树的总代价是多少？", "用最小的代价连接所有节点，总代价是多少？"),
        "Take {taken}. {sum} = {cost}.",
        "选取 {taken}。{sum} = {cost}。",
        "{cost}",
    ),
    "tree_links": Texts(
        (
            "Which links form the minimum spanning tree?",
            "List the links of the cheapest tree that joins all nodes.",
        ),
        ("最小生成树由哪些链路组成？", "列出连接所有节点且代价最小的树的链路。"),
        "From cheap to dear without a loop: {taken}.",
        "按代价从小到大、不成环：{taken}。",
        "{links}",
    ),
    "blocked_links": Texts(
        (
            "How many links must a spanning tree protocol block here?",
            "How many links are redundant, if a tree is enough?",
        ),
        ("生成树协议在这里要阻塞多少条链路？", "如果一棵树就够了，有几条链路是冗余的？"),
        "{n} nodes need {tree} links. {m} - {tree} = {result}.",
        "{n} 个节点需要 {tree} 条链路。{m} - {tree} = {result}。",
    ),
    "single_nodes": Texts(
        (
            "Which nodes are single points of failure?",
            "The loss of which single node cuts the others apart?",
        ),
        ("哪些节点是单点故障？", "哪些节点一旦失效，其余节点就不再连通？"),
        "{steps}",
        "{steps}",
    ),
    "single_links": Texts(
        (
            "Which links are single points of failure?",
            "The loss of which single link cuts the network?",
        ),
        ("哪些链路是单点故障？", "哪些链路一旦中断，网络就不再连通？"),
        "{steps}",
        "{steps}",
    ),
    "separate_ways": Texts(
        (
            "How many paths from {s} to {t} share no link?",
            "Find the number of link-disjoint paths between {s} and {t}.",
        ),
        ("从 {s} 到 {t} 有多少条互不共用链路的路径？", "求 {s} 与 {t} 之间链路不相交路径的条数。"),
        "Paths: {paths}.",
        "路径：{paths}。",
    ),
    "degree": Texts(
        ("How many links does {x} have?", "What is the degree of {x}?"),
        ("{x} 有几条链路？", "节点 {x} 的度是多少？"),
        "Links of {x}: {links}.",
        "{x} 的链路：{links}。",
    ),
    "most_links": Texts(
        ("Which node has the most links?", "Name the node of the highest degree."),
        ("哪个节点的链路最多？", "度最大的节点是哪个？"),
        "Links of each: {counts}.",
        "各节点链路数：{counts}。",
    ),
    "separate_parts": Texts(
        (
            "Into how many separate parts does this network fall?",
            "How many connected components are there?",
        ),
        ("这个网络分成几个互不连通的部分？", "有多少个连通分量？"),
        "Parts: {parts}.",
        "各部分：{parts}。",
    ),
}
