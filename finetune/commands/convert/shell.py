"""Commands of a shell script as words. Nothing is run: of expansions those are done that need no
program. Others stay as they are written, so that a message can show them.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from finetune.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_]\w*")
_EXPANSION = re.compile(r"([A-Za-z_]\w*)(?::?-(.*))?", re.S)
_ARRAY = re.compile(r"([A-Za-z_]\w*)\[[@*]\]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_EXPORTS = (["export"], ["declare"], ["local"])
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class _Word:
    """A word in the making; an unquoted expansion may end it and start others."""

    text: str = ""
    begun: bool = False  # "" is a word, too

    def add(self, text: str) -> None:
        self.text += text
        self.begun = True


@dataclass
class Shell:
    """The words of a script's commands, by the rules of a shell.

    Attributes:
        text: the script, or a command line.
        variables: what assignments gave so far.
        arrays: the same of arrays.
        place: where in the text the reading is.
        is_array: whether the words are those of an array, in which NAME=VALUE assigns nothing.
    """

    text: str
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    place: int = 0
    is_array: bool = False

    def commands(self) -> Iterator[list[str]]:
        """Yield each command, without assignments in front of it, which are kept.

        Raises:
            ConfigError: a quote is not closed, with the line where it opens.
        """
        words: list[str] = []
        word = _Word()

        def end_word() -> None:
            nonlocal word
            if word.begun:
                words.append(word.text)
            word = _Word()

        while self.place < len(self.text):
            char = self.text[self.place]
            if char in " \t\r":
                self.place += 1
                end_word()
            elif self.text.startswith("\\\n", self.place):
                self.place += 2
            elif char == "#" and not word.begun:
                self._skip_to("\n")
            elif found := _HERE_DOCUMENT.match(self.text, self.place):
                self._skip_here_document(found)
            elif char in "\n;|" or (char == "&" and not self._is_redirection(word)):
                self.place += 1
                end_word()
                if words := self._without_assignments(words):
                    yield words
                words = []
            elif char == "(" and (name := _ASSIGNMENT.fullmatch(word.text)):
                self.place += 1
                given = self._array_words()
                before = self.arrays.get(name[1], []) if name[2] else []
                self.arrays[name[1]] = before + given
                word = _Word()
            elif char == "$" and not self.text.startswith("$'", self.place):
                start = self.place
                parts = self._expansion()
                # An unquoted value is split at white space; what has no value here stays whole.
                is_value = parts != [self.text[start : self.place]]
                if is_value and len(parts) == 1 and not self._assigns(word, words):
                    parts = parts[0].split() or ([""] if word.begun else [])
                for number, part in enumerate(parts):
                    if number:
                        end_word()
                    word.add(part)
            else:
                self._take_plain(word, words, end_word)
        end_word()
        if words := self._without_assignments(words):
            yield words

    # ------------------------------------------------------------ parts of a word

    def _take_plain(self, word: _Word, words: list[str], end_word: Callable[[], None]) -> None:
        """Take a character, or a part in quotes, that is no expansion."""
        char = self.text[self.place]
        if char == "\\":
            word.add(self.text[self.place + 1 : self.place + 2])
            self.place += 2
        elif char == "'" or self.text.startswith("$'", self.place):
            self.place = self.text.index("'", self.place)
            word.add(self._until("'"))
        elif char == '"':
            parts = self._quoted()
            for number, part in enumerate(parts):
                if number:
                    words.append(word.text)
                    word.text = ""
                word.add(part)
        elif char == "`":
            inside = self._until("`")
            if not inside.lstrip().startswith("#"):  # `# text` is how a long command has comments
                word.add(f"`{inside}`")
        else:
            self.place += 1
            word.add(char)

    def _quoted(self) -> list[str]:
        """Take a part in double quotes; several words only of an array."""
        start = self.place
        self.place += 1
        parts = [""]
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == '"':
                self.place += 1
                return parts
            if char == "\\" and self.text[self.place + 1 : self.place + 2] in (
                '"',
                "\\",
                "$",
                "`",
                "\n",
            ):
                following = self.text[self.place + 1]
                parts[-1] += "" if following == "\n" else following
                self.place += 2
            elif char == "$":
                first, *others = self._expansion() or [""]
                parts[-1] += first
                parts += others
            else:
                parts[-1] += char
                self.place += 1
        raise self._not_closed('"', start)

    def _expansion(self) -> list[str]:
        """Take `$NAME`, `${...}`, `$((...))` or `$(...)`.

        Returns:
            Its words: several only of an array. As it is written, if its value is not known.
        """
        start = self.place
        if self.text.startswith("$((", start):
            inside = self._between("(", ")")
            return [self._computed(inside[1:-1], f"$({inside})")]
        if self.text.startswith("$(", start):
            inside = self._between("(", ")")
            name, _, rest = inside.strip().partition(" ")
            return [
                self._computed(rest.replace("\\*", "*"), f"$({inside})")
                if name == "expr"
                else f"$({inside})"
            ]
        if self.text.startswith("${", start):
            return self._value(self._between("{", "}"))
        name = _NAME.match(self.text, start + 1)
        if name is None:
            self.place += 1
            return ["$"]
        self.place = name.end()
        return [self.variables.get(name[0], f"${name[0]}")]

    def _value(self, inside: str) -> list[str]:
        """Return the value of `${inside}`."""
        if array := _ARRAY.fullmatch(inside):
            return list(self.arrays.get(array[1], [f"${{{inside}}}"]))
        found = _EXPANSION.fullmatch(inside)
        if found is None:
            return [f"${{{inside}}}"]
        name, default = found.groups()
        value = self.variables.get(name, "")
        if value or (default is None and name in self.variables):
            return [value]
        return [f"${{{inside}}}" if default is None else self._filled(default)]

    def _filled(self, text: str) -> str:
        """Text with its expansions, as in double quotes."""
        escaped = text.strip("\"'").replace('"', '\\"')
        return " ".join(Shell(f'"{escaped}"', self.variables, self.arrays)._quoted())

    def _computed(self, formula: str, written: str) -> str:
        """Return the value of a formula of integers; anything else is returned as it is written."""
        names = _NAME.sub(lambda name: self.variables.get(name[0], name[0]), self._filled(formula))
        try:
            return str(_compute(ast.parse(names.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError):
            return written

    def _array_words(self) -> list[str]:
        """Take the words of an array up to its closing bracket."""
        inside = self._between("(", ")", is_open=True)
        inner = Shell(inside, self.variables, self.arrays, is_array=True)
        return [word for command in inner.commands() for word in command]

    # ------------------------------------------------------------ places

    def _between(self, opening: str, closing: str, *, is_open: bool = False) -> str:
        """Take the text between two brackets, other pairs included, and continue after it."""
        start = self.place
        if not is_open:
            self.place = self.text.index(opening, start) + 1
        first, depth = self.place, 1
        while self.place < len(self.text):
            char = self.text[self.place]
            depth += (char == opening) - (char == closing)
            self.place += 1
            if depth == 0:
                return self.text[first : self.place - 1]
        raise self._not_closed(opening, start)

    def _until(self, quote: str) -> str:
        """Take what is between two equal quotes."""
        start = self.place
        end = self.text.find(quote, start + 1)
        if end < 0:
            raise self._not_closed(quote, start)
        self.place = end + 1
        return self.text[start + 1 : end]

    def _skip_to(self, char: str) -> None:
        found = self.text.find(char, self.place)
        self.place = len(self.text) if found < 0 else found

    def skip_line(self) -> None:
        """Continue after the line where a quote was opened and not closed."""
        self._skip_to("\n")

    def _skip_here_document(self, opening: re.Match[str]) -> None:
        end = re.compile(rf"^\s*{re.escape(opening[2])}\s*$", re.M)
        found = end.search(self.text, opening.end())
        self.place = found.end() if found else opening.end()

    def _is_redirection(self, word: _Word) -> bool:
        """Return whether & is a part of `2>&1` or `&>`."""
        return word.text.endswith(">") or self.text.startswith("&>", self.place)

    def _not_closed(self, quote: str, start: int) -> ConfigError:
        self.place = start
        line = self.text.count("\n", 0, start) + 1
        # The line is not shown: it may hold a key.
        return ConfigError(
            f"not a command line: {quote} is not closed", f"line {line}", "close the quotes"
        )

    def _assigns(self, word: _Word, before: list[str]) -> bool:
        """Return whether a word is an assignment, NAME=VALUE, after only such words."""
        if self.is_array or not _ASSIGNMENT.match(word.text):
            return False
        return all(_ASSIGNMENT.match(other) for other in before[before[:1] in _EXPORTS :])

    def _without_assignments(self, words: list[str]) -> list[str]:
        if self.is_array:
            return words
        exported = words[:1] in _EXPORTS
        for number, word in enumerate(words[exported:], exported):
            name = _ASSIGNMENT.match(word)
            if name is None:
                return words[number:]
            before = self.variables.get(name[1], "") if name[2] else ""
            self.variables[name[1]] = before + word[name.end() :]
        return []


def _compute(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_compute(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_compute(node.left), _compute(node.right))
    raise ValueError("no formula of whole numbers")
