"""Reasoning records: arithmetic of computer networks, with the steps shown and an exact answer.

Each kind is a function that draws numbers and works the answer out. Its words are in
reasoning_texts.py.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from math import prod

from drawing import Draw

Values = dict[str, object]


@dataclass(frozen=True)
class Texts:
    """Question forms and the steps, as format strings over the values of a kind. `answer` is one
    too.
    """

    questions_en: tuple[str, ...]
    questions_zh: tuple[str, ...]
    steps_en: str
    steps_zh: str
    answer: str = "{result}"


def draw_network(draw: Draw, prefix: int) -> ipaddress.IPv4Network:
    """A random private network with this prefix length (at least 8)."""
    octets = draw.pick(((10,), (10,), (172, 16), (192, 168)))
    address = [
        octets[0],
        octets[1] if len(octets) > 1 else draw.integer(0, 255),
        draw.integer(0, 255),
        draw.integer(0, 255),
    ]
    if octets == (172, 16):
        address[1] = draw.integer(16, 31)
    return ipaddress.ip_network((".".join(map(str, address)), prefix), strict=False)


def plain(number: Decimal) -> str:
    """A decimal without an exponent or trailing zeros."""
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def usable_hosts(draw: Draw) -> Values:
    prefix = draw.integer(20, 30)
    bits = 32 - prefix
    return {
        "net": draw_network(draw, prefix),
        "p": prefix,
        "bits": bits,
        "total": 2**bits,
        "result": 2**bits - 2,
    }


def address_in_network(draw: Draw) -> Values:
    """An address with a prefix of 25 to 30, and the block of the last octet in which it lies."""
    prefix = draw.integer(25, 30)
    network = draw_network(draw, 24)
    octet, block = draw.integer(1, 254), 2 ** (32 - prefix)
    start = octet // block * block
    front = str(network.network_address).rsplit(".", 1)[0]
    return {
        "ip": f"{front}.{octet}",
        "p": prefix,
        "bits": 32 - prefix,
        "octet": octet,
        "block": block,
        "count": octet // block,
        "start": start,
        "last": start + block - 1,
        "front": front,
    }


def split_network(draw: Draw) -> Values:
    prefix = draw.integer(12, 24)
    borrowed = draw.integer(1, 8)
    longer = min(prefix + borrowed, 30)
    network = draw_network(draw, prefix)
    return {
        "net": network,
        "p": prefix,
        "q": longer,
        "d": longer - prefix,
        "result": 2 ** (longer - prefix),
    }


def prefix_for_hosts(draw: Draw) -> Values:
    hosts = draw.integer(3, draw.pick((30, 120, 500, 2000)))
    bits = (hosts + 1).bit_length()
    return {"n": hosts, "need": hosts + 2, "bits": bits, "size": 2**bits, "result": f"/{32 - bits}"}


def netmask(draw: Draw) -> Values:
    prefix = draw.integer(9, 30)
    network = draw_network(draw, prefix)
    inside = (prefix - 1) % 8 + 1
    return {
        "net": network,
        "p": prefix,
        "k": (prefix - 1) // 8 + 1,
        "inside": inside,
        "power": 2 ** (8 - inside),
        "m": 256 - 2 ** (8 - inside),
        "result": network.netmask,
    }


def vlsm(draw: Draw) -> Values:
    """Subnets of a network for several offices, the largest first; the answer is the network of the
    smallest.
    """
    while True:
        network = draw_network(draw, draw.pick((22, 23, 24)))
        hosts = sorted(
            {draw.integer(2, draw.pick((14, 62, 254))) for _ in range(draw.integer(2, 5))},
            reverse=True,
        )
        sizes = [2 ** (count + 1).bit_length() for count in hosts]
        if len(hosts) > 1 and sum(sizes) <= network.num_addresses:
            break
    start, lines = network.network_address, []
    for count, size in zip(hosts, sizes, strict=True):
        subnet = ipaddress.ip_network((start, 33 - size.bit_length()))
        lines.append(f"{count} + 2 <= {size}: {subnet}")
        start += size
    return {
        "net": network,
        "list": ", ".join(map(str, hosts)),
        "lines": "\n".join(lines),
        "result": subnet,
    }


def transfer_time(draw: Draw) -> Values:
    rate = 4 * draw.pick((2, 4, 5, 10, 20, 25, 50, 100, 200, 250))
    seconds = 2 * draw.integer(1, 40)
    mbit = rate * seconds
    return {"size": mbit // 8, "rate": rate, "mbit": mbit, "result": seconds}


def bandwidth_delay(draw: Draw) -> Values:
    rate, rtt = (
        draw.pick((8, 10, 16, 20, 40, 50, 80, 100, 200, 400, 800, 1000)),
        4 * draw.integer(1, 30),
    )
    return {"rate": rate, "rtt": rtt, "kbit": rate * rtt, "result": plain(Decimal(rate * rtt) / 8)}


def window_rate(draw: Draw) -> Values:
    rate, rtt = draw.pick((1, 2, 4, 5, 8, 10, 16, 20, 25, 40, 50)), 8 * draw.integer(1, 20)
    return {"window": rate * rtt // 8, "rtt": rtt, "kbit": rate * rtt, "result": rate}


def utilisation(draw: Draw) -> Values:
    rate, percent, seconds = (
        draw.pick((20, 40, 100, 200, 400, 1000)),
        5 * draw.integer(1, 19),
        8 * draw.integer(1, 15),
    )
    used = rate * percent // 100
    return {
        "rate": rate,
        "t": seconds,
        "size": used * seconds // 8,
        "mbit": used * seconds,
        "used": used,
        "result": percent,
    }


def serial_availability(draw: Draw) -> Values:
    parts = [Decimal(draw.integer(90, 99)) / 100 for _ in range(draw.pick((2, 2, 3)))]
    return {
        "list": ", ".join(f"{plain(part * 100)}%" for part in parts),
        "product": " * ".join(map(plain, parts)),
        "value": plain(prod(parts, start=Decimal(1))),
        "result": plain(prod(parts, start=Decimal(1)) * 100),
    }


def parallel_availability(draw: Draw) -> Values:
    parts = [Decimal(draw.integer(80, 99)) / 100 for _ in range(2)]
    down = prod((1 - part for part in parts), start=Decimal(1))
    return {
        "list": ", ".join(f"{plain(part * 100)}%" for part in parts),
        "product": " * ".join(plain(1 - part) for part in parts),
        "down": plain(down),
        "result": plain((1 - down) * 100),
    }


def downtime(draw: Draw) -> Values:
    percent, days = (
        Decimal(draw.pick(("99", "99.5", "99.9", "99.95", "98", "99.8"))),
        draw.integer(2, 90),
    )
    minutes = days * 1440
    share = (100 - percent) / 100
    return {
        "a": percent,
        "d": days,
        "total": minutes,
        "share": plain(share),
        "result": plain(minutes * share),
    }


def latency_budget(draw: Draw) -> Values:
    distance, routers, each = 200 * draw.integer(1, 25), draw.integer(2, 9), draw.integer(1, 4)
    fibre, devices = distance // 200, routers * each
    total = fibre + devices
    budget = total + draw.integer(1, 30)
    return {
        "km": distance,
        "n": routers,
        "each": each,
        "fibre": fibre,
        "devices": devices,
        "total": total,
        "budget": budget,
        "result": budget - total,
    }


def serialisation(draw: Draw) -> Values:
    size, rate = (
        draw.pick((100, 200, 250, 500, 600, 750, 1000, 1250, 1500, 3000, 9000)),
        draw.pick((1, 2, 4, 5, 8, 10, 16, 20, 50, 100)),
    )
    return {"size": size, "rate": rate, "bits": size * 8, "result": plain(Decimal(size * 8) / rate)}


def fragments(draw: Draw) -> Values:
    # Each MTU leaves room for a multiple of 8 bytes, as fragment offsets demand.
    mtu, size = draw.pick((1500, 1492, 1476, 1420)), 100 * draw.integer(16, 120)
    room = mtu - 20
    return {
        "n": size,
        "mtu": mtu,
        "room": room,
        "full": size // room,
        "rest": size % room,
        "result": -(-size // room),
    }


def full_mesh(draw: Draw) -> Values:
    nodes = draw.integer(4, 60)
    return {
        "n": nodes,
        "m": nodes - 1,
        "double": nodes * (nodes - 1),
        "result": nodes * (nodes - 1) // 2,
    }


def oversubscription(draw: Draw) -> Values:
    ports, speed, uplinks = (
        draw.pick((12, 16, 24, 32, 36, 40, 48)),
        draw.pick((1, 10, 25)),
        draw.pick((2, 3, 4, 6, 8)),
    )
    uplink = 10 * draw.integer(1, 10) if speed > 1 else draw.pick((2, 4, 5, 10))
    down, up = ports * speed, uplinks * uplink
    if down < up or down * 10 % up:
        return oversubscription(draw)
    ratio = plain(Decimal(down) / up)
    return {
        "n": ports,
        "g": speed,
        "k": uplinks,
        "u": uplink,
        "down": down,
        "up": up,
        "ratio": ratio,
        "result": f"{ratio}:1",
    }


def log_volume(draw: Draw) -> Values:
    rate, size, minutes = (
        10 * draw.integer(1, 60),
        50 * draw.integer(2, 12),
        draw.pick((5, 10, 20, 30, 60)),
    )
    return {
        "r": rate,
        "b": size,
        "m": minutes,
        "per": rate * size,
        "s": minutes * 60,
        "bytes": rate * size * minutes * 60,
        "result": plain(Decimal(rate * size * minutes * 60) / 1000000),
    }


DRAWS: dict[str, Callable[[Draw], Values]] = {
    "usable_hosts": usable_hosts,
    "network_of": address_in_network,
    "broadcast_of": address_in_network,
    "split_network": split_network,
    "prefix_for_hosts": prefix_for_hosts,
    "netmask": netmask,
    "vlsm": vlsm,
    "transfer_time": transfer_time,
    "bandwidth_delay": bandwidth_delay,
    "window_rate": window_rate,
    "utilisation": utilisation,
    "serial_availability": serial_availability,
    "parallel_availability": parallel_availability,
    "downtime": downtime,
    "latency_budget": latency_budget,
    "serialisation": serialisation,
    "fragments": fragments,
    "full_mesh": full_mesh,
    "oversubscription": oversubscription,
    "log_volume": log_volume,
}
