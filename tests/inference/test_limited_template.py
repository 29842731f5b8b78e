"""A chat template that takes all time or memory is stopped, and the next one is rendered."""

from __future__ import annotations

from collections.abc import Iterator

import jinja2
import pytest

from finetune.errors import DataError
from finetune.inference import limited_template
from finetune.inference.limited_template import TemplateProcess

TURNS = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess({"bos_token": "<s>"}, seconds=60.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ '%2000000000d' % 1 }}", "needs more than 512 MiB"),
        ("{{ 'a' * 20000000 }}", "writes 20000000 characters"),
        ("{{ 9 ** 99999999 }}", "took longer than 0.5 seconds"),
    ],
    ids=["width", "length", "power"],
)
def test_a_template_that_takes_too_much_is_refused_in_words(process, source, what, monkeypatch):
    with monkeypatch.context() as shorter:
        if "longer" in what:
            shorter.setattr(process, "_seconds", 0.5)
        with pytest.raises(DataError, match=f"the model's chat template {what}"):
            process.render(TURNS, chat_template=source)
    plain = "{{ bos_token }}{{ messages[0]['content'] }}"
    assert process.render(TURNS, chat_template=plain) == "<s>hello"


def test_refusals_and_ends_are_told_apart(process, monkeypatch):
    with pytest.raises(jinja2.TemplateError, match="no system, please"):
        process.render(TURNS, chat_template="{{ raise_exception('no system, please') }}")
    with pytest.raises(jinja2.TemplateError, match="unexpected"):
        process.render(TURNS, chat_template="{{ }")
    process._process.kill()
    with pytest.raises(DataError, match="ended its process"):
        process.render(TURNS, chat_template="x")
    assert process.render(TURNS, chat_template="x") == "x"
    monkeypatch.setattr(limited_template, "COMMAND", ("false",))
    with pytest.raises(DataError, match="ended its process"):
        TemplateProcess({}, 60.0).render(TURNS, chat_template="x")
