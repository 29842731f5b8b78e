"""The tasks of the base model's corpus: words, translation, statements, sums, networks and
inventories, greetings.

They share the words of the shipped records, but not their question forms, and they hold none of the
facts. A task is a function of a draw and a language that gives a question and its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from corpus_words import names_of_things, terms, word
from drawing import Draw, spaced
from graphs import CITIES, NAMES, draw_network
from networks_reasoning import plain
from topology_texts import COMMA

Turn = tuple[str, str]

PEOPLE = {
    "en": (
        "Anna",
        "Ben",
        "Chen",
        "Dora",
        "Emil",
        "Fatima",
        "Hugo",
        "Ines",
        "Jonas",
        "Kira",
        "Lena",
        "Mia",
        "Noor",
        "Omar",
    ),
    "zh": (
        "小王",
        "小李",
        "老张",
        "小陈",
        "刘工",
        "赵工",
        "小林",
        "周老师",
        "吴工",
        "小何",
        "郑工",
        "老孙",
        "小马",
        "朱工",
    ),
}
GREETINGS = {
    "en": (
        ("Hello, I am {p}.", "Hello {p}, how can I help you?"),
        ("Hi! My name is {p}.", "Hi {p}! What would you like to know about networks?"),
        ("Good morning from {c}.", "Good morning! How is the network in {c} today?"),
        ("Thank you, {p} is happy.", "You are welcome. Please say hello to {p}."),
        ("Goodbye, I go to {c}.", "Goodbye, and have a good trip to {c}."),
        ("{p} from {c} is new here.", "Welcome, {p} from {c}!"),
    ),
    "zh": (
        ("你好，我是{p}。", "{p}你好，有什么可以帮你？"),
        ("您好！我叫{p}。", "{p}您好！想了解网络的什么内容？"),
        ("{c}的同事早上好。", "早上好！{c}的网络今天怎么样？"),
        ("谢谢，{p}很满意。", "不客气，请代我向{p}问好。"),
        ("再见，我要去{c}了。", "再见，祝你去{c}一路顺利。"),
        ("{c}的{p}是新同事。", "欢迎来自{c}的{p}！"),
    ),
}
WORD_TASKS: dict[str, dict[str, str]] = {
    "en": {
        "repeat": "Repeat: {w}",
        "reverse": "Reverse the order: {w}",
        "first": "First entry: {w}",
        "last": "Last entry: {w}",
        "count": "Count the entries: {w}",
    },
    "zh": {
        "repeat": "请重复：{w}",
        "reverse": "请倒序：{w}",
        "first": "第一项：{w}",
        "last": "最后一项：{w}",
        "count": "数一数项数：{w}",
    },
}
STATEMENTS = {
    "en": (
        ("Note that {t} is on the list of {c}.", "Noted: {t}, list of {c}."),
        ("{p} reads about {t} and {u}.", "{p} wants to know {t} and {u}."),
        ("The lesson in {c} is about {t}.", "In {c} there is a lesson about {t}."),
        ("Write down {t}, then {u}.", "1. {t}\n2. {u}"),
    ),
    "zh": (
        ("请记下：{c}的清单上有{t}。", "已记下：{t}，{c}的清单。"),
        ("{p}正在学习{t}和{u}。", "{p}想了解{t}和{u}。"),
        ("{c}的课程讲{t}。", "在{c}有一门讲{t}的课。"),
        ("写下{t}，再写{u}。", "1. {t}\n2. {u}"),
    ),
}
INVENTORY = {
    "en": (
        "{p} in {c} has {a} switches and {b} routers. {q}",
        ("How many switches?", "How many routers?", "Devices together?", "Where?", "Who?"),
    ),
    "zh": (
        "{c}的{p}有 {a} 台交换机和 {b} 台路由器。{q}",
        ("交换机有几台？", "路由器有几台？", "设备一共几台？", "在哪里？", "是谁？"),
    ),
}
READING = {
    "en": (
        "Neighbours of {x}",
        "Nodes in order",
        "Add up the path {path}",
        "Cost between {a} and {b}",
        "Links written here",
        "Copy",
    ),
    "zh": (
        "{x} 的邻居",
        "按顺序写出节点",
        "把路径 {path} 加起来",
        "{a} 与 {b} 之间的代价",
        "写出的链路数",
        "抄写",
    ),
}
NETWORK = {"en": "Network: ", "zh": "网络："}


def greeting(draw: Draw, language: str) -> Turn:
    names = {"p": draw.pick(PEOPLE[language]), "c": draw.pick(CITIES[language])}
    asked, answered = draw.pick(GREETINGS[language])
    return asked.format(**names), answered.format(**names)


def word_task(draw: Draw, language: str) -> Turn:
    chosen = [word(draw, language) for _ in range(draw.integer(2, 12))]
    task = draw.pick(tuple(WORD_TASKS[language]))
    joint = draw.pick((" ", ", ", " | ", "\n") if language == "en" else (" ", "，", "、", "\n"))
    answers = {
        "repeat": joint.join(chosen),
        "reverse": joint.join(reversed(chosen)),
        "first": chosen[0],
        "last": chosen[-1],
        "count": str(len(chosen)),
    }
    return WORD_TASKS[language][task].format(w=joint.join(chosen)), answers[task]


def translation(draw: Draw, language: str) -> Turn:
    english, chinese = draw.pick(terms())
    if language == "en":
        return f"In Chinese: {english}", chinese
    return spaced(f"翻译成英文：{chinese}"), english


def statement(draw: Draw, language: str) -> Turn:
    asked, answered = draw.pick(STATEMENTS[language])
    names = {
        "t": draw.pick(names_of_things(language)),
        "u": draw.pick(names_of_things(language)),
        "p": draw.pick(PEOPLE[language]),
        "c": draw.pick(CITIES[language]),
    }
    turn = asked.format(**names), answered.format(**names)
    return (spaced(turn[0]), spaced(turn[1])) if language == "zh" else turn


def whole_sum(draw: Draw) -> Turn:
    """One operation on whole numbers."""
    high = draw.pick((9, 30, 100, 400))
    one, other = draw.integer(0, high), draw.integer(1, draw.pick((9, high)))
    forms = (
        (f"{one} + {other}", one + other),
        (f"{max(one, other)} - {min(one, other)}", max(one, other) - min(one, other)),
        (f"{one} * {other}", one * other),
        (f"{one * other} / {other}", one),
        (f"{one} / {other}, rounded down", one // other),
        (f"2^{one % 16}", 2 ** (one % 16)),
        (f"2^(32 - {32 - one % 13})", 2 ** (one % 13)),
        (f"32 - {one % 33}", 32 - one % 33),
        (f"256 - {2 ** (one % 9)}", 256 - 2 ** (one % 9)),
        (f"{one} * 8", one * 8),
        (f"{one * 8} / 8", one),
    )
    asked, answer = draw.pick(forms)
    return asked, str(answer)


def decimal_sum(draw: Draw) -> Turn:
    """One operation on decimals."""
    one, other = Decimal(draw.integer(80, 99)) / 100, Decimal(draw.integer(80, 99)) / 100
    forms = (
        (f"{plain(one)} * {plain(other)}", one * other),
        (f"1 - {plain(one * other)}", 1 - one * other),
        (f"1 - {plain(one)}", 1 - one),
        (f"{plain(1 - one)} * {plain(1 - other)}", (1 - one) * (1 - other)),
    )
    asked, answer = draw.pick(forms)
    return asked, plain(answer)


def calculation(draw: Draw, language: str) -> Turn:
    """A sum, answered as an equation: one, or two one after the other."""
    turns = [
        decimal_sum(draw) if draw.chance(0.2) else whole_sum(draw)
        for _ in range(draw.pick((1, 1, 2, 3)))
    ]
    down = "（向下取整）" if language == "zh" else ", rounded down"
    asked = [question.replace(", rounded down", down) for question, _ in turns]
    equations = [
        f"{question} = {answer}" for question, (_, answer) in zip(asked, turns, strict=True)
    ]
    stop, heading = (".", "Work out: ") if language == "en" else ("。", "请计算：")
    gap = draw.pick(("\n", " " if language == "en" else ""))
    return heading + "; ".join(asked), (stop + gap).join(equations) + stop


def several_addends(draw: Draw, language: str) -> Turn:
    numbers = [draw.integer(1, 12) for _ in range(draw.integer(2, 6))]
    text = " + ".join(map(str, numbers))
    return ("Add " if language == "en" else "相加：") + text, f"{text} = {sum(numbers)}"


def address_reading(draw: Draw, language: str) -> Turn:
    octets = [draw.pick((10, 172, 192)), *(draw.integer(0, 255) for _ in range(3))]
    prefix, place = draw.integer(8, 30), draw.integer(1, 4)
    address = ".".join(map(str, octets))
    front = ".".join(map(str, octets[:3]))
    forms = {
        "en": (
            (f"Part {place} of {address}/{prefix}", str(octets[place - 1])),
            (f"Prefix of {address}/{prefix}", f"/{prefix}"),
            (f"{address} with {prefix % 256} at the end", f"{front}.{prefix}"),
            (f"Say again: {address}/{prefix}", f"{address}/{prefix}"),
        ),
        "zh": (
            (f"{address}/{prefix} 的第 {place} 段", str(octets[place - 1])),
            (f"{address}/{prefix} 的前缀", f"/{prefix}"),
            (f"把 {address} 的末尾换成 {prefix}", f"{front}.{prefix}"),
            (f"再说一遍：{address}/{prefix}", f"{address}/{prefix}"),
        ),
    }
    return draw.pick(forms[language])


def network_reading(draw: Draw, language: str) -> Turn:
    """Read single things off a list of links: no search, no failure, no tree."""
    everything, first = draw.pick((*NAMES, *NAMES, CITIES[language])), draw.integer(0, 3)
    names = everything[first : first + draw.integer(3, 7)]
    network = draw_network(draw, names, len(names) - 1 + draw.integer(0, 3))
    costs = draw.chance(0.6)
    links = [
        f"{'-'.join(link)} {cost}" if costs else "-".join(link)
        for link, cost in network.costs.items()
    ]
    node = draw.pick(names)
    one, other = draw.pick(list(network.costs))
    path = [node, *network.neighbours(node)[:1]]
    path += [other for other in network.neighbours(path[-1]) if other not in path][:1]
    taken = [network.costs[network.link(*step)] for step in zip(path, path[1:], strict=False)]
    joint = COMMA[language]
    answers = (
        joint.join(network.neighbours(node)),
        joint.join(names),
        f"{' + '.join(map(str, taken))} = {sum(taken)}",
        str(network.costs[one, other]),
        str(len(links)),
        joint.join(links),
    )
    place = draw.pick((0, 1, 2, 3, 4, 5) if costs else (0, 1, 4, 5))
    asked = READING[language][place].format(x=node, path="-".join(path), a=one, b=other)
    return f"{NETWORK[language]}{joint.join(links)}\n{asked}", answers[place]


def inventory(draw: Draw, language: str) -> Turn:
    person, city = draw.pick(PEOPLE[language]), draw.pick(CITIES[language])
    switches, routers = draw.integer(2, 60), draw.integer(2, 40)
    form, questions = INVENTORY[language]
    place = draw.integer(0, len(questions) - 1)
    answers = (switches, routers, f"{switches} + {routers} = {switches + routers}", city, person)
    return form.format(p=person, c=city, a=switches, b=routers, q=questions[place]), str(
        answers[place]
    )


TASKS: tuple[tuple[int, Callable[[Draw, str], Turn]], ...] = (
    (3, greeting),
    (16, word_task),
    (5, translation),
    (8, statement),
    (24, calculation),
    (6, several_addends),
    (8, address_reading),
    (24, network_reading),
    (6, inventory),
)
