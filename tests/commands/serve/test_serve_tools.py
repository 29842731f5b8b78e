"""Calls of tools by the official client: shapes from a worker without a model, right calls from one
trained here.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, run_cli
from serve_helpers import real_server, stub_server
from tool_templates import TOOL_FAMILIES

openai = pytest.importorskip("openai", reason="the openai client is not installed")

MODEL = ROOT / "data_samples" / "tiny-qwen3"
RIGHT_CALLS = 0.8


def tool(name: str, *keys: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in keys}
    function = {
        "name": name,
        "parameters": {"type": "object", "properties": properties, "required": list(keys)},
    }
    return {"type": "function", "function": function}


PING = [tool("ping", "host")]


def test_the_official_client_gets_calls_whole_and_streamed():
    with stub_server(max_batch=2) as served:
        api = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=60)
        asked = {
            "model": served.model,
            "tools": PING,
            "messages": [{"role": "user", "content": 'call ping {"host": "a"}'}],
        }
        choice = api.chat.completions.create(**asked).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
            "function",
            "ping",
            {"host": "a"},
        )

        chunks = [chunk.choices[0] for chunk in api.chat.completions.create(**asked, stream=True)]
        (streamed,) = [made for chunk in chunks for made in chunk.delta.tool_calls or ()]
        assert (streamed.index, streamed.id, streamed.function.arguments) == (
            0,
            call.id,
            call.function.arguments,
        )
        assert chunks[-1].finish_reason == "tool_calls"

        # The history goes back as it came, and reaches the worker with its calls.
        history = [
            *asked["messages"],
            choice.message,
            {"role": "tool", "tool_call_id": call.id, "content": "history"},
        ]
        answer = api.chat.completions.create(**{**asked, "messages": history}).choices[0].message
        sent = json.loads(answer.content)
        assert sent["prompt"][1]["tool_calls"][0]["function"]["name"] == "ping"
        assert sent["prompt"][2]["tool_call_id"] == call.id and sent["tools"] == PING
        none = (
            api.chat.completions.create(**{**asked, "messages": [*history]}, tool_choice="none")
            .choices[0]
            .message
        )
        assert json.loads(none.content)["tools"] == []


# ---------------------------------------------------------------- trained here

PLACES = ("Bern", "Oslo", "Rome", "Cairo", "Lima", "Quito", "Paris", "Delhi", "Seoul", "Tokyo")
ASKED = {
    "weather": (
        "How is the weather in {}?",
        "Is it raining in {}?",
        "Weather, {}!",
        "What is the sky like in {}?",
    ),
    "clock": (
        "What time is it in {}?",
        "Tell me the time in {}.",
        "Clock, {}!",
        "Is it late in {}?",
    ),
    "trains": (
        "Which trains go to {}?",
        "I want to go to {}.",
        "Trains, {}!",
        "How do I get to {}?",
    ),
}
PREFIXES = ("", "Please: ", "Hello. ", "Now: ", "So, ")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ASKED]


def conversations() -> list[tuple[str, str, str]]:
    """(tool, place, question), shuffled."""
    made = [
        (name, place, prefix + phrase.format(place))
        for (name, phrases), place, prefix in itertools.product(
            ASKED.items(), PLACES, ("", "Please: ", "Hello. ", "Now: ", "So, ")
        )
        for phrase in phrases
    ]
    random.Random(0).shuffle(made)
    return made


def record(name: str, place: str, question: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps({"place": place})}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c00000001", "type": "function", "function": function}],
    }
    return {"messages": [{"role": "user", "content": question}, call], "tools": TOOLS}


@pytest.mark.slow
def test_a_small_model_learns_to_call_and_is_served(tmp_path: Path):
    """500 conversations are trained; others, of the same places and tools but never seen together
    so, are asked.
    """
    made = conversations()
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps(record(*one)) for one in made[:500]), encoding="utf-8"
    )
    (tmp_path / "template.jinja").write_text(TOOL_FAMILIES["qwen"][0], encoding="utf-8")
    flags = {
        "model": MODEL,
        "template": tmp_path / "template.jinja",
        "data": tmp_path / "train.jsonl",
        "output-dir": tmp_path / "run",
        "cache-dir": tmp_path / "cache",
        "finetuning": "full",
        "learning-rate": "3e-3",
        "num-epochs": 6,
        "global-batch-size": 10,
        "save-steps": 1000,
        "cutoff-len": 1024,
    }
    run_cli([part for name, value in flags.items() for part in (f"--{name}", value)], check=True)
    held_out = made[500:600]
    right = 0
    with real_server(tmp_path / "run", "--num-workers", 1, "--max-batch", 16) as served:
        for name, place, question in held_out:
            _, body = served.chat(question, tools=TOOLS, temperature=0, max_tokens=100)
            calls = [
                call["function"] for call in body["choices"][0]["message"].get("tool_calls", ())
            ]
            right += [(call["name"], json.loads(call["arguments"])) for call in calls] == [
                (name, {"place": place})
            ]
    assert right >= RIGHT_CALLS * len(held_out), f"{right} of {len(held_out)}"
