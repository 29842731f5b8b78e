"""An evaluation: samples and questions once, then each model in turn, one in memory at a time."""

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
from finetune.commands.evaluate.command import GENERATIONS_NAME
from finetune.commands.evaluate.measure_loss import add_losses
from finetune.commands.evaluate.questions import Question, find_difficulties, read_questions, spread
from finetune.commands.evaluate.scores import ModelScores
from finetune.data.dataset import prepare_samples
from finetune.data.files import expand_paths
from finetune.inference.generation import Answer, AnswerStream, Generator, PromptTooLong, make_generator
from finetune.inference.loading import check_fit, load_tokenizer_of, load_weights
from finetune.inference.sampling import Sampling
from finetune.runtime import device as devices
from finetune.storage.run_log import JsonLines

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.commands.evaluate.command import Contestant, EvaluationSettings
    from finetune.inference.loading import Source

logger = logging.getLogger("finetune")

BATCHES_WAITING = 4  # answers begun ahead, in batches: the engine always has the next one
Progress = Callable[[int], None]


class Evaluation:
    """Held-out samples, and models measured on them.

    Args:
        settings: see `EvaluationSettings`.
        reference: its tokenizer and chat template write the samples, for all models: only so do their losses compare.

    Raises:
        FinetuneError: data, template or tokenizer are wrong; before any weights are read.
    """

    def __init__(self, settings: EvaluationSettings, reference: Source) -> None:
        self.settings = settings
        self.device = torch.device(devices.choose_device_type(settings.device_type))
        self.dtype = devices.choose_dtype(settings.dtype, self.device.type)
        self.tokenizer = load_tokenizer_of(reference, settings.template, trust_remote_code=settings.trust_remote_code)
        paths = expand_paths(settings.data)
        difficulties = find_difficulties(paths, settings.difficulty_field, settings.known_difficulties)
        self.samples = prepare_samples(
            settings.data,
            self.tokenizer,
            cutoff_len=settings.cutoff_len,
            difficulties=difficulties or None,
            difficulty_field=settings.difficulty_field,
            on_bad_row=settings.on_bad_row,
            cache_dir=settings.cache_dir,
        )
        self.chosen = spread(self.samples.difficulties, settings.max_samples)
        records = np.unique(self.samples.record_ids[self.chosen])
        self.questions = self._chosen(
            read_questions(paths, difficulties, settings.difficulty_field, settings.answer_field, records.tolist())
        )

    def _chosen(self, questions: list[Question]) -> list[Question]:
        """The questions to ask."""
        wanted = self.settings.generate
        if wanted == "answered":
            questions = [question for question in questions if question.answer is not None]
        elif isinstance(wanted, int):
            # A question whose answer can be checked says more than one whose answer cannot.
            questions = sorted(questions, key=lambda question: question.answer is None)
            names = [question.difficulty for question in questions]
            numbers = np.array([names.index(name) for name in names], dtype=np.int64)
            questions = [questions[place] for place in spread(numbers, wanted)]
            questions.sort(key=lambda question: question.record)
        wrong = [question.record for question in questions if not question.consistent]
        if wrong:
            logger.warning(
                "%d rows have another '%s' than their own output gives, first row %d: repeating the output counts as "
                "wrong (fix: end outputs with 'Answer: ...', or correct the field)",
                len(wrong), self.settings.answer_field, wrong[0],
            )  # fmt: skip
        return questions

    def facts(self) -> dict[str, Any]:
        """What was evaluated, as plain JSON without a path of this machine."""
        settings = self.settings
        return {
            "data": {
                "files": [Path(path).name for path in settings.data],
                "fingerprint": self.samples.fingerprint,
                "samples": len(self.chosen),
                "questions": len(self.questions),
            },
            "settings": {
                "cutoff_len": settings.cutoff_len,
                "max_new_tokens": settings.max_new_tokens,
                "dtype": self.dtype,
                "device_type": self.device.type,
            },
        }

    def run(self, contestants: Sequence[Contestant], names: Sequence[str], output: Path | None) -> list[ModelScores]:
        """Measure each model.

        Args:
            output: new folder for the generations; None: they are not kept.

        Raises:
            FinetuneError: a model cannot be loaded, or fails.
        """
        writer = None
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            writer = JsonLines(output / GENERATIONS_NAME)
        try:
            return [
                self._measure(ModelScores(name, contestant.role), contestant.source, writer)
                for name, contestant in zip(names, contestants, strict=True)
            ]
        finally:
            if writer is not None:
                writer.close()

    def _measure(self, scores: ModelScores, source: Source, writer: JsonLines | None) -> ModelScores:
        model = load_weights(source, self.device, self.dtype, trust_remote_code=self.settings.trust_remote_code)
        check_fit(model, self.tokenizer, source)
        for name in self.samples.difficulty_names:
            scores.of(name)
        with progress(f"{scores.name}: loss", len(self.chosen)) as advance:
            pad = self.tokenizer.pad_token_id
            add_losses(scores, model, self.samples, self.chosen, pad_token_id=pad, on_progress=advance)
        if self.questions:
            self._ask(scores, model, writer)
        del model
        devices.empty_cache(self.device)
        return scores

    def _ask(self, scores: ModelScores, model: PreTrainedModel, writer: JsonLines | None) -> None:
        settings = self.settings
        cut = too_long = 0
        with (
            make_generator(
                model,
                self.tokenizer,
                scores.name,
                max_batch=min(settings.batch_size, len(self.questions)),
                context_tokens=settings.context_tokens,
            ) as generator,
            progress(f"{scores.name}: answers", len(self.questions)) as advance,
        ):
            for question, answer in answers(generator, self.questions, settings.max_new_tokens):
                record = generation(generator, question, answer)
                cut += record["finish_reason"] == "length"
                too_long += record["finish_reason"] == "prompt_too_long"
                if question.answer is not None:
                    score = scores.of(question.difficulty)
                    score.answered += 1
                    score.correct += record["correct"]
                if writer is not None:
                    writer.write({"model": scores.name, **record})
                advance(1)
        if cut:
            logger.warning(
                "%s: %d of %d answers were cut off (fix: a larger --max-new-tokens, if the model does end its answers)",
                scores.name, cut, len(self.questions),
            )  # fmt: skip
        if too_long:
            logger.warning(
                "%s: %d prompts leave no room for an answer in %d tokens and count as wrong",
                scores.name, too_long, generator.context_tokens,
            )  # fmt: skip


def answers(
    generator: Generator, questions: Sequence[Question], max_new_tokens: int
) -> Iterator[tuple[Question, Answer | None]]:
    """Greedy answers in the order of the questions, written together; None where the prompt leaves no room.

    Raises:
        GenerationError: an answer failed.
    """
    greedy = Sampling(max_new_tokens=max_new_tokens)
    begun: deque[tuple[Question, AnswerStream | None]] = deque()
    waiting = iter(questions)
    try:
        while True:
            while len(begun) < BATCHES_WAITING * generator.limits.max_batch:
                question = next(waiting, None)
                if question is None:
                    break
                try:
                    begun.append((question, generator.stream(question.messages, greedy)))
                except PromptTooLong:
                    begun.append((question, None))
            if not begun:
                return
            question, stream = begun.popleft()
            for _ in stream or ():
                pass
            yield question, None if stream is None else stream.answer
    finally:
        for _, stream in begun:
            if stream is not None:
                stream.cancel()


def generation(generator: Generator, question: Question, answer: Answer | None) -> dict[str, Any]:
    """One line of generations.jsonl."""
    text = "" if answer is None else answer.text
    given = find_answer(text)
    return {
        "row": question.record,
        "level": question.difficulty,
        "prompt": generator.render(question.messages),
        "text": text,
        "expected": question.answer,
        "given": given,
        "correct": None if question.answer is None else same_answer(given, question.answer),
        "finish_reason": "prompt_too_long" if answer is None else answer.finish_reason,
        "completion_tokens": 0 if answer is None else answer.completion_tokens,
    }


@contextmanager
def progress(title: str, total: int) -> Iterator[Progress]:
    """A bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield lambda count: bars.advance(task, count)
