"""The generation core against transformers itself: the same tokens, alone and in a batch."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from serve_helpers import real_server, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.commands.chat.sessions import ChatSession
from finetune.commands.chat.terminal import TerminalChat
from finetune.commands.evaluate.command import main as evaluate
from finetune.errors import ConfigError, DataError, FinetuneError
from finetune.inference.answer import GenerationError
from finetune.inference.generation import Generator, PromptTooLong, load_for_generation
from finetune.inference.loading import Source, find_source, load_tokenizer_of
from finetune.inference.sampling import Draws, Sampling

MODEL = ROOT / "data_samples" / "tiny-qwen3"
PROMPTS = 16
NEW_TOKENS = 16


def questions() -> list[list[dict[str, str]]]:
    lines = (ROOT / "data_samples" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:: len(lines) // PROMPTS]][:PROMPTS]
    return [[{"role": "user", "content": row["instruction"]}] for row in rows]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter that changes what the bundled model says, and its tokenizer."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), lora).save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(MODEL)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(adapter: Path) -> list[list[int]]:
    """What transformers' own generate says to each prompt alone, with nothing of this package."""
    from peft import PeftModel

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter).eval()
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    answers = []
    for question in questions():
        inputs = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            ids = model.generate(**inputs, **settings, eos_token_id=[0, 2])
        answers.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def load(model: Path = MODEL, **settings: Any) -> Generator:
    return load_for_generation(str(model), device_type="cpu", dtype="float32", **settings)


@pytest.fixture(scope="module")
def generator(adapter: Path) -> Iterator[Generator]:
    with load(adapter) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def static(adapter: Path) -> Iterator[Generator]:
    with load(adapter, continuous=False, limit_template=True) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def base() -> Iterator[Generator]:
    with load(context_tokens=256) as loaded:
        yield loaded


@pytest.fixture(params=[True, False], ids=["continuous", "static"])
def continuous(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_more_requests_than_the_cache_holds_are_all_answered():
    """A full cache makes requests wait or be read again; the answers stay the same."""
    with load(context_tokens=128, max_batch=8) as generator:
        settings = Sampling(max_new_tokens=20)
        expected = [generator.generate([question], settings)[0] for question in questions()[:12]]
        assert generator.generate(questions()[:12] * 2, settings) == expected * 2


def test_answers_are_transformers_own_alone_and_in_a_batch(generator, static, base, plain):
    settings = Sampling(max_new_tokens=NEW_TOKENS)
    answers = generator.generate(questions(), settings)
    for answer, ids in zip(answers, plain, strict=True):
        assert list(answer.token_ids) == ids and answer.completion_tokens == len(ids)
        assert answer.finish_reason == ("stop" if ids[-1] in (0, 2) else "length")
    stream = generator.stream(questions()[5], settings)
    pieces = list(stream)
    assert stream.answer == answers[5] and "".join(pieces) == stream.answer.text
    assert static.generate(questions(), settings) == answers
    assert static.generate(questions()[:1], settings) == answers[:1]
    assert base.generate(questions()[:8], settings) != answers[:8], "the adapter does nothing"


def test_every_way_to_ask_says_the_same(adapter, generator, plain, tmp_path):
    """The terminal one by one, the server eight at a time, `eval` in batches."""
    asked = [question[0]["content"] for question in questions()]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain]
    typed = [line for text in asked for line in ('"""', *text.split("\n"), '"""', "/reset")]
    reading = iter([*typed, "/quit"])
    settings = generator.default_sampling.changed(max_new_tokens=NEW_TOKENS)
    terminal = TerminalChat(
        generator, settings, ChatSession(), read=lambda _: next(reading), out=io.StringIO()
    )
    terminal.run()
    assert [list(answer.token_ids) for answer, _, _ in terminal.answers] == plain

    with real_server(str(adapter)) as served, ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda text: served.chat(text, max_tokens=NEW_TOKENS)[1], asked))
    assert [body["choices"][0]["message"]["content"] for body in said] == texts
    assert [body["usage"]["completion_tokens"] for body in said] == list(map(len, plain))

    rows, output = tmp_path / "rows.jsonl", tmp_path / "out"
    records = [{"instruction": text, "output": "x"} for text in asked]
    rows.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--model", str(adapter), "--data", str(rows), "--output", str(output)]
    words += ["--generate", "all", "--max-new-tokens", str(NEW_TOKENS), "--device-type", "cpu"]
    assert evaluate([*words, "--json"]) == 0
    lines = (output / "generations.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts


def test_a_seed_gives_one_answer_whoever_else_is_there(generator: Generator, static: Generator):
    settings = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.95, top_k=50, seed=5)
    together = generator.generate(questions()[:6], settings)
    (alone,) = generator.generate(questions()[3:4], settings)
    assert alone == together[3] and static.generate(questions()[:6], settings) == together
    assert generator.generate(questions()[:6], settings.changed(seed=6)) != together
    each = [settings, Sampling(max_new_tokens=12)] * 3
    mixed = [stream.finish() for stream in map(generator.stream, questions()[:6], each)]
    assert mixed[::2] == together[::2]


def test_the_models_own_settings_are_its_default(tmp_path: Path, continuous: bool):
    """A repetition penalty in generation_config.json is applied as transformers does it."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    own = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**own, "repetition_penalty": 1.4}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with load(folder, continuous=continuous) as generator:
        settings = generator.default_sampling.changed(max_new_tokens=NEW_TOKENS)
        answers = generator.generate(questions()[:4], settings)
        for question, answer in zip(questions()[:4], answers, strict=True):
            prompt = torch.tensor([generator.prompt_ids(question)])
            with torch.inference_mode():
                ids = model.generate(prompt, max_new_tokens=NEW_TOKENS)
            assert list(answer.token_ids) == ids[0, prompt.shape[1] :].tolist()
        assert answers != generator.generate(questions()[:4], Sampling(max_new_tokens=NEW_TOKENS))


def test_a_second_turn_reads_only_what_is_new(continuous: bool):
    """The keys and values of the first turn are still there: counted in tokens read."""
    with load(continuous=continuous) as generator:
        read: list[int] = []
        handle = generator.model.register_forward_pre_hook(
            lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        turns = [{"role": "user", "content": "Explain the meaning of 100.64.0.0/10. " * 8}]
        (first,) = generator.generate([turns], Sampling(max_new_tokens=24))
        read.clear()
        turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
        (second,) = generator.generate([turns], Sampling(max_new_tokens=1))
        handle.remove()
        new = second.prompt_tokens - first.prompt_tokens
        # 32: a page
        assert sum(read) <= new + 32 < first.prompt_tokens, "the conversation was read again"
        settings = Sampling(max_new_tokens=12)
        # this one again, and another conversation that begins alike
        other = [{"role": "user", "content": "Explain the meaning of life."}]
        said = [generator.generate([asked], settings) for asked in (turns, other)]
    with load(continuous=continuous) as anew:
        assert [anew.generate([asked], settings) for asked in (other, turns)] == said[::-1]


def test_ends_at_every_end_token(base: Generator):
    tokenizer = base.tokenizer
    assert base.stop_ids == set(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    for token in base.stop_ids:
        bias = torch.zeros(base.model.config.vocab_size)
        bias[token] = 1e9
        handle = base.model.lm_head.register_forward_hook(lambda *given: given[2] + bias)  # noqa: B023
        (answer,) = base.generate([questions()[0]], Sampling(max_new_tokens=5))
        handle.remove()
        assert answer.token_ids == (token,) and answer.finish_reason == "stop" and answer.text == ""


def test_cancelled_answers_leave_the_batch(continuous: bool):
    with load(continuous=continuous) as generator:
        steps: list[int] = []
        generator.model.register_forward_hook(lambda *_: steps.append(1))
        stream = generator.stream("BGP", Sampling(max_new_tokens=400, temperature=1.0, seed=1))
        first = next(stream)
        stream.cancel()
        text = first + "".join(stream)
        assert (stream.answer.finish_reason, stream.answer.text) == ("cancelled", text)
        stream.cancel()  # twice does no harm
        (answer,) = generator.generate([questions()[0]], Sampling(max_new_tokens=4))
        assert answer.completion_tokens == 4 or answer.finish_reason == "stop"
        before = len(steps)
        time.sleep(0.1)
        assert len(steps) == before < 300, "the model goes on for nobody"


def test_a_failing_model_fails_its_answers_and_nothing_hangs(continuous: bool):
    with load(continuous=continuous) as generator:

        def fail(*_: object) -> None:
            raise RuntimeError("device lost")

        handle = generator.model.register_forward_pre_hook(fail)
        with pytest.raises(GenerationError, match="device lost"):
            generator.generate(questions()[:3], Sampling(max_new_tokens=4))
        handle.remove()
        if not continuous:  # a batch fails, the next one is answered
            (answer,) = generator.generate(questions()[:1], Sampling(max_new_tokens=2))
            assert answer.completion_tokens >= 1
            return
        wait_for(lambda: not generator.engine.alive)  # for good: a server starts a new worker
        with pytest.raises(GenerationError):
            generator.generate(questions()[:1], Sampling(max_new_tokens=2))


def test_an_error_in_choosing_tokens_fails_its_own_answer(continuous, monkeypatch):
    unbroken = Draws.key

    def key(draws: Draws, position: int) -> tuple[int, int]:
        return (2**63, 0) if draws.seed == 666 and position == 2 else unbroken(draws, position)

    settings = [Sampling(max_new_tokens=12, temperature=1.0, seed=seed) for seed in (1, 666, 2)]
    with load(continuous=continuous) as generator:
        expected = [generator.generate([questions()[0]], one)[0] for one in settings]
        monkeypatch.setattr(Draws, "key", key)
        streams = [generator.stream(questions()[0], one) for one in settings]
        with pytest.raises(GenerationError, match="Overflow"):
            list(streams[1])
        assert [streams[number].finish() for number in (0, 2)] == expected[::2]
        assert generator.engine.alive


def test_prompts_are_checked(base: Generator):
    with pytest.raises(PromptTooLong, match=r"has \d+ tokens; the model reads at most 256"):
        base.generate([[{"role": "user", "content": "router " * 400}]])
    for wrong, message in (
        ([], "there is no message"),
        ("", "the prompt is empty"),
        ([-1], "outside the vocabulary"),
        ([10**6], "outside the vocabulary"),
        ([{"role": "wizard", "content": "x"}], "role is 'wizard'"),
        ([{"role": "user"}], "content is not a text"),
        ([{"role": "tool", "content": "x"}], "template does not take"),
    ):
        with pytest.raises(DataError, match=message):
            base.generate([wrong])
    assert base.generate([]) == []
    never = torch.zeros(base.model.config.vocab_size)
    never[list(base.stop_ids)] = -1e9
    handle = base.model.lm_head.register_forward_hook(lambda *given: given[2] + never)
    (cut,) = base.generate([[5] * 250], Sampling(max_new_tokens=50))
    handle.remove()
    assert (cut.completion_tokens, cut.finish_reason) == (6, "length")  # what the context leaves


def test_models_are_found_and_refused(tmp_path: Path, adapter: Path):
    source = find_source(str(adapter))
    assert source == find_source(str(MODEL), str(adapter)) == Source(str(MODEL), adapter)
    # an adapter is asked with its own tokenizer
    own = shutil.copytree(adapter, tmp_path / "own")
    (own / "chat_template.jinja").write_text("own")
    tokenizer = load_tokenizer_of(Source(str(MODEL), own), None, trust_remote_code=False)
    assert tokenizer.chat_template == "own"
    run, moved = tmp_path / "run", tmp_path / "moved"
    for checkpoint in ("checkpoint-9", "checkpoint-100"):
        (run / checkpoint).mkdir(parents=True)
    moved.mkdir()
    (moved / "adapter_config.json").write_text('{"base_model_name_or_path": "/no/such/base"}')
    for given, what, fix in (
        ([str(run)], "not finished", "checkpoint-100"),
        ([None], "there is no model", ""),
        ([str(MODEL), str(tmp_path)], "no adapter is there", ""),
        ([str(moved)], "base model /no/such/base is not here", f"--model BASE --adapter {moved}"),
    ):
        with pytest.raises(ConfigError, match=what) as refused:
            find_source(*given)
        assert fix in refused.value.fix
    (moved / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(MODEL)}))
    (moved / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(FinetuneError, match="cannot be read"):
        load(moved)
    with pytest.raises(ConfigError, match="context is 9999"):
        load(context_tokens=9999)
