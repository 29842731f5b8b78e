"""Ollama's template of a known family, compared by Go itself where Go is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from chat_models import SPECIALS, make_tokenizer

from finetune.commands.merge.modelfile import GO_TEMPLATES, conversations, write_modelfile
from finetune.data.encoding.spans import ChatTemplate
from finetune.data.encoding.templates import TEMPLATES

CHATML = TEMPLATES["chatml"]
# Some answers are written otherwise, by their place.
MARK = "('A: ' if message['role'] == 'assistant' and loop.index0 % 4 == 1 else '') + "
BY_PLACE = CHATML.replace("message['content']", f"{MARK}message['content']")


def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(source, SPECIALS["chatml"]))


def write(source: str, *ends: str) -> str | None:
    ends = ends or ("<|im_end|>",)
    settings = {"file_name": "model.gguf", "begins": False, "context_tokens": 512, "ends": ends}
    return write_modelfile(chat_template(source), **settings)


def read(text: str | None) -> dict[str, list[str]]:
    """A Modelfile as Ollama's parser/parser.go reads it: there are no escapes."""
    assert text is not None
    found: dict[str, list[str]] = {}
    form = r'^(TEMPLATE|PARAMETER \w+) """(.*?)"""$'
    for name, value in re.findall(form, text, re.DOTALL | re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def test_templates_of_known_families_have_one_in_ollama():
    for name in GO_TEMPLATES:
        text = write(TEMPLATES[name])
        assert read(text)["PARAMETER stop"] == ["<|im_end|>"], name
        assert text.splitlines()[1] == "FROM ./model.gguf"
        assert "on 56 conversations" in text and "those may differ" in text
    user = '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
    assert user in read(write(CHATML))["TEMPLATE"][0]


def test_templates_of_no_known_family_have_none():
    space = CHATML.replace("'\\n' + message", "'\u3000' + message")
    no_line_end = CHATML.replace("<|im_end|>\\n", "<|im_end|>")
    for source in (BY_PLACE, space, no_line_end):
        assert source != CHATML and write(source) is None


def test_values_are_quoted_as_ollama_reads_them():
    """It knows no escapes, and drops signs that are not printable."""
    ends = ('<|end "x"|>', "\nUser:", "back\\slash", '"')
    assert read(write(CHATML, *ends))["PARAMETER stop"] == list(ends)
    assert write(CHATML, '"""') is None and write(CHATML, "a\u200bb") is None


def test_a_bos_that_only_the_engine_writes_is_refused():
    template = chat_template(CHATML)
    template.tokenizer.bos_token = "<|endoftext|>"
    settings = {"file_name": "model.gguf", "context_tokens": None, "ends": ["<|im_end|>"]}
    assert write_modelfile(template, begins=True, **settings) is None
    made = write_modelfile(template, begins=False, **settings)
    assert made is not None and "num_ctx" not in made


GO = """
package main

import ("encoding/json"; "os"; "strings"; "text/template")

func main() {
	var sources []string
	var data []map[string]any
	input := json.NewDecoder(os.Stdin)
	input.Decode(&sources)
	input.Decode(&data)
	written := [][]string{}
	for _, source := range sources {
		parsed := template.Must(template.New("").Parse(source))
		texts := []string{}
		for _, each := range data {
			var text strings.Builder
			if err := parsed.Execute(&text, each); err != nil { panic(err) }
			texts = append(texts, text.String())
		}
		written = append(written, texts)
	}
	json.NewEncoder(os.Stdout).Encode(written)
}
"""


@pytest.mark.skipif(shutil.which("go") is None, reason="Go's text/template is the reference")
def test_go_renders_the_same(tmp_path: Path):
    sources = [read(write(TEMPLATES[name]))["TEMPLATE"][0] for name in GO_TEMPLATES]
    found = conversations()
    data = [[{"Role": one.role, "Content": one.content} for one in each] for each in found]
    (tmp_path / "main.go").write_text(GO)
    given = f"{json.dumps(sources)}\n{json.dumps([{'Messages': each} for each in data])}"
    words = ["go", "run", "main.go"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, input=given)
    assert done.returncode == 0, done.stderr
    for name, texts in zip(GO_TEMPLATES, json.loads(done.stdout), strict=True):
        template = chat_template(TEMPLATES[name])
        assert texts == [template.render(each, generation_prompt=True) for each in found], name
