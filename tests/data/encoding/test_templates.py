"""Named templates, and tokenizers as a run loads them."""

from __future__ import annotations

import json

import pytest
from chat_models import SPECIALS, make_tokenizer, marked, render, talk
from transformers import AutoTokenizer

from finetune.data.encoding.templates import TEMPLATES, load_tokenizer, template_source
from finetune.data.formats import Conversation, Message
from finetune.data.report import RecordProblem
from finetune.errors import DataError

EXPECTED = {
    "chatml": (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n«a1<|im_end|>»\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n«a2<|im_end|>»\n"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nq1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«a1<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nq2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«a2<|eot_id|>»"
    ),
    "mistral": "<s>[INST] s\n\nq1[/INST]« a1</s>»[INST] q2[/INST]« a2</s>»",
    "gemma": (
        "<s><start_of_turn>user\ns\n\nq1<end_of_turn>\n<start_of_turn>model\n«a1<end_of_turn>»\n"
        "<start_of_turn>user\nq2<end_of_turn>\n<start_of_turn>model\n«a2<end_of_turn>»\n"
    ),
    "deepseek": "<s>s<｜User｜>q1<｜Assistant｜>«a1</s>»<｜User｜>q2<｜Assistant｜>«a2</s>»",
    "phi3": (
        "<|system|>\ns<|end|>\n<|user|>\nq1<|end|>\n<|assistant|>\n«a1<|end|>»\n"
        "<|user|>\nq2<|end|>\n<|assistant|>\n«a2<|end|>»\n"
    ),
    "glm4": (
        "[gMASK]<sop><|system|>\ns<|user|>\nq1<|assistant|>\n«a1<|user|>»\nq2<|assistant|>\n«a2<|user|>»"
    ),
    "alpaca": (
        "<s>s\n\n### Instruction:\nq1\n\n### Response:\n«a1</s>»\n\n"
        "### Instruction:\nq2\n\n### Response:\n«a2</s>»\n\n"
    ),
    "vicuna": "<s>s USER: q1 ASSISTANT:« a1</s>»USER: q2 ASSISTANT:« a2</s>»",
}
EXPECTED["qwen"] = EXPECTED["chatml"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_named_template_trains_the_answers_and_their_ends(name: str):
    tokenizer = make_tokenizer(
        TEMPLATES[name], {**SPECIALS, "qwen": SPECIALS["chatml"]}.get(name, ())
    )
    (sample,) = render(talk("q1", "a1", "q2", "a2", system="s"), tokenizer, 4096)
    assert marked(tokenizer, sample.input_ids, sample.supervised) == EXPECTED[name]
    assert sample.ends and sample.follows_prompt


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"chatml"}))  # it writes any role's name
def test_a_tools_result_is_never_written_as_somebody_elses_turn(name: str):
    tokenizer = make_tokenizer(TEMPLATES[name], SPECIALS["chatml"])
    turns = (("user", "q"), ("assistant", "a1"), ("tool", "r"), ("assistant", "a2"))
    conversation = Conversation(tuple(Message(*turn) for turn in turns))
    with pytest.raises(RecordProblem, match="refused by the chat template: .*no turns of tools"):
        render(conversation, tokenizer, 4096)


def test_unknown_names_and_broken_files(tmp_path):
    with pytest.raises(DataError, match="neither a template's name nor a.*did you mean 'chatml'"):
        template_source("chatlm")
    path = tmp_path / "own.jinja"
    path.write_text("{{ bos_token }}\n{% for message in messages %}", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read") as caught:
        template_source(str(path))
    assert caught.value.where.startswith(f"{path}:")
    tagged = "{% for m in messages %}{%- generation -%}{{ m }}{% endgeneration %}{% endfor %}"
    path.write_text(tagged, encoding="utf-8")
    assert template_source(str(path)) == tagged


def test_a_loaded_tokenizer_carries_the_template_and_saves_it(tmp_path):
    base = tmp_path / "base"
    plain = make_tokenizer(None, SPECIALS["chatml"])
    plain.save_pretrained(base)
    with pytest.raises(DataError, match="has no chat template") as caught:
        load_tokenizer(str(base))
    assert "alpaca" in caught.value.fix and caught.value.exit_code == 2
    with pytest.raises(DataError, match="neither a template's name"):
        load_tokenizer(str(base), "chatlm")
    tokenizer = load_tokenizer(str(base), "chatml")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == len(plain) and tokenizer.model_stop_tokens == ()
    tokenizer.save_pretrained(base)
    assert AutoTokenizer.from_pretrained(base).chat_template == TEMPLATES["chatml"]
    for tokens in (["<|im_end|>"], ["<|im_end|>", "</s>"]):
        ids = plain.convert_tokens_to_ids(tokens)
        settings = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
        (base / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
        tokenizer = load_tokenizer(str(base))
        assert tokenizer.chat_template == TEMPLATES["chatml"]
        assert tokenizer.model_stop_tokens == tuple(tokens)


def test_a_tokenizer_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    with pytest.raises(DataError, match="the model folder has no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{broken", encoding="utf-8")
    with pytest.raises(DataError, match="the tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="no such model folder"):
        load_tokenizer(str(tmp_path / "nowhere"))
    asked = []

    def from_pretrained(name: str, **options: object) -> object:
        asked.append(options.get("local_files_only", False))
        raise OSError("not there\nsecond line")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    with pytest.raises(DataError, match="cannot be loaded: not there") as caught:
        load_tokenizer("owner/name")
    assert asked == [True, False], "locally first"
    assert "https://mirror.example" in caught.value.where
