"""`--eval-generate`: greedy answers to validation prompts at each evaluation of a fine-tuning run,
checked as `eval` checks them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.commands.evaluate.prompts import (
    EvalPrompt,
    find_answer,
    read_prompts,
    same_answer,
    spread_evenly,
    warn_of_other_answers,
)
from finetune.config.run_config import RunConfig
from finetune.data.encoding.spans import ChatTemplate
from finetune.data.reading.files import expand_sources
from finetune.data.records import RecordReader
from finetune.data.report import RecordProblem
from finetune.errors import DataError
from finetune.inference.decoding import BatchDecoding, answering
from finetune.inference.loading import end_ids
from finetune.modeling.model_config import padding_id

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("finetune")


def ask(config: RunConfig, data: Any) -> AskedPrompts:
    """Choose the validation prompts that are answered at each evaluation.

    Args:
        data: what the kind's `prepare` returned.

    Raises:
        DataError: no record has an answer to compare with, or none of the difficulty that
            `--best-metric` follows.
    """
    field = config.answer_field
    difficulties = config.curriculum.levels if config.use_curriculum else None
    files = []
    for file in expand_sources(config.held_out):
        reader = RecordReader(difficulties, config.difficulty_field, file.source, config.on_media)
        files.append((file.path, reader))
    records = np.unique(data.valid.record_ids).tolist()
    found = read_prompts(files, field, records)
    prompts = [prompt for prompt in found if prompt.answer is not None]
    if not prompts:
        raise DataError(
            f"no validation record has '{field}', the answer that a generated one is compared with",
            f"--eval-generate {config.eval_generate}",
            "give validation records with it (docs/guides/evaluation.md), name their field by"
            " --answer-field, or leave --eval-generate out",
        )
    assert config.eval_generate is not None
    names = sorted({str(prompt.difficulty) for prompt in prompts})
    numbers = np.array([names.index(str(prompt.difficulty)) for prompt in prompts])
    chosen = [prompts[position] for position in spread_evenly(numbers, config.eval_generate)]
    if len(chosen) < config.eval_generate:
        logger.warning("only %d validation records have '%s': all are asked", len(chosen), field)
    metric, _, followed = config.best_metric.partition("/")
    answered = {prompt.difficulty for prompt in chosen}
    if metric == "exact_match" and followed and followed not in answered:
        raise DataError(
            f"no validation record of difficulty {followed!r} is answered, so no evaluation has"
            f" {config.best_metric}",
            "--best-metric",
            f"add such records with '{field}' to --valid-data, or take another metric",
        )
    warn_of_other_answers(chosen, field)
    return AskedPrompts(
        chosen, data.tokenizer, cutoff_len=config.cutoff_len, max_new_tokens=config.max_new_tokens
    )


@dataclass(frozen=True)
class _Asked:
    """A prompt as token ids, and the maximum tokens of its answer."""

    prompt: EvalPrompt
    ids: list[int]
    max_new_tokens: int


class AskedPrompts:
    """Prompts that are answered at each evaluation.

    Args:
        cutoff_len: maximum tokens of a prompt with its answer, as in training.
        max_new_tokens: maximum tokens of an answer.
    """

    def __init__(
        self,
        prompts: Sequence[EvalPrompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        cutoff_len: int,
        max_new_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.total = len(prompts)
        self.difficulties = [prompt.difficulty for prompt in prompts]
        self.asked: list[_Asked] = []
        for prompt in prompts:
            ids = self._ids(prompt)
            if len(ids) < cutoff_len:
                self.asked.append(_Asked(prompt, ids, min(max_new_tokens, cutoff_len - len(ids))))
        # Batches of similar lengths need less padding.
        self.asked.sort(key=lambda one: len(one.ids))
        self.too_long = self.total - len(self.asked)
        if self.too_long:
            logger.warning(
                "%d prompts leave no room for an answer in %d tokens and count as wrong (fix: a"
                " larger --cutoff-len)",
                self.too_long,
                cutoff_len,
            )

    def _ids(self, prompt: EvalPrompt) -> list[int]:
        """Return the token ids that training has before the answer."""
        template = ChatTemplate(self.tokenizer).with_tools(prompt.tools)
        try:
            text = template.render(prompt.turns, generation_prompt=True)
        except RecordProblem as problem:
            raise DataError(
                f"the chat template does not take the turns before the last answer: {problem}",
                f"validation record {prompt.record}",
                "take it out, or train with another --template",
            ) from problem
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def __call__(
        self,
        wrapped: torch.nn.Module,
        model: PreTrainedModel,
        *,
        rank: int,
        world_size: int,
        tokens_at_once: int,
        gather: Callable[[object], list[Any]],
        going: Callable[[bool], bool],
    ) -> dict[str, float]:
        """Answer the prompts on all ranks and measure the answers. Collective: every rank must call
        it.

        Args:
            wrapped: `model` as training calls it.
            tokens_at_once: maximum tokens of prompts and answers in a batch, unless one alone has
                more.
            gather: returns every rank's JSON value, by rank.
            going: as for `BatchDecoding`.

        Returns:
            The metrics, the same on every rank.
        """
        eos = model.config.get_text_config().eos_token_id
        stop_ids = end_ids(self.tokenizer, model.generation_config, eos)
        pad_id = padding_id(model.config, self.tokenizer)
        checked: list[list[Any]] = []
        with answering(wrapped, model):
            for turn in self._turns(world_size, tokens_at_once):
                batch = turn[rank::world_size]
                # Under ZeRO-3 all ranks must make the same number of forwards, so a rank without
                # prompts takes part.
                prompts = [one.ids for one in batch] or [[pad_id]]
                maximums = [one.max_new_tokens for one in batch] or [0]
                decoding = BatchDecoding(wrapped, prompts, maximums, stop_ids, going)
                answers = decoding.run(model, pad_id)
                for one, ids in zip(batch, answers, strict=False):
                    text = self.tokenizer.decode(ids, skip_special_tokens=True)
                    assert one.prompt.answer is not None
                    correct = same_answer(find_answer(text), one.prompt.answer)
                    checked.append([one.prompt.difficulty, correct, ids[-1] in stop_ids])
        return self._metrics(sum(gather(checked), []))

    def _turns(self, world_size: int, tokens_at_once: int) -> list[list[_Asked]]:
        """Split the prompts into turns; each rank takes every `world_size`-th prompt of a turn."""
        turns: list[list[_Asked]] = []
        start = 0
        while start < len(self.asked):
            count = world_size
            while start + count < len(self.asked):
                more = self.asked[start : start + count + world_size]
                longest_prompt = max(len(one.ids) for one in more)
                longest = longest_prompt + max(one.max_new_tokens for one in more)
                if longest * (count // world_size + 1) > tokens_at_once:
                    break
                count += world_size
            turns.append(self.asked[start : start + count])
            start += count
        return turns

    def _metrics(self, checked: Sequence[Sequence[Any]]) -> dict[str, float]:
        """Return the metrics of all answers: difficulty, whether correct, whether ended. Prompts
        without an answer count as wrong.
        """
        metrics = {"exact_match": sum(correct for _, correct, _ in checked) / self.total}
        for name in dict.fromkeys(self.difficulties):
            if name is not None:
                found = sum(correct for difficulty, correct, _ in checked if difficulty == name)
                metrics[f"exact_match/{name}"] = found / self.difficulties.count(name)
        metrics["answers"] = self.total
        metrics["answers_cut"] = sum(not ended for _, _, ended in checked)
        metrics["prompts_too_long"] = self.too_long
        return metrics
