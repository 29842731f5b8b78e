"""The words of the reasoning rows, question forms and steps of each kind in both languages, and the
rows.
"""

from __future__ import annotations

from drawing import LANGUAGES, Draw, Row, solved_row
from networks_reasoning import DRAWS, Texts

LEVEL = "reasoning"

TEXTS: dict[str, Texts] = {
    "usable_hosts": Texts(
        (
            "How many usable host addresses does {net} have?",
            "How many hosts fit in the subnet {net}?",
        ),
        ("{net} 有多少个可用主机地址？", "子网 {net} 能容纳多少台主机？"),
        "Host bits: 32 - {p} = {bits}. 2^{bits} = {total}. Without network and broadcast: {total} -"
        " 2 = {result}.",
        "主机位：32 - {p} = {bits}。2^{bits} = {total}。去掉网络地址和广播地址：{total} - 2 ="
        " {result}。",
    ),
    "network_of": Texts(
        (
            "Which network does {ip}/{p} belong to?",
            "Give the network address of the host {ip}/{p}.",
        ),
        ("{ip}/{p} 属于哪个网络？", "求主机 {ip}/{p} 所在的网络。"),
        "Block size: 2^(32 - {p}) = {block}. {octet} / {block} = {count}, rounded down. {count} *"
        " {block} = {start}.",
        "块大小：2^(32 - {p}) = {block}。{octet} / {block} = {count}（向下取整）。{count} * {block}"
        " = {start}。",
        "{front}.{start}/{p}",
    ),
    "broadcast_of": Texts(
        (
            "What is the broadcast address of the subnet of {ip}/{p}?",
            "Host {ip}/{p}: which broadcast address does it use?",
        ),
        ("{ip}/{p} 所在子网的广播地址是什么？", "主机 {ip}/{p} 使用哪个广播地址？"),
        "Block size: 2^{bits} = {block}. The block of {octet} starts at {start}. {start} + {block}"
        " - 1 = {last}.",
        "块大小：2^{bits} = {block}。{octet} 所在的块从 {start} 开始。{start} + {block} - 1 ="
        " {last}。",
        "{front}.{last}",
    ),
    "split_network": Texts(
        (
            "How many /{q} subnets does {net} hold?",
            "{net} is split into /{q} subnets. How many are there?",
        ),
        ("{net} 可以划分成多少个 /{q} 子网？", "把 {net} 划分为 /{q} 子网，共有几个？"),
        "Borrowed bits: {q} - {p} = {d}. 2^{d} = {result}.",
        "借用位数：{q} - {p} = {d}。2^{d} = {result}。",
    ),
    "prefix_for_hosts": Texts(
        (
            "What is the longest prefix of an IPv4 subnet for {n} hosts?",
            "A subnet must hold {n} hosts. Which prefix length is enough and no larger?",
        ),
        (
            "能容纳 {n} 台主机的 IPv4 子网，前缀最长是多少？",
            "某子网需要 {n} 台主机，刚好够用的前缀长度是多少？",
        ),
        "{n} + 2 = {need} addresses. 2^{bits} = {size} is enough. 32 - {bits} gives the prefix.",
        "需要 {n} + 2 = {need} 个地址。2^{bits} = {size} 足够。32 - {bits} 得到前缀。",
    ),
    "netmask": Texts(
        ("Write the netmask of {net}.", "Which dotted mask does {net} have?"),
        ("写出 {net} 的子网掩码。", "{net} 的点分十进制掩码是什么？"),
        "/{p}: octet {k} has {inside} network bits. 256 - {power} = {m}.",
        "/{p}：第 {k} 个字节有 {inside} 个网络位。256 - {power} = {m}。",
    ),
    "vlsm": Texts(
        (
            (
                "From {net}, offices with {list} hosts get the smallest subnets that fit, largest"
                " first. Which network does the last one get?"
            ),
        ),
        (
            (
                "从 {net} 中按从大到小的顺序，为主机数 {list} 的办公室各分配刚好够用的子网。最后一个得到哪个网络？"
            ),
        ),
        "{lines}",
        "{lines}",
    ),
    "transfer_time": Texts(
        (
            "How many seconds does a file of {size} MB take at {rate} Mbit/s?",
            "A link carries {rate} Mbit/s. How long do {size} MB take, in seconds?",
        ),
        (
            "{size} MB 的文件以 {rate} Mbit/s 传输需要多少秒？",
            "链路速率 {rate} Mbit/s，传送 {size} MB 要几秒？",
        ),
        "{size} * 8 = {mbit} Mbit. {mbit} / {rate} = {result}.",
        "{size} * 8 = {mbit} Mbit。{mbit} / {rate} = {result}。",
        "{result} s",
    ),
    "bandwidth_delay": Texts(
        (
            "What is the bandwidth-delay product in kB of {rate} Mbit/s and an RTT of {rtt} ms?",
            "How many kB are in flight on a full path of {rate} Mbit/s with {rtt} ms RTT?",
        ),
        (
            "带宽 {rate} Mbit/s、RTT {rtt} ms 的路径，带宽时延积是多少 kB？",
            "路径速率 {rate} Mbit/s，RTT 为 {rtt} ms，占满时在途数据有多少 kB？",
        ),
        "{rate} * {rtt} = {kbit} kbit. {kbit} / 8 = {result}.",
        "{rate} * {rtt} = {kbit} kbit。{kbit} / 8 = {result}。",
        "{result} kB",
    ),
    "window_rate": Texts(
        (
            (
                "A TCP window of {window} kB and an RTT of {rtt} ms: what is the highest rate in"
                " Mbit/s?"
            ),
            "With a window of {window} kB and {rtt} ms RTT, how many Mbit/s can TCP reach?",
        ),
        (
            "TCP 窗口 {window} kB，RTT {rtt} ms，最高速率是多少 Mbit/s？",
            "窗口为 {window} kB、RTT 为 {rtt} ms 时，TCP 能达到多少 Mbit/s？",
        ),
        "{window} * 8 = {kbit} kbit. {kbit} / {rtt} = {result}.",
        "{window} * 8 = {kbit} kbit。{kbit} / {rtt} = {result}。",
        "{result} Mbit/s",
    ),
    "utilisation": Texts(
        (
            "A {rate} Mbit/s link carried {size} MB in {t} s. What was its utilisation in percent?",
            "In {t} s, {size} MB crossed a link of {rate} Mbit/s. How busy was it, in percent?",
        ),
        (
            "{rate} Mbit/s 的链路在 {t} s 内传送了 {size} MB，利用率是百分之几？",
            "{t} s 内有 {size} MB 通过 {rate} Mbit/s 的链路，求利用率。",
        ),
        "{size} * 8 = {mbit} Mbit. {mbit} / {t} = {used} Mbit/s. {used} / {rate} = {result}%.",
        "{size} * 8 = {mbit} Mbit。{mbit} / {t} = {used} Mbit/s。{used} / {rate} = {result}%。",
        "{result}%",
    ),
    "serial_availability": Texts(
        (
            "Devices in a row are up {list} of the time. What is the availability of the path?",
            "A path needs all of its devices: {list}. How available is it?",
        ),
        (
            "串联的设备可用性分别为 {list}，整条路径的可用性是多少？",
            "一条路径需要全部设备正常：{list}。它的可用性是多少？",
        ),
        "{product} = {value}.",
        "{product} = {value}。",
        "{result}%",
    ),
    "parallel_availability": Texts(
        (
            "Two parallel links are up {list} of the time. How often is at least one up?",
            "Redundant links with availability {list}: what do they reach together?",
        ),
        (
            "两条并联链路的可用性为 {list}，至少一条可用的概率是多少？",
            "互为备份的链路可用性为 {list}，合起来是多少？",
        ),
        "Both down: {product} = {down}. 1 - {down} gives the rest.",
        "同时中断：{product} = {down}。1 - {down} 得到其余。",
        "{result}%",
    ),
    "downtime": Texts(
        (
            "A service is up {a}% of {d} days. How many minutes is it down?",
            "Availability {a}% over {d} days: how many minutes of downtime?",
        ),
        ("服务在 {d} 天内的可用性为 {a}%，中断多少分钟？", "可用性 {a}%，{d} 天内停机几分钟？"),
        "{d} * 1440 = {total} minutes. {total} * {share} = {result}.",
        "{d} * 1440 = {total} 分钟。{total} * {share} = {result}。",
        "{result} min",
    ),
    "latency_budget": Texts(
        (
            (
                "A path has {km} km of fibre (200 km per ms) and {n} routers of {each} ms each. "
                "The budget is {budget} ms. How much is left?"
            ),
        ),
        (
            (
                "路径有 {km} km 光纤（每 ms 200 km）和 {n} 台路由器，每台 {each} ms。预算 {budget}"
                " ms，还剩多少？"
            ),
        ),
        "{km} / 200 = {fibre} ms. {n} * {each} = {devices} ms. {fibre} + {devices} = {total} ms. "
        "{budget} - {total} = {result} ms.",
        "{km} / 200 = {fibre} ms。{n} * {each} = {devices} ms。{fibre} + {devices} = {total} ms。"
        "{budget} - {total} = {result} ms。",
        "{result} ms",
    ),
    "serialisation": Texts(
        (
            (
                "How many microseconds does a packet of {size} bytes take to leave a {rate} Mbit/s"
                " port?"
            ),
            "Serialisation delay in us of {size} bytes at {rate} Mbit/s?",
        ),
        (
            "{size} 字节的数据包从 {rate} Mbit/s 端口发出需要多少微秒？",
            "{size} 字节在 {rate} Mbit/s 下的串行化时延是多少 us？",
        ),
        "{size} * 8 = {bits} bits. {bits} / {rate} = {result}.",
        "{size} * 8 = {bits} 比特。{bits} / {rate} = {result}。",
        "{result} us",
    ),
    "fragments": Texts(
        (
            (
                "An IPv4 packet carries {n} bytes of data. MTU {mtu}, header 20 bytes. How many"
                " fragments are there?"
            ),
            "How many IPv4 fragments do {n} bytes of data need at MTU {mtu} with 20-byte headers?",
        ),
        (
            "IPv4 数据包携带 {n} 字节数据，MTU {mtu}，首部 20 字节，共有多少个分片？",
            "MTU 为 {mtu}、首部 20 字节时，{n} 字节数据需要几个 IPv4 分片？",
        ),
        "{mtu} - 20 = {room}. {n} = {full} * {room} + {rest}. Rounded up: {result}.",
        "{mtu} - 20 = {room}。{n} = {full} * {room} + {rest}。向上取整：{result}。",
    ),
    "full_mesh": Texts(
        (
            "How many links does a full mesh of {n} routers need?",
            "{n} sites are all joined directly to each other. How many links is that?",
        ),
        ("{n} 台路由器全互联需要多少条链路？", "{n} 个站点两两直连，共有几条链路？"),
        "{n} * {m} = {double}. {double} / 2 = {result}.",
        "{n} * {m} = {double}。{double} / 2 = {result}。",
    ),
    "oversubscription": Texts(
        (
            (
                "A switch has {n} ports of {g} Gbit/s and {k} uplinks of {u} Gbit/s. What is the"
                " oversubscription?"
            ),
        ),
        ("交换机有 {n} 个 {g} Gbit/s 端口和 {k} 条 {u} Gbit/s 上行链路，收敛比是多少？",),
        "{n} * {g} = {down}. {k} * {u} = {up}. {down} / {up} = {ratio}.",
        "{n} * {g} = {down}。{k} * {u} = {up}。{down} / {up} = {ratio}。",
    ),
    "log_volume": Texts(
        (
            (
                "A firewall writes {r} log lines of {b} bytes each second. How many MB is that in"
                " {m} minutes?"
            ),
        ),
        ("防火墙每秒写 {r} 行日志，每行 {b} 字节，{m} 分钟共有多少 MB？",),
        "{r} * {b} = {per}. {m} * 60 = {s}. {per} * {s} = {bytes} bytes.",
        "{r} * {b} = {per}。{m} * 60 = {s}。{per} * {s} = {bytes} 字节。",
        "{result} MB",
    ),
}


def reasoning_row(kind: str, language: str, draw: Draw) -> Row:
    """Draw one row of a kind."""
    texts, values = TEXTS[kind], DRAWS[kind](draw)
    questions, steps = (
        (texts.questions_en, texts.steps_en)
        if language == "en"
        else (texts.questions_zh, texts.steps_zh)
    )
    instruction = draw.pick(questions).format(**values)
    return solved_row(
        LEVEL, language, instruction, "", steps.format(**values), texts.answer.format(**values)
    )


def reasoning_rows(counts: dict[str, int]) -> dict[str, list[Row]]:
    """Rows for each split in `counts` (name -> rows), the kinds and languages in turn, no question
    twice.
    """
    draws = {
        (kind, language): Draw(LEVEL, kind, language) for kind in TEXTS for language in LANGUAGES
    }
    seen: set[str] = set()
    split: dict[str, list[Row]] = {}
    turn = 0
    for name, count in counts.items():
        split[name] = []
        while len(split[name]) < count:
            kind, language = list(draws)[turn % len(draws)]
            row = reasoning_row(kind, language, draws[kind, language])
            while row["instruction"] in seen:
                row = reasoning_row(kind, language, draws[kind, language])
            seen.add(row["instruction"])
            split[name].append(row)
            turn += 1
    return split
