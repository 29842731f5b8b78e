"""An evaluation: samples and prompts once, then each candidate in turn, one in memory at a time."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune.commands.evaluate.answers import find_answer, same_answer
from finetune.commands.evaluate.candidates import Candidate, run_settings
from finetune.commands.evaluate.measure_loss import add_losses
from finetune.commands.evaluate.options import GENERATIONS_NAME, EvalOptions
from finetune.commands.evaluate.prompts import (
    EvalPrompt,
    find_difficulties,
    read_prompts,
    spread,
    warn_of_other_answers,
)
from finetune.commands.evaluate.scores import ModelScores
from finetune.config.sources import as_sources, with_columns
from finetune.data.dataset import prepare_samples
from finetune.data.records import RecordReader
from finetune.data.sources import expand_sources
from finetune.inference.answer import Answer, AnswerStream
from finetune.inference.generation import Generator, PromptTooLong
from finetune.inference.loading import check_fit, load_tokenizer_of, load_weights
from finetune.inference.sampling import Sampling
from finetune.runtime import device as devices
from finetune.runtime.terminal import console as terminal_console
from finetune.storage.run_log import JsonLines

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("finetune")

DEFAULT_CUTOFF_TOKENS = 2048  # that of training
BATCHES_WAITING = 4  # answers begun ahead, in batches: the engine always has the next one
Progress = Callable[[int], None]


class Evaluation:
    """Held-out samples, and candidates measured on them.

    The tokenizer and chat template of the first one that is not the base write the samples, for all candidates: only so
    do their losses compare. What the options leave open is as in the run that made it.

    Raises:
        FinetuneError: data, template or tokenizer are wrong; before any weights are read.
    """

    def __init__(self, options: EvalOptions, candidates: Sequence[Candidate]) -> None:
        self.options, self.candidates = options, candidates
        reference = next(candidate.source for candidate in candidates if candidate.role != "base")
        self.device = torch.device(devices.choose_device_type(options.device_type))
        self.dtype = devices.choose_dtype(options.dtype, self.device.type)
        self.tokenizer = load_tokenizer_of(reference, options.template, trust_remote_code=options.trust_remote_code)
        run = run_settings(reference)
        cutoff, field, curriculum = run.get("cutoff_len"), run.get("difficulty_field"), run.get("curriculum")
        self.cutoff_len = options.cutoff_len or (cutoff if isinstance(cutoff, int) else DEFAULT_CUTOFF_TOKENS)
        field = options.difficulty_field or (field if isinstance(field, str) else "difficulty")
        known = curriculum.get("levels") if isinstance(curriculum, dict) else None
        sources = with_columns(as_sources(options.data), options.columns)
        paths = [file.path for file in expand_sources(sources)]
        difficulties = find_difficulties(paths, field, tuple(map(str, known)) if isinstance(known, list) else ())
        self.samples = prepare_samples(
            sources,
            self.tokenizer,
            cutoff_len=self.cutoff_len,
            difficulties=difficulties or None,
            difficulty_field=field,
            on_bad_row=options.on_bad_row,
            on_media=options.on_media,
            train_thinking=run.get("train_thinking") is not False,
            cache_dir=options.cache_dir,
        )
        self.chosen = spread(self.samples.difficulties, options.max_samples)
        records = np.unique(self.samples.record_ids[self.chosen]).tolist()
        reader = RecordReader(difficulties or None, field, sources[0], options.on_media)  # all have the same columns
        self.prompts = self._asked(read_prompts([(path, reader) for path in paths], options.answer_field, records))

    def _asked(self, prompts: list[EvalPrompt]) -> list[EvalPrompt]:
        """Those that `--generate` asks for."""
        wanted = self.options.generate
        if wanted == "answered":
            prompts = [prompt for prompt in prompts if prompt.answer is not None]
        elif isinstance(wanted, int):
            # A prompt whose answer can be checked tells more than one whose answer cannot.
            prompts = sorted(prompts, key=lambda prompt: prompt.answer is None)
            names = [prompt.difficulty for prompt in prompts]
            numbers = np.array([names.index(name) for name in names], dtype=np.int64)
            prompts = [prompts[position] for position in spread(numbers, wanted)]
            prompts.sort(key=lambda prompt: prompt.record)
        warn_of_other_answers(prompts, self.options.answer_field)
        return prompts

    def facts(self) -> dict[str, Any]:
        """What was evaluated, as plain JSON without a path of this machine."""
        files = {"files": [Path(path).name for path in self.options.data], "fingerprint": self.samples.fingerprint}
        settings = {"cutoff_len": self.cutoff_len, "max_new_tokens": self.options.max_new_tokens}
        return {
            "data": {**files, "samples": len(self.chosen), "questions": len(self.prompts)},
            "settings": {**settings, "dtype": self.dtype, "device_type": self.device.type},
        }

    def run(self, output: Path | None) -> list[ModelScores]:
        """Measure each candidate; the generations go to the new folder `output`.

        Raises:
            FinetuneError: a model cannot be loaded, or fails.
        """
        writer = None
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            writer = JsonLines(output / GENERATIONS_NAME)
        try:
            return [self._measure(candidate, writer) for candidate in self.candidates]
        finally:
            if writer is not None:
                writer.close()

    def _measure(self, candidate: Candidate, writer: JsonLines | None) -> ModelScores:
        scores, source = ModelScores(candidate.name, candidate.role), candidate.source
        model = load_weights(source, self.device, self.dtype, trust_remote_code=self.options.trust_remote_code)
        check_fit(model, self.tokenizer, source)
        for name in self.samples.difficulty_names:
            scores.of(name)
        with progress(f"{scores.name}: loss", len(self.chosen)) as advance:
            pad = self.tokenizer.pad_token_id
            add_losses(scores, model, self.samples, self.chosen, pad_token_id=pad, on_progress=advance)
        if self.prompts:
            self._ask(scores, model, writer)
        del model
        devices.empty_cache(self.device)
        return scores

    def _ask(self, scores: ModelScores, model: PreTrainedModel, writer: JsonLines | None) -> None:
        cut = too_long = 0
        with (
            Generator(
                model,
                self.tokenizer,
                scores.name,
                max_batch=min(self.options.batch_size, len(self.prompts)),
                context_tokens=self.options.context_tokens,
            ) as generator,
            progress(f"{scores.name}: answers", len(self.prompts)) as advance,
        ):
            for prompt, answer in answers(generator, self.prompts, self.options.max_new_tokens):
                record = generation(generator, prompt, answer)
                cut += record["finish_reason"] == "length"
                too_long += record["finish_reason"] == "prompt_too_long"
                if prompt.answer is not None:
                    score = scores.of(prompt.difficulty)
                    score.answered += 1
                    score.correct += record["correct"]
                if writer is not None:
                    writer.write({"model": scores.name, **record})
                advance(1)
        if cut:
            logger.warning(
                "%s: %d of %d answers were cut off (fix: a larger --max-new-tokens, if the model does end its answers)",
                scores.name, cut, len(self.prompts),
            )  # fmt: skip
        if too_long:
            logger.warning(
                "%s: %d prompts leave no room for an answer in %d tokens and count as wrong",
                scores.name, too_long, generator.context_tokens,
            )  # fmt: skip


def answers(
    generator: Generator, prompts: Sequence[EvalPrompt], max_new_tokens: int
) -> Iterator[tuple[EvalPrompt, Answer | None]]:
    """Greedy answers in the order of the prompts, written together; None where the prompt leaves no room.

    Raises:
        GenerationError: an answer failed.
    """
    greedy = Sampling(max_new_tokens=max_new_tokens)
    begun: deque[tuple[EvalPrompt, AnswerStream | None]] = deque()
    waiting = iter(prompts)
    try:
        while True:
            while len(begun) < BATCHES_WAITING * generator.limits.max_batch:
                prompt = next(waiting, None)
                if prompt is None:
                    break
                try:
                    begun.append((prompt, generator.stream(prompt.messages, greedy)))
                except PromptTooLong:
                    begun.append((prompt, None))
            if not begun:
                return
            prompt, stream = begun.popleft()
            for _ in stream or ():
                pass
            yield prompt, None if stream is None else stream.answer
    finally:
        for _, stream in begun:
            if stream is not None:
                stream.cancel()


def generation(generator: Generator, prompt: EvalPrompt, answer: Answer | None) -> dict[str, Any]:
    """One line of generations.jsonl."""
    text = "" if answer is None else answer.text
    given = find_answer(text)
    return {
        "row": prompt.record,
        "level": prompt.difficulty,
        "prompt": generator.render(prompt.messages),
        "text": text,
        "expected": prompt.answer,
        "given": given,
        "correct": None if prompt.answer is None else same_answer(given, prompt.answer),
        "finish_reason": "prompt_too_long" if answer is None else answer.finish_reason,
        "completion_tokens": 0 if answer is None else answer.completion_tokens,
    }


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """A bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.progress import Progress as Bars

    with Bars(console=terminal_console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield lambda count: bars.advance(task, count)
