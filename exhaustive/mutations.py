"""Candidates for faults/: small changes of a module, generated from its syntax tree.

    python exhaustive/mutations.py batching/mixing.py --count 20 --seed 0

Prints entries of faults/*.toml, whose name and tests are to be filled in. A change that alters
nothing a user could see (another number of retries, a text, an equal expression) is no fault: leave
it out.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "finetune"
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "*",
}


def changes(node: ast.AST, source: str) -> Iterator[tuple[str, ast.AST, str]]:
    """What can be wrong about a node: a word for it, the part that changes, and its new text."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield "bound", node, f"{text(left)} {COMPARISONS[type(operator)]} {text(right)}"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            yield "sign", node, f"{text(left)} {ARITHMETIC[type(operator)]} {text(right)}"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            yield "condition", node, word.join(f"({text(value)})" for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negation", node, text(operand)
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            yield "off by one", node, str(number + 1)
        case ast.Constant(value=bool() as flag):
            yield "flag", node, str(not flag)
        case ast.Expr(value=ast.Call()):
            yield "dropped call", node, "pass"
        case ast.Call(args=[first, second, *_]):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                yield "swapped arguments: first", first, text(second)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "nothing returned", value, "None"


def mutations(source: str) -> Iterator[tuple[str, int, str, str]]:
    """All changes of a module: what, its line, the text of the lines before and after.

    The text begins as many whole lines before the change as make it unique.
    """
    lines = source.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line.encode()))
    data = source.encode()
    for node in ast.walk(ast.parse(source)):
        for what, part, new in changes(node, source):
            start = offsets[part.lineno - 1] + part.col_offset
            end = offsets[part.end_lineno - 1] + part.end_col_offset
            for first in range(part.lineno - 1, max(-1, part.lineno - 6), -1):
                begin, stop = offsets[first], offsets[part.end_lineno]
                right = data[begin:stop].decode()
                if source.count(right) == 1:
                    wrong = (data[begin:start] + new.encode() + data[end:stop]).decode()
                    yield what, part.lineno, right, wrong
                    break


def is_valid(source: str) -> bool:
    try:
        compile(source, "", "exec")
    except SyntaxError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="below finetune/")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    source = (PACKAGE / asked.file).read_text(encoding="utf-8")
    found = [
        (what, line, right, wrong)
        for what, line, right, wrong in mutations(source)
        if "'''" not in right + wrong and is_valid(source.replace(right, wrong, 1))
    ]
    chosen = random.Random(asked.seed).sample(found, min(asked.count, len(found)))
    for what, line, right, wrong in sorted(chosen, key=lambda change: change[1]):
        print(f'[[fault]]\nname = "{what}, line {line}"\nfile = "{asked.file}"')
        print(f"right = '''\n{right}'''\nwrong = '''\n{wrong}'''\ntests = \"\"\n")


if __name__ == "__main__":
    main()
