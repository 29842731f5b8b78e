"""Held-out records: their samples and prompts, prepared once, and a model's losses and answers."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.batching.steps import AnswerBatches, StepBatches
from finetune.commands.evaluate.measure_loss import progress, sample_sums
from finetune.commands.evaluate.options import GENERATIONS_NAME, EvalOptions
from finetune.commands.evaluate.prompts import (
    EvalPrompt,
    find_answer,
    find_difficulties,
    has_pairs,
    read_prompts,
    same_answer,
    spread,
    warn_of_other_answers,
)
from finetune.commands.evaluate.scores import ModelScores, ratios
from finetune.config.fields import as_sources, with_common
from finetune.data.dataset import prepare_samples
from finetune.data.preference.reader import reader_of
from finetune.data.reading.files import expand_sources
from finetune.data.samples import PreferenceSamples
from finetune.inference.answer import Answer, AnswerStream
from finetune.inference.generation import Generator, PromptTooLong
from finetune.inference.sampling import Sampling
from finetune.storage.run_log import JsonLines

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("finetune")

DEFAULT_CUTOFF_TOKENS = 2048  # as in training
BATCHES_IN_FLIGHT = 4  # so that the engine always has a next batch


class HeldOutRecords:
    """The samples and prompts of `--data`.

    Args:
        run: settings of the run that made the model, for what the options leave open; may be empty.

    Raises:
        FinetuneError: data, template or tokenizer are wrong.
    """

    def __init__(
        self, options: EvalOptions, tokenizer: PreTrainedTokenizerBase, run: Mapping[str, Any]
    ) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.cutoff_len = options.cutoff_len or run.get("cutoff_len") or DEFAULT_CUTOFF_TOKENS
        field = options.difficulty_field or run.get("difficulty_field") or "difficulty"
        levels = (run.get("curriculum") or {}).get("levels") or ()
        sources = with_common(as_sources(options.data), options.columns)
        paths = [file.path for file in expand_sources(sources)]
        difficulties = find_difficulties(paths, field, list(map(str, levels))) or None
        preference = "pairs" if has_pairs(paths[0], sources[0].columns) else None
        self.samples = prepare_samples(
            sources,
            self.tokenizer,
            cutoff_len=self.cutoff_len,
            difficulties=difficulties,
            difficulty_field=field,
            on_bad_row=options.on_bad_row,
            on_media=options.on_media,
            train_thinking=run.get("train_thinking") is not False,
            cache_dir=options.cache_dir,
            preference=preference,
        )
        self.chosen = spread(self.samples.difficulties, options.max_samples)
        records = np.unique(self.samples.record_ids[self.chosen]).tolist()
        # All sources have the same columns.
        reader = reader_of(preference)(difficulties, field, sources[0], options.on_media)
        files = [(path, reader) for path in paths]
        self.prompts = _choose(read_prompts(files, options.answer_field, records), options.generate)
        warn_of_other_answers(self.prompts, options.answer_field)

    def facts(self) -> dict[str, Any]:
        """Return what is evaluated, as JSON without a path of this machine."""
        return {
            "files": [Path(path).name for path in self.options.data],
            "fingerprint": self.samples.fingerprint,
            "samples": len(self.chosen),
            "questions": len(self.prompts),
        }

    def measure(self, scores: ModelScores, model: PreTrainedModel) -> None:
        """Add losses and answers; each answer is a line of generations.jsonl.

        Raises:
            FinetuneError: one sample alone does not fit into the device's memory, or an answer
                failed.
        """
        self._add_losses(scores, model)
        output = self.options.output
        writer = None if output is None else JsonLines(output / GENERATIONS_NAME)
        try:
            if self.prompts:
                self._add_answers(scores, model, writer)
        finally:
            if writer is not None:
                writer.close()

    def _add_losses(self, scores: ModelScores, model: PreTrainedModel) -> None:
        samples = self.samples
        chosen = self.chosen
        pairs = isinstance(samples, PreferenceSamples)
        # the chosen answers' targets, if the samples are pairs
        targets = (samples.first_supervised if pairs else samples.supervised_counts)[chosen]  # type: ignore[attr-defined]
        with progress(f"{scores.name}: loss", len(chosen)) as advance:
            sums = sample_sums(
                model,
                samples,
                chosen,
                AnswerBatches if pairs else StepBatches,
                pad_token_id=self.tokenizer.pad_token_id,
                on_progress=advance,
            )
        names = (*samples.difficulty_names, None)
        numbers = samples.difficulties[chosen] % len(names)  # -1, no difficulty, is the last name
        for number, name in enumerate(names):
            members = numbers == number
            score = scores.of(name)
            score.samples = int(members.sum())
            score.targets = int(targets[members].sum())
            score.loss_sum, preferred, margin = sums[members].sum(axis=0).tolist()
            if pairs:
                score.pairs = score.samples
                score.preferred = int(preferred)
                score.margin_sum = margin
        difficulties = [names[number] for number in numbers]
        records = samples.record_ids[chosen]
        scores.measures += ratios("loss", difficulties, sums[:, 0], targets, records)
        if pairs:
            ones = np.ones(len(chosen))
            scores.measures += ratios("accuracy", difficulties, sums[:, 1], ones, records)
            scores.measures += ratios("margin", difficulties, sums[:, 2], ones, records)

    def _add_answers(
        self, scores: ModelScores, model: PreTrainedModel, writer: JsonLines | None
    ) -> None:
        difficulties = []
        correct = []
        reasons: Counter[str] = Counter()
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
            for prompt, answer in _answers(generator, self.prompts, self.options.max_new_tokens):
                record = _generation(generator, prompt, answer)
                reasons[record["finish_reason"]] += 1
                if prompt.answer is not None:
                    score = scores.of(prompt.difficulty)
                    score.answered += 1
                    score.correct += record["correct"]
                    difficulties.append(prompt.difficulty)
                    correct.append(float(record["correct"]))
                if writer is not None:
                    writer.write({"model": scores.name, **record})
                advance(1)
        if cut := reasons["length"]:
            logger.warning(
                "%s: %d of %d answers were cut off "
                "(fix: a larger --max-new-tokens, if the model does end its answers)",
                scores.name, cut, len(self.prompts),
            )  # fmt: skip
        if too_long := reasons["prompt_too_long"]:
            logger.warning(
                "%s: %d prompts leave no room for an answer in %d tokens and count as wrong",
                scores.name, too_long, generator.context_tokens,
            )  # fmt: skip
        if correct:
            ones = np.ones(len(correct))
            scores.measures += ratios("exact match", difficulties, np.array(correct), ones)


def _choose(prompts: list[EvalPrompt], generate: int | str) -> list[EvalPrompt]:
    """Return the prompts that `--generate` selects."""
    if generate == "answered":
        return [prompt for prompt in prompts if prompt.answer is not None]
    if generate == "all":
        return prompts
    # prompts whose answer can be checked first
    prompts = sorted(prompts, key=lambda prompt: prompt.answer is None)
    names = [prompt.difficulty for prompt in prompts]
    numbers = np.array([names.index(name) for name in names], dtype=np.int64)
    chosen = [prompts[position] for position in spread(numbers, int(generate))]
    return sorted(chosen, key=lambda prompt: prompt.record)


def _answers(
    generator: Generator, prompts: Sequence[EvalPrompt], max_new_tokens: int
) -> Iterator[tuple[EvalPrompt, Answer | None]]:
    """Answer prompts greedily, several batches in flight, and yield the answers in order; None if
    the prompt leaves no room.

    Raises:
        GenerationError: an answer failed.
    """
    greedy = Sampling(max_new_tokens=max_new_tokens)

    def start(prompt: EvalPrompt) -> tuple[EvalPrompt, AnswerStream | None]:
        try:
            return prompt, generator.stream(prompt.messages, greedy)
        except PromptTooLong:
            return prompt, None

    started = map(start, prompts)  # lazy
    in_flight = deque(islice(started, BATCHES_IN_FLIGHT * generator.limits.max_batch))
    while in_flight:
        prompt, stream = in_flight.popleft()
        answer = None if stream is None else stream.finish()
        in_flight.extend(islice(started, 1))
        yield prompt, answer


def _generation(generator: Generator, prompt: EvalPrompt, answer: Answer | None) -> dict[str, Any]:
    """Return one line of generations.jsonl."""
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
