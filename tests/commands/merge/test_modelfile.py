"""Ollama's template: what it writes is what the chat template writes; by Go itself where Go is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from chat_models import SPECIALS, make_tokenizer

from finetune.commands.merge import modelfile
from finetune.commands.merge.modelfile import CONVERSATIONS, SPACED, TEXTS, conversations, go_template, render_go
from finetune.data.spans import ChatTemplate
from finetune.data.templates import TEMPLATES

# Answers are written by their place, as of templates with think blocks.
BY_PLACE = (
    "{%- for message in messages %}{%- if message.role == 'assistant' and loop.last %}"
    "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' and loop.index0 % 4 == 1 %}"
    "{{- '<|im_start|>assistant\nA: ' + message.content }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def chat_template(source: str) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(source, SPECIALS["chatml"]))


def write(source: str, begins: bool = False) -> modelfile.Modelfile | None:
    template = chat_template(source)
    return modelfile.write_modelfile(
        template, file_name="model.gguf", begins=begins, context_tokens=512, ends=["<|im_end|>"]
    )


@pytest.mark.parametrize(
    ("name", "keeps_space"),
    [("chatml", True), ("qwen", True), ("phi3", True), ("alpaca", True), ("glm4", True), ("llama3", False)],
)
def test_these_templates_have_one_in_ollama(name: str, keeps_space: bool):
    made = write(TEMPLATES[name])
    assert made is not None and made.keeps_space == keeps_space
    assert made.text.splitlines()[1] == "FROM ./model.gguf" and 'PARAMETER stop "<|im_end|>"' in made.text


@pytest.mark.parametrize("source", [TEMPLATES["mistral"], TEMPLATES["gemma"], BY_PLACE])
def test_templates_of_another_form_have_none(source: str):
    """The system text inside the first question; answers written by their place."""
    assert write(source) is None


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
    source = go_template(template, "")
    assert modelfile._equal(template, source, "", TEXTS + SPACED)
    for old, new in (("<|im_end|>\n", "<|im_end|>"), ("assistant\n", "assistant"), ('"system"', '"sys"')):
        assert old in source and not modelfile._equal(template, source.replace(old, new), "", TEXTS)


def test_the_fifty_conversations_are_of_all_forms():
    found = list(conversations(TEXTS))
    assert len(found) == CONVERSATIONS == 50
    assert len({json.dumps([message.content for message in one]) for one in found}) > CONVERSATIONS - 5
    assert {len(one) for one in found} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert {message.content for one in found for message in one} == set(TEXTS)


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


@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go (golang) on PATH: its text/template is the reference")
@pytest.mark.parametrize("name", ["chatml", "qwen", "phi3", "alpaca", "llama3"])
def test_go_renders_the_same(name: str, tmp_path: Path):
    source = go_template(chat_template(TEMPLATES[name]), "")
    data = []
    for messages in conversations(TEXTS + SPACED):
        system = "\n\n".join(message.content for message in messages if message.role == "system")
        turns = [{"Role": message.role, "Content": message.content} for message in messages]
        data.append({"System": system, "Messages": turns})
    (tmp_path / "main.go").write_text(GO)
    done = subprocess.run(
        ["go", "run", "main.go"], cwd=tmp_path, input=json.dumps({"Source": source, "Data": data}),
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [render_go(source, one) for one in data]
