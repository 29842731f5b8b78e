"""Warnings and progress bars of libraries that say nothing to a user of ours, each named exactly, with its reason."""

from __future__ import annotations

import warnings

# (message pattern, category, why it is no news)
KNOWN = (
    # DeepSpeed 0.19.8 calls them by their old names, hundreds of times a step under ZeRO-3.
    (r"`torch\.distributed\.all_gather_into_tensor` is deprecated", FutureWarning),
    (r"`torch\.distributed\.reduce_scatter_tensor` is deprecated", FutureWarning),
    # accelerate 1.15 and transformers 5.23 know no other name for it; a model here has no buffers that ranks change.
    (r"`broadcast_buffers` is deprecated", FutureWarning),
    # peft 0.21 asks transformers 5.23 by the old name, once per model.
    (r"`is_gradient_checkpointing` is deprecated", FutureWarning),
)


def quiet_known_warnings() -> None:
    """Filter the warnings above, and transformers' bar for reading weights (the run has its own progress)."""
    from transformers.utils import logging as transformers_logging

    for message, category in KNOWN:
        warnings.filterwarnings("ignore", message=message, category=category)
    transformers_logging.disable_progress_bar()
