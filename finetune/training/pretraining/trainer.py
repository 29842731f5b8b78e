"""Pretraining's trainers: from scratch, whose output is a whole transformers model, and of one that
is continued.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.batching.steps import StepBatches
from finetune.config.pretrain_config import PretrainConfig
from finetune.modeling.pretrained import DTYPES
from finetune.runtime.device import DEVICE_KINDS
from finetune.training.optimizers import make_optimizer, set_matrix_schedule
from finetune.training.pretraining.prepare import PreparedTexts
from finetune.training.trainer import RunParts, RunTrainer, SFTTrainer

logger = logging.getLogger("finetune")

PROMPTS, PROMPT_TOKENS, SAMPLE_TOKENS = 3, 16, 48


class TextTrainer(RunTrainer):
    """Trains on a stream of text: evaluated in bits per byte, and sampled from."""

    settings: PretrainConfig

    def __init__(self, parts: RunParts) -> None:
        assert isinstance(parts.data, PreparedTexts)
        self.bytes_per_token: torch.Tensor | None = None  # int `(vocabulary of the head,)`
        if parts.data.bytes_per_token is not None:
            sizes = np.asarray(parts.data.bytes_per_token)
            # Ids beyond the tokenizer's have no bytes.
            vocabulary = parts.data.model_config.get_text_config().vocab_size
            padded = np.pad(sizes, (0, max(0, vocabulary - len(sizes))))
            self.bytes_per_token = torch.from_numpy(padded)
        super().__init__(parts)

    # ------------------------------------------------------------------ evaluation

    def evaluation(self, step_batches: StepBatches) -> dict[str, float]:
        """Loss per token; and bits per byte, which tokenizers of any vocabulary share.

        Bits per byte: nats of the tokens that stand for text / (ln 2 x bytes of that text). Special
        tokens have no bytes, and their nats do not count.
        """
        nats = text_nats = 0.0
        tokens = text_bytes = 0
        for _, scored in self.scored(step_batches):
            for microbatch, losses in scored:
                precise = losses.cpu().double()
                nats, tokens = nats + float(precise.sum()), tokens + len(microbatch.targets)
                if self.bytes_per_token is not None:
                    sizes = self.bytes_per_token[microbatch.targets]
                    text_nats += float(precise[sizes > 0].sum())
                    text_bytes += int(sizes.sum())
        nats, all_tokens, text_nats, all_bytes = self.session.control.sum(
            [nats, tokens, text_nats, text_bytes]
        )
        metrics = {"loss": nats / all_tokens}
        if all_bytes:
            metrics["bpb"] = text_nats / (math.log(2) * all_bytes)
        return metrics

    # ------------------------------------------------------------------ samples

    def end_of_step(self) -> None:
        super().end_of_step()
        step, every = self.state.global_step, self.settings.sample_every
        due = every and (step % every == 0 or step == self.total_steps)
        if due and self.processing_class is not None and self.is_world_process_zero():
            with self.meter.paused():
                self.print_samples(step, self.processing_class)

    def print_samples(self, step: int, tokenizer: PreTrainedTokenizerBase) -> None:
        """Let the model continue the beginnings of a few windows of the validation data (or else
        the training data).
        """
        windows = (self.eval_step_batches or self.step_batches).samples
        length = self.settings.max_seq_len
        begin = min(PROMPT_TOKENS, length // 2)
        prompts = [windows[i][0][:begin] for i in range(min(PROMPTS, len(windows)))]
        prompt = torch.from_numpy(np.stack(prompts)).long().to(self.args.device)
        temperature = self.settings.sample_temperature
        choice = (
            {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        )
        padding = (
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        )
        # SDPA has neither softcaps nor sinks, which a model from elsewhere may have.
        attention = "sdpa" if self.settings.model is None else "eager"
        # A separate generator state: sampling must not change what training computes.
        with _for_generation(self.model, attention), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed + step)
            generate: Any = self.model.generate  # typed as a tensor: torch's Module has __getattr__
            generated = generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=min(SAMPLE_TOKENS, length - begin),
                pad_token_id=padding or 0,
                **choice,
            )
        texts = [
            (tokenizer.decode(ids[: prompt.shape[1]]), tokenizer.decode(ids[prompt.shape[1] :]))
            for ids in generated
        ]
        for before, after in texts:
            logger.info("sample at step %d: %r -> %r", step, before, after)
        self.session.runlog.event("sample", step=step, samples=[list(pair) for pair in texts])


class PretrainTrainer(TextTrainer):
    """Pretrains from scratch."""

    def __init__(self, parts: RunParts) -> None:
        assert parts.rates is not None
        self.rates = parts.rates
        super().__init__(parts)

    # ------------------------------------------------------------------ optimizer

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(
                self.model,
                self.settings,
                self.rates,
                fused=DEVICE_KINDS[self.settings.device_type].fused_adamw,
                compute_dtype=DTYPES[self.settings.dtype],
            )
        return self.optimizer

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        # Before the step and not in a scheduler: torch's schedulers set learning rates only.
        set_matrix_schedule(
            self.optimizer,
            inputs.step,
            total_steps=self.total_steps,
            warmdown_ratio=self.settings.warmdown_ratio,
            decay=self.rates.decay,
        )
        return super().training_step(model, inputs, num_items_in_batch)

    # ------------------------------------------------------------------ output

    def model_files(self, weights: Callable[[], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
        """Configuration and tokenizer."""
        self._unset_padding()
        # generating samples changes the model's for a while
        config = copy.deepcopy(self.model.config)
        # No code in a checkpoint: that of lfm2_value goes with the model itself.
        config._auto_class = None  # type: ignore[misc]

        def write(folder: Path) -> None:
            config.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

        return write

    def output_weights(self) -> dict[str, torch.Tensor]:
        return self.whole_weights(None)

    def write_output(
        self, folder: Path, weights: dict[str, torch.Tensor], saved: Path | None
    ) -> None:
        self._unset_padding()
        self.model.save_pretrained(folder, state_dict=weights)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _unset_padding(self) -> None:
        # Trainer copies the tokenizer's pad token into the model's configuration, where it would
        # become a padding_idx, an embedding that does not train, in everything that is trained from
        # this model.
        self.model.config.pad_token_id = None


class ContinuedTrainer(TextTrainer, SFTTrainer):
    """Continues a model's pretraining: AdamW and output (a model or an adapter) are those of
    fine-tuning.
    """


@contextlib.contextmanager
def _for_generation(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Prepare the model for generation, and restore it on exit.

    Within the block it is uncompiled, uses an attention whose masks support a cache, and has no
    dropout.
    """
    before, training, compiled = (
        model.config._attn_implementation,
        model.training,
        model._compiled_call_impl,
    )
    model._compiled_call_impl = None
    model.set_attn_implementation(attention)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)
        model._compiled_call_impl = compiled
