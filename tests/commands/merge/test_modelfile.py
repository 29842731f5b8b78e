"""Ollama's template: what it writes is what the chat template writes; by Go itself where Go is
installed.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from chat_models import SPECIALS, make_tokenizer

from finetune.commands.merge import modelfile
from finetune.commands.merge.modelfile import (
    CONVERSATIONS,
    ORDERS,
    SPACED,
    TEXTS,
    conversations,
    render_go,
)
from finetune.data.encoding.spans import ChatTemplate
from finetune.data.encoding.templates import TEMPLATES

# Answers are written by their place, as of templates with think blocks.
BY_PLACE = (
    "{%- for message in messages %}{%- if message.role == 'assistant' and loop.last %}{{-"
    " '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message.content + '<|im_end|>\n' }}{%-"
    " elif message.role == 'assistant' and loop.index0 % 4 == 1 %}{{- '<|im_start|>assistant\nA: '"
    " + message.content }}{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content +"
    " '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{-"
    " '<|im_start|>assistant\n' }}{%- endif %}"
)
# Results that follow one another stand in one turn, as Qwen's templates write them.
TOOLS_JOINED = TEMPLATES["chatml"].replace(
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}",
    "{%- if message.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool'"
    " %}{{ '<|im_start|>user' }}{% endif %}{{ '\\n<result>' + message.content + '</result>' }}{%-"
    " if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif"
    " %}{%- else %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] +"
    " '<|im_end|>\\n' }}{% endif -%}",
)


def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(source, SPECIALS["chatml"]))


def write(source: str, ends: tuple[str, ...] = ("<|im_end|>",)) -> modelfile.Modelfile | None:
    template = chat_template(source)
    return modelfile.write_modelfile(
        template, file_name="model.gguf", begins=False, context_tokens=512, ends=ends
    )


def read(text: str) -> dict[str, list[str]]:
    """A Modelfile as Ollama reads it (its parser/parser.go): all between the quotes, and no
    escapes.
    """
    found: dict[str, list[str]] = {}
    for name, value in re.findall(
        r'^(TEMPLATE|PARAMETER \w+) """(.*?)"""$', text, re.DOTALL | re.MULTILINE
    ):
        found.setdefault(name, []).append(value)
    return found


def go_template(template: ChatTemplate) -> str:
    """The one that its Modelfile has."""
    made = modelfile.write_modelfile(
        template, file_name="m", begins=False, context_tokens=None, ends=[]
    )
    assert made is not None
    return read(made.text)["TEMPLATE"][0]


@pytest.mark.parametrize(
    ("source", "keeps_space", "takes_all_turns"),
    [
        *(
            (TEMPLATES[name], True, True)
            for name in ("chatml", "qwen", "phi3", "alpaca", "glm4", "deepseek")
        ),
        *((TEMPLATES[name], False, True) for name in ("llama3", "vicuna")),
        (TOOLS_JOINED, True, False),
    ],
    ids=[
        "chatml",
        "qwen",
        "phi3",
        "alpaca",
        "glm4",
        "deepseek",
        "llama3",
        "vicuna",
        "tools joined",
    ],
)
def test_these_templates_have_one_in_ollama(source: str, keeps_space: bool, takes_all_turns: bool):
    made = write(source)
    assert made is not None and (made.keeps_space, made.takes_all_turns) == (
        keeps_space,
        takes_all_turns,
    )
    assert made.text.splitlines()[1] == "FROM ./model.gguf" and read(made.text)[
        "PARAMETER stop"
    ] == ["<|im_end|>"]
    assert ("without tools" in made.text) != takes_all_turns


@pytest.mark.parametrize("source", [TEMPLATES["mistral"], TEMPLATES["gemma"], BY_PLACE])
def test_templates_of_another_form_have_none(source: str):
    """The system text inside the first question; answers written by their place."""
    assert write(source) is None


def test_values_are_quoted_as_ollama_reads_them():
    """It knows no escapes, and drops signs that are not printable."""
    ends = ('<|end "x"|>', "\nUser:", "back\\slash", '"')
    made = write(TEMPLATES["chatml"], ends)
    assert made is not None and read(made.text)["PARAMETER stop"] == list(ends)
    assert (
        write(TEMPLATES["chatml"], ('"""',)) is None
        and write(TEMPLATES["chatml"], ("a\u200bb",)) is None
    )
    assert write(TEMPLATES["chatml"].replace("'\\n' + message", "'\u3000' + message")) is None


@pytest.mark.parametrize("before", ["{", "{{"])
def test_a_brace_before_a_content_would_be_read_by_go(before: str):
    """Go takes the first two of `{{{ .Content }}`."""
    source = TEMPLATES["chatml"].replace("'\\n' + message", f"'\\n{before}' + message")
    assert source != TEMPLATES["chatml"] and write(source) is None
    with pytest.raises(ValueError):
        render_go("{{{ .Content }}", {"Content": "a"})


def test_a_bos_that_only_the_engine_writes_is_refused():
    template = chat_template(TEMPLATES["chatml"])
    template.tokenizer.bos_token = "<|endoftext|>"
    settings = {"file_name": "model.gguf", "context_tokens": None, "ends": ["<|im_end|>"]}
    assert modelfile.write_modelfile(template, begins=True, **settings) is None
    made = modelfile.write_modelfile(template, begins=False, **settings)
    assert made is not None and "num_ctx" not in made.text


def test_a_template_that_differs_in_one_sign_is_found():
    template = chat_template(TEMPLATES["chatml"])
    source = go_template(template)
    assert modelfile._equal(template, source, "", TEXTS + SPACED)
    for old, new in (
        ("<|im_end|>\n", "<|im_end|>"),
        ("assistant\n", "assistant"),
        ('"system"', '"sys"'),
    ):
        assert old in source and not modelfile._equal(template, source.replace(old, new), "", TEXTS)


def test_the_fifty_conversations_are_of_all_forms():
    found = list(itertools.islice(conversations(TEXTS), CONVERSATIONS))
    assert (
        len({json.dumps([message.content for message in one]) for one in found}) > CONVERSATIONS - 5
    )
    orders = {
        "".join("c" if message.calls else message.role[0] for message in one) for one in found
    }
    assert orders == {*ORDERS, *("s" + order for order in ORDERS)}
    assert {message.content for one in found for message in one if not message.calls} == set(TEXTS)


GO = """
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

func main() {
	var given struct {
		Source string
		Data   []map[string]any
	}
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		panic(err)
	}
	parsed := template.Must(template.New("").Parse(given.Source))
	var written []string
	for _, data := range given.Data {
		var text strings.Builder
		if err := parsed.Execute(&text, data); err != nil {
			panic(err)
		}
		written = append(written, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(written)
}
"""


@pytest.mark.skipif(
    shutil.which("go") is None,
    reason="needs Go (golang) on PATH: its text/template is the reference",
)
@pytest.mark.parametrize("name", ["chatml", "qwen", "phi3", "alpaca", "llama3", "deepseek"])
def test_go_renders_the_same(name: str, tmp_path: Path):
    source = go_template(chat_template(TEMPLATES[name]))
    data = []
    for messages in itertools.islice(conversations(TEXTS + SPACED), CONVERSATIONS):
        data.append(
            {
                "Messages": [
                    {"Role": message.role, "Content": message.content} for message in messages
                ]
            }
        )
    (tmp_path / "main.go").write_text(GO)
    done = subprocess.run(
        ["go", "run", "main.go"], cwd=tmp_path, input=json.dumps({"Source": source, "Data": data}),
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [render_go(source, one) for one in data]
