"""The generation core against transformers itself: the same tokens, alone and in a batch, with and
without adapter.
"""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from launching import ROOT
from serve_helpers import real_server, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.commands.chat.sessions import ChatSession
from finetune.commands.chat.terminal import TerminalChat
from finetune.commands.evaluate.command import main as evaluate
from finetune.errors import ConfigError, DataError
from finetune.inference.answer import GenerationError
from finetune.inference.generation import Generator, PromptTooLong, load_for_generation
from finetune.inference.loading import find_source
from finetune.inference.sampling import Draws, Sampling

MODEL = ROOT / "data_samples" / "tiny-qwen3"
PROMPTS = 50
NEW_TOKENS = 16


def questions() -> list[list[dict[str, str]]]:
    lines = (ROOT / "data_samples" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:: len(lines) // PROMPTS]][:PROMPTS]
    return [[{"role": "user", "content": row["instruction"]}] for row in rows]


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter on the bundled model, with weights large enough to change what it says, and
    its tokenizer.
    """
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(MODEL)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=["base", "adapter"])
def model_name(request: pytest.FixtureRequest) -> str:
    return str(MODEL) if request.param == "base" else str(request.getfixturevalue("adapter"))


@pytest.fixture(scope="session")
def plain(model_name: str) -> list[list[int]]:
    """What transformers' own generate says to each prompt alone, with nothing of this package."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if model_name != str(MODEL):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, model_name)
    model.eval()
    answers = []
    for question in questions():
        inputs = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            ids = model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=[0, 2],
                pad_token_id=0,
            )
        answers.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


@pytest.fixture(scope="session")
def generator(model_name: str) -> Iterator[Generator]:
    with load_for_generation(model_name, device_type="cpu", dtype="float32") as loaded:
        yield loaded


@pytest.fixture(scope="session")
def static(model_name: str) -> Iterator[Generator]:
    with load_for_generation(
        model_name, device_type="cpu", dtype="float32", continuous=False
    ) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def base() -> Iterator[Generator]:
    with load_for_generation(
        str(MODEL), device_type="cpu", dtype="float32", context_tokens=256
    ) as loaded:
        yield loaded


# ---------------------------------------------------------------- the same tokens


def test_batched_answers_are_transformers_own(generator: Generator, plain: list[list[int]]):
    answers = generator.generate(questions(), Sampling(max_new_tokens=NEW_TOKENS))
    assert [list(answer.token_ids) for answer in answers] == plain
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for answer, ids in zip(answers, plain, strict=True):
        assert answer.text == tokenizer.decode(ids, skip_special_tokens=True)
        assert answer.completion_tokens == len(ids)
        assert answer.finish_reason == ("stop" if ids[-1] in (0, 2) else "length")


def test_answers_alone_are_the_same(generator: Generator, plain: list[list[int]]):
    for question, ids in list(zip(questions(), plain, strict=True))[::5]:
        stream = generator.stream(question, Sampling(max_new_tokens=NEW_TOKENS))
        pieces = list(stream)
        assert list(stream.answer.token_ids) == ids and "".join(pieces) == stream.answer.text


def test_the_static_engine_says_the_same(static: Generator, plain: list[list[int]]):
    answers = static.generate(questions(), Sampling(max_new_tokens=NEW_TOKENS))
    assert [list(answer.token_ids) for answer in answers] == plain
    (alone,) = static.generate(questions()[:1], Sampling(max_new_tokens=NEW_TOKENS))
    assert list(alone.token_ids) == plain[0]


def test_every_way_to_ask_says_the_same(
    model_name: str,
    generator: Generator,
    plain: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """The terminal one by one, the server eight at a time, `eval` in batches: the same tokens, or
    the text of them.
    """
    asked = [question[0]["content"] for question in questions()]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain]

    typed = iter(
        [line for text in asked for line in ('"""', *text.split("\n"), '"""', "/reset")] + ["/quit"]
    )
    settings = generator.default_sampling.changed(max_new_tokens=NEW_TOKENS)
    terminal = TerminalChat(
        generator, settings, ChatSession(), read=lambda _: next(typed), out=io.StringIO()
    )
    terminal.run()
    assert [list(answer.token_ids) for answer, _, _ in terminal.answers] == plain

    with real_server(model_name) as served, ThreadPoolExecutor(8) as pool:
        bodies = [
            body
            for _, body in pool.map(lambda text: served.chat(text, max_tokens=NEW_TOKENS), asked)
        ]
    assert [body["choices"][0]["message"]["content"] for body in bodies] == texts
    assert [body["usage"]["completion_tokens"] for body in bodies] == list(map(len, plain))

    rows, output = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text(
        "".join(json.dumps({"instruction": text, "output": "x"}) + "\n" for text in asked)
    )
    flags = [
        "--generate",
        "all",
        "--max-new-tokens",
        str(NEW_TOKENS),
        "--device-type",
        "cpu",
        "--json",
    ]
    assert (
        evaluate(["--model", model_name, "--data", str(rows), "--output", str(output), *flags]) == 0
    )
    capsys.readouterr()
    lines = (output / "generations.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts


def test_the_adapter_changes_the_answers(adapter: Path, base: Generator):
    with load_for_generation(str(adapter), device_type="cpu") as adapted:
        settings = Sampling(max_new_tokens=NEW_TOKENS)
        assert adapted.generate(questions()[:8], settings) != base.generate(
            questions()[:8], settings
        )


def test_a_seed_gives_one_answer_whoever_else_is_there(generator: Generator, static: Generator):
    settings = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.95, top_k=50, seed=5)
    together = generator.generate(questions()[:6], settings)
    (alone,) = generator.generate(questions()[3:4], settings)
    assert alone == together[3] and static.generate(questions()[:6], settings) == together
    other = generator.generate(questions()[:6], settings.changed(seed=6))
    assert other != together
    greedy = Sampling(max_new_tokens=12)
    mixed = [
        generator.stream(question, settings if number % 2 else greedy)
        for number, question in enumerate(questions()[:6])
    ]
    for number, stream in enumerate(mixed):
        list(stream)
        assert number % 2 == 0 or stream.answer == together[number]


def test_the_models_own_settings_are_its_default(tmp_path: Path):
    """A repetition penalty in generation_config.json is applied as transformers does it, and
    once.
    """
    folder = shutil.copytree(MODEL, tmp_path / "model")
    own = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**own, "repetition_penalty": 1.4}))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for continuous in (True, False):
        with load_for_generation(
            str(folder), device_type="cpu", continuous=continuous
        ) as generator:
            answers = generator.generate(
                questions()[:4], generator.default_sampling.changed(max_new_tokens=NEW_TOKENS)
            )
            for question, answer in zip(questions()[:4], answers, strict=True):
                prompt = torch.tensor([generator.prompt_ids(question)])
                with torch.inference_mode():
                    ids = plain.generate(
                        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS
                    )
                assert list(answer.token_ids) == ids[0, prompt.shape[1] :].tolist()
            assert answers != generator.generate(
                questions()[:4], Sampling(max_new_tokens=NEW_TOKENS)
            )


def test_a_second_turn_reads_only_what_is_new(base: Generator):
    """The keys and values of the first turn are still there: counted in tokens that the model is
    given.
    """
    for continuous in (True, False):
        with load_for_generation(str(MODEL), device_type="cpu", continuous=continuous) as generator:
            read: list[int] = []
            handle = generator.model.register_forward_pre_hook(
                lambda _, args, kwargs, read=read: read.append(kwargs["input_ids"].shape[1]),
                with_kwargs=True,
            )
            turns = [{"role": "user", "content": "Explain the meaning of 100.64.0.0/10. " * 8}]
            (first,) = generator.generate([turns], Sampling(max_new_tokens=24))
            assert sum(read) >= first.prompt_tokens
            read.clear()
            turns += [
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": "And?"},
            ]
            (second,) = generator.generate([turns], Sampling(max_new_tokens=1))
            handle.remove()
            new = second.prompt_tokens - first.prompt_tokens
            # 32: a page
            assert sum(read) <= new + 32 < first.prompt_tokens, "the conversation was read again"
            (fresh,) = base.generate([turns[-1:]], Sampling(max_new_tokens=1))
            assert fresh.prompt_tokens < second.prompt_tokens
            with load_for_generation(str(MODEL), device_type="cpu", continuous=continuous) as anew:
                assert anew.generate([turns], Sampling(max_new_tokens=12)) == generator.generate(
                    [turns], Sampling(max_new_tokens=12)
                )


# ---------------------------------------------------------------- ends


def test_ends_at_a_stop_text(base: Generator):
    question = questions()[1]
    (whole,) = base.generate([question], Sampling(max_new_tokens=24))
    stop = whole.text[len(whole.text) // 2 :][:4]
    stream = base.stream(question, Sampling(max_new_tokens=24, stop=(stop,)))
    pieces = list(stream)
    assert "".join(pieces) == stream.answer.text == whole.text[: whole.text.index(stop)]
    assert stream.answer.finish_reason == "stop"


def test_ends_at_every_end_token(base: Generator):
    tokenizer = base.tokenizer
    assert base.stop_ids == {
        tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>")
    }
    for token in base.stop_ids:
        bias = torch.zeros(base.model.config.vocab_size)
        bias[token] = 1e9
        handle = base.model.lm_head.register_forward_hook(
            lambda module, args, logits, bias=bias: logits + bias
        )
        try:
            (answer,) = base.generate([questions()[0]], Sampling(max_new_tokens=5))
        finally:
            handle.remove()
        assert answer.token_ids == (token,) and answer.finish_reason == "stop" and answer.text == ""


@pytest.mark.parametrize("continuous", [True, False])
def test_cancelled_answers_leave_the_batch(continuous: bool):
    with load_for_generation(str(MODEL), device_type="cpu", continuous=continuous) as generator:
        tokens = threading.Event()
        steps: list[int] = []
        generator.model.register_forward_hook(lambda *_: steps.append(1))
        stream = generator.stream("BGP", Sampling(max_new_tokens=400, temperature=1.0, seed=1))
        first = next(stream)
        stream.cancel()
        rest = list(stream)
        assert stream.answer.finish_reason == "cancelled" and stream.answer.text == first + "".join(
            rest
        )
        stream.cancel()  # twice does no harm
        tokens.wait(0.3)
        before = len(steps)
        tokens.wait(0.3)
        assert len(steps) == before < 300, "the model goes on for nobody"
        (answer,) = generator.generate([questions()[0]], Sampling(max_new_tokens=4))
        assert answer.completion_tokens == 4 or answer.finish_reason == "stop"


@pytest.mark.parametrize("continuous", [True, False])
def test_a_failing_model_fails_its_answers_and_nothing_hangs(continuous: bool):
    with load_for_generation(str(MODEL), device_type="cpu", continuous=continuous) as generator:

        def fail(*_: object) -> None:
            raise RuntimeError("device lost")

        handle = generator.model.register_forward_pre_hook(fail)
        with pytest.raises(GenerationError, match="device lost"):
            generator.generate(questions()[:3], Sampling(max_new_tokens=4))
        handle.remove()
        if not continuous:  # a batch fails, the next one is answered
            assert (
                generator.generate(questions()[:1], Sampling(max_new_tokens=2))[0].completion_tokens
                >= 1
            )
            return
        # the engine is gone for good: a server starts a new worker
        wait_for(lambda: not generator.engine.alive)
        with pytest.raises(GenerationError):
            generator.generate(questions()[:1], Sampling(max_new_tokens=2))


@pytest.mark.parametrize("continuous", [True, False])
def test_an_error_in_choosing_tokens_fails_its_own_answer(
    continuous: bool, monkeypatch: pytest.MonkeyPatch
):
    unbroken = Draws.key

    def key(draws: Draws, position: int) -> tuple[int, int]:
        return (2**63, 0) if draws.seed == 666 and position == 2 else unbroken(draws, position)

    settings = [Sampling(max_new_tokens=12, temperature=1.0, seed=seed) for seed in (1, 666, 2)]
    with load_for_generation(str(MODEL), device_type="cpu", continuous=continuous) as generator:
        expected = [generator.generate([questions()[0]], one)[0] for one in settings]
        monkeypatch.setattr(Draws, "key", key)
        streams = [generator.stream(questions()[0], one) for one in settings]
        with pytest.raises(GenerationError, match="Overflow"):
            list(streams[1])
        for number in (0, 2):
            assert (
                "".join(streams[number]) == expected[number].text
                and streams[number].answer == expected[number]
            )
        assert generator.engine.alive
        assert generator.generate([questions()[0]], settings[0])[0] == expected[0]


def test_more_requests_than_the_cache_holds_are_all_answered():
    """A full cache makes requests wait or be read again; the answers stay the same."""
    with load_for_generation(
        str(MODEL), device_type="cpu", context_tokens=128, max_batch=8
    ) as generator:
        settings = Sampling(max_new_tokens=20)
        expected = [generator.generate([question], settings)[0] for question in questions()[:12]]
        assert generator.generate(questions()[:12] * 2, settings) == expected * 2


# ---------------------------------------------------------------- what is refused


def test_prompts_are_checked(base: Generator):
    with pytest.raises(
        PromptTooLong, match=r"the prompt has \d+ tokens; the model reads at most 256"
    ):
        base.generate([[{"role": "user", "content": "router " * 400}]])
    for wrong, message in (
        ([], "there is no message"),
        ("", "the prompt is empty"),
        ([-1], "outside the vocabulary"),
        ([10**6], "outside the vocabulary"),
        ([{"role": "wizard", "content": "x"}], "role is 'wizard'"),
        ([{"role": "user", "content": None}], "content is not a text"),
        ([{"role": "user"}], "content is not a text"),
        ([{"role": "tool", "content": "x"}], "template does not take"),
    ):
        with pytest.raises(DataError, match=message):
            base.generate([wrong])
    assert base.generate([]) == []
    (cut,) = base.generate([[5] * 255], Sampling(max_new_tokens=50))
    assert cut.completion_tokens == 1  # as many as the context leaves


def test_models_are_found_and_refused(tmp_path: Path, adapter: Path):
    assert (
        find_source(str(adapter)).base == str(MODEL)
        and find_source(str(adapter)).adapter == adapter
    )
    assert find_source(str(MODEL), str(adapter)).adapter == adapter
    run = tmp_path / "run"
    (run / "checkpoint-9").mkdir(parents=True)
    (run / "checkpoint-100").mkdir()
    with pytest.raises(ConfigError, match="not finished") as refused:
        find_source(str(run))
    assert "checkpoint-100" in refused.value.fix
    with pytest.raises(ConfigError, match="there is no model"):
        find_source(None)
    with pytest.raises(ConfigError, match="no adapter is there"):
        find_source(str(MODEL), str(tmp_path))
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "adapter_config.json").write_text('{"base_model_name_or_path": "/no/such/base"}')
    with pytest.raises(ConfigError, match="base model /no/such/base is not here") as refused:
        find_source(str(moved))
    assert f"--model BASE --adapter {moved}" in refused.value.fix
    (moved / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(MODEL)}))
    (moved / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(Exception, match="cannot be read"):
        load_for_generation(str(moved), device_type="cpu")
    with pytest.raises(ConfigError, match="context is 9999"):
        load_for_generation(str(MODEL), device_type="cpu", context_tokens=9999)


def test_the_private_hooks_of_transformers_are_still_there():
    """What `engine.py` uses beyond the documented interface."""
    import inspect

    from transformers.generation.continuous_batching import cb_logits_processors as processors
    from transformers.generation.continuous_batching import continuous_api as api

    manager = inspect.getsource(api.ContinuousBatchingManager)
    assert (
        "self.logit_processor = " in manager and "logit_processor=self.logit_processor" in manager
    )
    assert "fatal_error" in inspect.getsource(api.BackgroundThreadStatus)
    for name in ("fill_defaults", "prepare_tensor_args", "__call__"):
        assert name in processors.ContinuousBatchingLogitsProcessor.__abstractmethods__
    source = inspect.getsource(processors.ContinuousBatchingLogitsProcessorList)
    assert "self.tensors_required" in source and "request.has_new_token" in source
