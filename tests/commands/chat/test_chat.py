"""The terminal chat, on a scripted model and on a pseudo-terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import ROOT, environment
from serve_helpers import wait_for

from finetune.__main__ import main as finetune
from finetune.commands.chat.command import ask_once, load_tools
from finetune.commands.chat.sessions import ChatSession
from finetune.commands.chat.terminal import TerminalChat, visible
from finetune.data.tools import Call
from finetune.errors import DataError, FinetuneError, StateError
from finetune.inference.sampling import Sampling

MODEL = ROOT / "data_samples" / "tiny-qwen3"
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


class Scripted:
    """Stands for a generator: says the text after "say", and remembers what it was asked with."""

    name, context_tokens = "scripted", 100

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    def stream(self, messages: Any, sampling: Sampling, tools: Any = ()) -> Any:
        self.tools = tools
        self.asked.append([dict(message) for message in messages])
        words = messages[-1]["content"]
        if words == "refuse":
            raise DataError("too long", "prompt", "shorten it")
        return _Stream(words)


class _Stream(Iterator[str]):
    """Three characters at a time; "call N" calls a tool so often."""

    def __init__(self, words: str) -> None:
        self.words, self.given, self.answer = words, "", None
        self.text = words.removeprefix("say ")

    def __next__(self) -> str:
        if self.words == "fail":
            raise FinetuneError("the answer failed")
        if self.answer is None and self.given == "interrupt" and self.words != self.given:
            raise KeyboardInterrupt
        if self.answer is not None or self.given == self.text:
            self._end("stop")
            raise StopIteration
        piece = self.text[len(self.given) : len(self.given) + 3]
        self.given += piece
        return piece

    def cancel(self) -> None:
        self._end("cancelled")

    def _end(self, reason: str) -> None:
        count = int(self.words.removeprefix("call ")) if self.words.startswith("call ") else 0
        calls = tuple(Call("look_up", {"port": n}, f"id{n}") for n in range(count))
        counts = {"prompt_tokens": 4, "completion_tokens": 3, "finish_reason": reason}
        self.answer = self.answer or SimpleNamespace(text=self.given, calls=calls, **counts)


def talk(*lines: str, tools: Any = ()) -> tuple[str, ChatSession, Scripted]:
    """What is printed when a user types these lines."""
    out, typed, model = io.StringIO(), iter(lines), Scripted()

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    chat = TerminalChat(model, Sampling(), ChatSession(), tools=tools, read=read, out=out)
    chat.run()
    return out.getvalue(), chat.session, model


def contents(session: ChatSession) -> list[str]:
    return [turn["content"] for turn in session.turns]


def test_the_conversation_goes_on():
    printed, session, model = talk("say one", "say two")
    assert "one\n" in printed and "two\n" in printed
    assert [turn["content"] for turn in model.asked[1]] == ["say one", "one", "say two"]
    printed, session, _model = talk("interrupt me", "say on")
    assert contents(session)[1::2] == ["interrupt", "on"] and "[stopped]" in printed
    lines = ("say a\\", "b\\", "c", '"""', "say x", "", "  y\\", '"""', "//slash", "   ")
    assert contents(talk(*lines)[1])[::2] == ["say a\nb\nc", "say x\n\n  y\\", "/slash"]


def test_results_of_called_tools_are_asked_for(tmp_path: Path):
    file = tmp_path / "talk.json"
    lines = ("call 2", '{"up": true}', "say done", f"/save {file}", "say later")
    printed, session, model = talk(*lines, tools=TOOLS)
    assert model.tools == TOOLS
    assert 'calls look_up {"port": 0}' in printed and 'calls look_up {"port": 1}' in printed
    roles = ["user", "assistant", "tool", "tool", "assistant"]
    assert [turn["role"] for turn in session.turns[:5]] == roles
    calls, results = session.turns[1]["tool_calls"], session.turns[2:4]
    assert [call["id"] for call in calls] == [one["tool_call_id"] for one in results]
    assert [result["content"] for result in results] == ['{"up": true}', "say done"]
    assert json.loads(calls[1]["function"]["arguments"]) == {"port": 1}
    assert ChatSession.load(file).turns == session.turns[:5]
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"messages": record["messages"][:4]}))
    with pytest.raises(DataError, match="not questions and answers in order"):
        ChatSession.load(file)


def test_a_question_without_an_answer_is_forgotten():
    # the end of input instead of a result; or the answer after the result is refused
    for lines in (("say one", "call 1"), ("call 1", "refuse", "say one")):
        assert contents(talk(*lines)[1]) == ["say one", "one"]
    printed, session, _model = talk("refuse", "fail", "say fine")
    assert "too long" in printed and "shorten it" in printed and "the answer failed" in printed
    assert contents(session) == ["say fine", "fine"]


def test_one_question_prints_its_calls_and_shows_control_characters(capsys, monkeypatch):
    asked = {"tools": TOOLS, "raw": False}
    assert ask_once(Scripted(), ChatSession(), "call 1", Sampling(), **asked) == 0  # type: ignore[arg-type]
    text, calls = capsys.readouterr().out.splitlines()
    (call,) = json.loads(calls)
    assert text == "call 1"
    assert call["function"] == {"name": "look_up", "arguments": '{"port": 0}'}
    for is_terminal, shown in ((False, "\x1b[2J"), (True, "␛[2J")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda found=is_terminal: found)
        assert ask_once(Scripted(), ChatSession(), "say \x1b[2J", Sampling(), raw=False) == 0  # type: ignore[arg-type]
        assert capsys.readouterr().out == f"{shown}\n"
    assert ask_once(Scripted(), ChatSession(), "interrupt me", Sampling(), raw=False) == 130  # type: ignore[arg-type]


def test_a_file_of_tools(tmp_path: Path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([TOOLS[0]["function"]]))
    assert load_tools(file) == TOOLS and load_tools(None) == []
    for wrong in ("{", '{"a": 1}', "[1]"):
        file.write_text(wrong)
        with pytest.raises(DataError, match="not a list of tools"):
            load_tools(file)
    with pytest.raises(DataError, match="cannot be read"):
        load_tools(tmp_path / "nowhere.json")


def test_commands(tmp_path: Path):
    file = tmp_path / "talk.json"
    lines = ("/stats", "/system", "/system be brief", "say 你好", f"/save {file}", "/reset")
    printed, _session, model = talk(*lines, "say later", "/stats", "/system")
    assert "no answer yet" in printed and "[no system prompt]" in printed
    system = {"role": "system", "content": "be brief"}
    assert model.asked[1] == [system, {"role": "user", "content": "say later"}]
    for words in ("3 generated", "[be brief]", "context: 7 of 100 tokens"):
        assert words in printed, words
    saved = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert saved[2] == {"role": "assistant", "content": "你好"}
    lines = (f"/load {file}", "say more", f"/save {file}", "/help", "/nope", "/save", "/quit", "no")
    printed, _session, model = talk(*lines)
    (asked,) = model.asked
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "user"]
    for words in ("there is no command /nope", "no file is named", "/reset"):
        assert words in printed, words
    assert len(ChatSession.load(file).turns) == 4


def test_nothing_a_terminal_acts_on_gets_through():
    attacks = (
        "\x1b[2J\x1b]52;c;aGk=\x07 \x9b31m \x08\x08 a\rb \x7f \u202eevil \u2066x \x00 \x85 \u2028"
    )
    printed, session, _model = talk("say " + attacks + " tab\there\nnew 中文 👋")
    assert visible(printed) == printed, "a control character reached the terminal"
    assert "tab\there\nnew 中文 👋" in printed and "␛[2J" in printed
    # the conversation keeps what the model wrote
    assert contents(session)[1].startswith("\x1b")
    for code in range(0x110000):
        if unicodedata.category(chr(code)) == "Cc":
            assert (visible(chr(code)) == chr(code)) == (chr(code) in "\n\t"), hex(code)


def test_files_that_are_not_conversations_are_kept_and_refused(tmp_path: Path):
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    for path, said in ((other, "another file is there"), (tmp_path / "no" / "x", "be written")):
        with pytest.raises(StateError, match=said):
            ChatSession().save(path, model="m")
    assert other.read_text() == "years of work"
    user, answer = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "content": "x", "tool_call_id": ["x"]}
    good = {"form": "finetune-conversation", "version": 1, "messages": []}
    files = ["[]", "not json", "[" * 100_000, json.dumps({**good, "version": 2})]
    called = [user, {**answer, "tool_calls": [call]}, result]
    for messages in ([user], [answer, user], [{"role": "root", "content": "x"}], called):
        files.append(json.dumps({**good, "messages": messages}))
    for wrong in files:
        other.write_text(wrong)
        with pytest.raises(DataError):
            ChatSession.load(other)
    with pytest.raises(DataError):
        ChatSession.load(tmp_path)


def test_one_question_on_the_command_line(capsys, monkeypatch):
    model = ["chat", "--model", str(MODEL), "--device-type", "cpu"]
    assert finetune([*model, "--prompt", "What is BGP?", "--max_new_tokens=5"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and err == ""
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    for words, message in (
        ("--prompt -", "the prompt is empty"),
        ("--prompt x --raw --system x", "--raw continues one text"),
    ):
        assert finetune([*model, *words.split()]) == 2
        assert message in capsys.readouterr().err


def test_a_conversation_in_a_terminal():
    """An answer streams, Ctrl-C stops it and not the chat, Ctrl-D ends it."""
    question = "写一页网络手册。"  # the bundled model goes on for 175 tokens
    pid, terminal = pty.fork()
    if pid == 0:  # the child, which becomes the command
        os.chdir(ROOT)
        words = [sys.executable, "-m", "finetune", "chat", "--model", str(MODEL)]
        words += ["--device-type", "cpu", "--temperature", "0"]
        os.execve(sys.executable, words, {**environment(), "TERM": "dumb", "NO_COLOR": "1"})
    seen = b""

    def screen() -> str:
        nonlocal seen
        while select.select([terminal], [], [], 0)[0]:
            try:
                seen += os.read(terminal, 65536)  # which may end within a character
            except OSError:  # the command is gone
                break
        return seen.decode(errors="replace")

    def ended() -> bool:
        screen()
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    try:
        wait_for(lambda: "/quit leaves" in screen() and screen().rstrip().endswith(">"), 120)
        os.write(terminal, f"{question}\n".encode())
        wait_for(lambda: len(screen().partition(question)[2]) > 20)
        os.write(terminal, b"\x03")
        wait_for(lambda: "[stopped]" in screen() or "[cut:" in screen())
        os.write(terminal, b"/stats\n")
        wait_for(lambda: "context: " in screen())
        os.write(terminal, b"\x04")
        wait_for(ended)
    finally:
        os.kill(pid, signal.SIGKILL)  # nothing, where it has ended
        status = os.waitpid(pid, 0)[1]
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0 and b"Traceback" not in seen, seen
