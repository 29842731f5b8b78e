"""The terminal chat: its commands on a model that says what it is told, and the real command on a
pseudo-terminal.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import select
import signal
import string
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import ROOT, environment, run_cli, said
from serve_helpers import wait_for

from finetune.commands.chat import terminal
from finetune.commands.chat.command import ChatOptions, ask_once, load_tools
from finetune.commands.chat.sessions import ChatSession
from finetune.commands.chat.terminal import TerminalChat, visible
from finetune.config.options import read_options
from finetune.data.tools import Call
from finetune.errors import DataError, FinetuneError, StateError
from finetune.inference.sampling import Sampling
from finetune.runtime.language import _, speaking

MODEL = ROOT / "data_samples" / "tiny-qwen3"


class Scripted:
    """Stands for a generator: says the text after "say", and remembers what it was asked with."""

    name, context_tokens = "scripted", 100

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []

    def stream(self, messages: list[dict[str, str]], sampling: Sampling, tools: Any = ()) -> Any:
        self.tools = tools
        self.asked.append([dict(message) for message in messages])
        words = messages[-1]["content"]
        if words == "refuse":
            raise DataError("too long", "prompt", "shorten it")
        return _Stream(words.removeprefix("say "), words)


class _Stream(Iterator[str]):
    def __init__(self, text: str, words: str) -> None:
        self.text, self.words, self.given, self.answer = text, words, "", None

    def __next__(self) -> str:
        if self.words == "fail":
            raise FinetuneError("the answer failed")
        if self.words == "interrupt me" and len(self.given) == 9 and self.answer is None:
            self.given += "!"
            raise KeyboardInterrupt
        if self.answer is not None or len(self.given) >= len(self.text):
            self._end("stop")
            raise StopIteration
        piece = self.text[len(self.given) : len(self.given) + 3]
        self.given += piece
        return piece

    def cancel(self) -> None:
        self._end("cancelled")

    def _end(self, reason: str) -> None:
        text = self.given.rstrip("!") if reason == "cancelled" else self.text
        self.answer = self.answer or SimpleNamespace(
            text=text,
            finish_reason=reason,
            prompt_tokens=4,
            completion_tokens=3,
            token_ids=(),
            calls=self._calls(),
        )

    def _calls(self) -> tuple[Call, ...]:
        """ "call N" calls so often."""
        count = int(self.words.removeprefix("call ")) if self.words.startswith("call ") else 0
        return tuple(Call("look_up", {"port": n}, f"id{n}") for n in range(count))


def talk(*lines: str, tools: Any = ()) -> tuple[str, TerminalChat, Scripted]:
    """What is printed when a user types these lines."""
    out, typed, model = io.StringIO(), iter(lines), Scripted()

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    chat = TerminalChat(model, Sampling(), ChatSession(), tools=tools, read=read, out=out)
    chat.run()
    return out.getvalue(), chat, model


def test_the_conversation_goes_on():
    printed, chat, model = talk("say one", "say two")
    assert "one\n" in printed and "two\n" in printed
    assert [message["role"] for message in model.asked[1]] == ["user", "assistant", "user"]
    assert model.asked[1][1]["content"] == "one" and len(chat.session.turns) == 4


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def test_results_of_called_tools_are_asked_for(tmp_path: Path):
    file = tmp_path / "talk.json"
    printed, chat, model = talk(
        "call 2", '{"up": true}', "say done", f"/save {file}", "say later", tools=TOOLS
    )
    assert model.tools == TOOLS
    assert 'calls look_up {"port": 0}' in printed and 'calls look_up {"port": 1}' in printed
    roles = ["user", "assistant", "tool", "tool", "assistant"]
    assert [turn["role"] for turn in chat.session.turns[:5]] == roles
    calls, results = chat.session.turns[1]["tool_calls"], chat.session.turns[2:4]
    assert (
        [call["id"] for call in calls]
        == [result["tool_call_id"] for result in results]
        == ["id0", "id1"]
    )
    assert [result["content"] for result in results] == ['{"up": true}', "say done"]
    assert json.loads(calls[1]["function"]["arguments"]) == {"port": 1}
    loaded = ChatSession.load(file)
    assert loaded.turns == chat.session.turns[:5]
    record = json.loads(file.read_text())
    for wrong in (record["messages"][:4], record["messages"][:1] + record["messages"][2:]):
        file.write_text(json.dumps(record | {"messages": wrong}))
        with pytest.raises(DataError, match="not questions and answers in order"):
            ChatSession.load(file)


def test_a_question_whose_calls_get_no_result_is_forgotten():
    _printed, chat, model = talk("say one", "call 1")  # and the end of input instead of a result
    assert [turn["content"] for turn in chat.session.turns] == ["say one", "one"]
    # the answer after the result is refused
    _printed, chat, model = talk("call 1", "refuse", "say one")
    assert [turn["content"] for turn in chat.session.turns] == ["say one", "one"]


def test_one_question_prints_its_calls(capsys: pytest.CaptureFixture[str]):
    assert ask_once(Scripted(), ChatSession(), "call 1", Sampling(), tools=TOOLS, raw=False) == 0  # type: ignore[arg-type]
    said_text, calls = capsys.readouterr().out.splitlines()
    assert said_text == "call 1"
    (call,) = json.loads(calls)
    assert call["function"] == {"name": "look_up", "arguments": '{"port": 0}'}


def test_a_file_of_tools(tmp_path: Path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([TOOLS[0]["function"]]))
    assert load_tools(file) == TOOLS and load_tools(None) == []
    for wrong in ("{", '{"a": 1}', '[{"parameters": {}}]', "[1]"):
        file.write_text(wrong)
        with pytest.raises(DataError, match="not a list of tools"):
            load_tools(file)
    with pytest.raises(DataError, match="cannot be read"):
        load_tools(tmp_path / "nowhere.json")


def test_several_lines():
    _printed, chat, _model = talk(
        "say a\\", "b\\", "c", '"""', "say x", "", "  y\\", '"""', "//slash", "   "
    )
    assert [turn["content"] for turn in chat.session.turns[::2]] == [
        "say a\nb\nc",
        "say x\n\n  y\\",
        "/slash",
    ]


def test_commands(tmp_path: Path):
    file = tmp_path / "talk.json"
    printed, chat, model = talk(
        "/system be brief", "say 你好", f"/save {file}", "/reset", "say later", "/stats"
    )
    assert model.asked[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "say later"},
    ]
    assert "3 generated" in printed and "context: 7 of 100 tokens" in printed
    assert json.loads(file.read_text(encoding="utf-8"))["messages"][2] == {
        "role": "assistant",
        "content": "你好",
    }
    printed, chat, model = talk(
        f"/load {file}", "say more", f"/save {file}", "/help", "/nope", "/save", "/quit", "never"
    )
    assert len(model.asked) == 1 and [m["role"] for m in model.asked[0]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert (
        "there is no command /nope" in printed
        and "no file is named" in printed
        and "/reset" in printed
    )
    assert len(ChatSession.load(file).turns) == 4


def test_in_chinese(tmp_path: Path):
    file = tmp_path / "talk.json"
    asked = (
        "/help",
        "/stats",
        "/system",
        "say 一",
        "/stats",
        f"/save {file}",
        f"/load {file}",
        "/reset",
    )
    with speaking("zh"):
        printed, _chat, _model = talk(*asked, "interrupt me", "/system 简短")
    for words in (
        "清空对话",
        "还没有回答",
        "没有系统提示",
        "生成 3 个",
        "保存到",
        "读入 1 轮",
        "对话已清空",
        "已停止",
        "系统提示已设置",
        "退出",
    ):
        assert words in printed, words
    assert "conversation" not in printed


def test_every_text_of_the_chat_is_translated():
    """The texts as the code marks them, with the same values in both languages."""
    tree = ast.parse(Path(terminal.__file__).read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    marked = [call.args[0] for call in calls if call.func.id in ("_", "N_")]
    texts = [argument.value for argument in marked if isinstance(argument, ast.Constant)]
    assert len(texts) > 10
    for text in texts:
        with speaking("zh"):
            chinese = _(text)
        fields = [
            {field[1] for field in string.Formatter().parse(words) if field[1]}
            for words in (text, chinese)
        ]
        assert fields[0] == fields[1] and chinese != text, text


def test_a_refused_or_failed_question_is_forgotten():
    printed, chat, _ = talk("refuse", "fail", "say fine")
    assert "too long" in printed and "shorten it" in printed and "the answer failed" in printed
    assert [turn["content"] for turn in chat.session.turns] == ["say fine", "fine"]


def test_interrupt_stops_the_answer_and_keeps_what_is_there():
    printed, chat, _ = talk("interrupt me", "say on")
    assert chat.session.turns[1]["content"] == "interrupt" and "[stopped]" in printed
    assert chat.session.turns[3]["content"] == "on"


def test_nothing_a_terminal_acts_on_gets_through():
    attacks = (
        "\x1b[2J\x1b]52;c;aGk=\x07 \x9b31m \x08\x08 a\rb \x7f \u202eevil \u2066x \x00 \x85 \u2028"
    )
    printed, chat, _ = talk("say " + attacks + " tab\there\nnew 中文 👋")
    shown = visible(printed)
    assert shown == printed, "a control character reached the terminal"
    assert "tab\there\nnew 中文 👋" in printed and "␛[2J" in printed
    assert chat.session.turns[1]["content"].startswith("\x1b"), (
        "the conversation keeps what the model wrote"
    )
    for code in range(0x110000):
        if unicodedata.category(chr(code)) == "Cc":
            assert (visible(chr(code)) == chr(code)) == (chr(code) in "\n\t"), hex(code)


_CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]


def test_files_that_are_not_conversations_are_kept_and_refused(tmp_path: Path):
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    with pytest.raises(StateError, match="another file is there"):
        ChatSession().save(other, model="m")
    assert other.read_text() == "years of work"
    with pytest.raises(StateError):
        ChatSession().save(tmp_path / "no" / "folder.json", model="m")
    good = {"form": "finetune-conversation", "version": 1, "messages": []}
    for wrong in (
        "[]",
        "{}",
        "not json",
        json.dumps({**good, "version": 2}),
        json.dumps({**good, "messages": [{"role": "user", "content": "alone"}]}),
        json.dumps(
            {
                **good,
                "messages": [
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": "x"},
                ],
            }
        ),
        json.dumps({**good, "messages": [{"role": "root", "content": "x"}]}),
        json.dumps({**good, "messages": [{"role": "user", "content": 1}]}),
        json.dumps(
            {**good, "messages": [*CALLED, {"role": "tool", "content": "x", "tool_call_id": ["x"]}]}
        ),
        "[" * 100_000,
    ):
        other.write_text(wrong)
        with pytest.raises(DataError):
            ChatSession.load(other)
    with pytest.raises(DataError):
        ChatSession.load(tmp_path)


def test_flags_with_underscores():
    words = ["--model", "m", "--max_new_tokens=5", "--top_p", "0.5", "--prompt", "a_b"]
    options = read_options(ChatOptions, words)
    assert (options.max_new_tokens, options.top_p, options.prompt) == (5, 0.5, "a_b")


# ---------------------------------------------------------------- the command


def test_one_question_on_the_command_line():
    result = run_cli(
        [
            "chat",
            "--model",
            MODEL,
            "--device-type",
            "cpu",
            "--prompt",
            "-",
            "--max-new-tokens",
            "5",
        ],
        module="finetune",
    )
    assert result.returncode == 2 and "the prompt is empty" in result.stderr
    words = [
        "chat",
        "--model",
        MODEL,
        "--device-type",
        "cpu",
        "--prompt",
        "What is BGP?",
        "--max_new_tokens=5",
    ]
    result = run_cli(words, module="finetune")
    assert result.returncode == 0 and result.stdout.strip() and result.stderr == "", said(result)
    for wrong, message in (
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--raw", "--system", "x"], "--raw continues one text"),
    ):
        with pytest.raises(FinetuneError, match=message):
            read_options(ChatOptions, ["--model", "m", "--prompt", "x", *wrong])
    result = run_cli(["chat", "--prompt", "x", "--model", "no/such/folder/here"], module="finetune")
    assert (
        result.returncode == 2
        and "no such model folder" in result.stderr
        and "Traceback" not in said(result)
    )


def test_a_conversation_in_a_terminal():
    """The real command on a pseudo-terminal: an answer streams, Ctrl-C stops it and not the chat,
    Ctrl-D ends it.
    """
    question = "写一页网络手册。"  # the bundled model goes on for 175 tokens
    pid, terminal = pty.fork()
    if pid == 0:  # the child, which becomes the command
        os.chdir(ROOT)
        words = [
            sys.executable,
            "-m",
            "finetune",
            "chat",
            "--model",
            str(MODEL),
            "--device-type",
            "cpu",
        ]
        words += ["--temperature", "0"]
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

    try:
        wait_for(lambda: "/quit leaves" in screen() and screen().rstrip().endswith(">"), 120)
        os.write(terminal, f"{question}\n".encode())
        wait_for(lambda: len(screen().partition(question)[2]) > 20)
        os.write(terminal, b"\x03")
        wait_for(lambda: "[stopped]" in screen() or "[cut:" in screen())
        os.write(terminal, b"/stats\n")
        wait_for(lambda: "context: " in screen())
        os.write(terminal, b"\x04")
        end = time.monotonic() + 60
        while (gone := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            screen()
            assert time.monotonic() < end
            time.sleep(0.05)
        assert os.waitstatus_to_exitcode(gone[1]) == 0 and "Traceback" not in screen(), screen()
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(terminal)
