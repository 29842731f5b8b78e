"""Ollama's template of a known family: only for chat templates that write the same; compared by Go
itself where Go is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from chat_models import SPECIALS, make_tokenizer

from finetune.commands.merge import modelfile
from finetune.commands.merge.modelfile import (
    GO_TEMPLATES,
    TEXTS,
    conversations,
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


def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(source, SPECIALS["chatml"]))


def write(source: str, ends: tuple[str, ...] = ("<|im_end|>",)) -> str | None:
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


@pytest.mark.parametrize("name", GO_TEMPLATES)
def test_these_templates_have_one_in_ollama(name: str):
    text = write(TEMPLATES[name])
    assert text is not None and text.splitlines()[1] == "FROM ./model.gguf"
    assert read(text)["PARAMETER stop"] == ["<|im_end|>"]
    assert "on 56 conversations" in text and "those may differ" in text


def test_chatml_is_written_so():
    """By hand: the form that Ollama reads."""
    text = write(TEMPLATES["chatml"])
    assert text is not None and read(text)["TEMPLATE"] == [
        '{{ range $i, $_ := .Messages }}{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content'
        ' }}<|im_end|>\n{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content'
        ' }}<|im_end|>\n{{ else if eq .Role "system" }}<|im_start|>system\n{{ .Content'
        ' }}<|im_end|>\n{{ else if eq .Role "tool" }}<|im_start|>tool\n{{ .Content }}<|im_end|>\n{{'
        " end }}{{ end }}<|im_start|>assistant\n"
    ]


@pytest.mark.parametrize(
    "source",
    [
        BY_PLACE,
        TEMPLATES["chatml"].replace("'\\n' + message", "'\u3000' + message"),
        TEMPLATES["chatml"].replace("<|im_end|>\\n", "<|im_end|>"),
    ],
    ids=["answers by their place", "another space", "no line end"],
)
def test_templates_of_no_known_family_have_none(source: str):
    assert source != TEMPLATES["chatml"] and write(source) is None


def test_values_are_quoted_as_ollama_reads_them():
    """It knows no escapes, and drops signs that are not printable."""
    ends = ('<|end "x"|>', "\nUser:", "back\\slash", '"')
    made = write(TEMPLATES["chatml"], ends)
    assert made is not None and read(made)["PARAMETER stop"] == list(ends)
    assert (
        write(TEMPLATES["chatml"], ('"""',)) is None
        and write(TEMPLATES["chatml"], ("a\u200bb",)) is None
    )


def test_a_bos_that_only_the_engine_writes_is_refused():
    template = chat_template(TEMPLATES["chatml"])
    template.tokenizer.bos_token = "<|endoftext|>"
    settings = {"file_name": "model.gguf", "context_tokens": None, "ends": ["<|im_end|>"]}
    assert modelfile.write_modelfile(template, begins=True, **settings) is None
    made = modelfile.write_modelfile(template, begins=False, **settings)
    assert made is not None and "num_ctx" not in made


def test_the_conversations_are_of_all_forms():
    found = conversations()
    orders = {"".join(message.role[0] for message in messages) for messages in found}
    plain = {"u", "uau", "uauau", "uauauau"}
    assert orders == plain | {"s" + order for order in plain}
    assert {message.content for messages in found for message in messages} == set(TEXTS)


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
@pytest.mark.parametrize("name", GO_TEMPLATES)
def test_go_renders_the_same(name: str, tmp_path: Path):
    template, text = chat_template(TEMPLATES[name]), write(TEMPLATES[name])
    assert text is not None
    found = conversations()
    data = [
        {"Messages": [{"Role": message.role, "Content": message.content} for message in messages]}
        for messages in found
    ]
    (tmp_path / "main.go").write_text(GO)
    done = subprocess.run(
        ["go", "run", "main.go"], cwd=tmp_path, capture_output=True, text=True, check=False,
        input=json.dumps({"Source": read(text)["TEMPLATE"][0], "Data": data}), timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = [template.render(messages, generation_prompt=True) for messages in found]
    assert json.loads(done.stdout) == expected
