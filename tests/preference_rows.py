"""Preference data of very different lengths: pairs, and records with labels."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

WORDS = "router switch port frame packet BGP VLAN 路由 交换 端口 42 link node".split()


def make_pairs(path: Path, records: int, *, seed: int = 0, labels: bool = False) -> Path:
    """A file of pairs, or of answers of which every third is bad."""
    choose = random.Random(seed)

    def text(longest: int) -> str:
        return " ".join(choose.choices(WORDS, k=int(choose.paretovariate(1.2)) % longest + 1))

    # Whole or not there: several processes may make it at once.
    temporary = path.with_suffix(f".{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        for number in range(records):
            level = ("explain", "reasoning", "topology")[number % 3]
            record = {"prompt": text(8), "difficulty": level}
            if labels:
                record |= {"completion": text(20), "label": number % 3 != 0}
            else:
                record |= {"chosen": f"yes {text(20)}", "rejected": f"no {text(20)}"}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return temporary.replace(path)
