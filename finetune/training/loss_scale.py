"""float16's loss scale, as a checkpoint keeps it: the same for torch's GradScaler and DeepSpeed's
DynamicLossScaler.

A run that forgot it would begin again at 65,536 and skip steps until it has come down: other steps
than the run that went on. Both double the scale after so many steps without overflow (a window) and
halve it at one; DeepSpeed may let a few overflows pass first (hysteresis).
"""

from __future__ import annotations

from typing import Any


def read_scale(scaler: Any, engine: Any) -> dict[str, float] | None:
    """The scale and the steps since it was last changed or an overflow seen; None where there is no
    scale.

    Args:
        scaler: torch.amp.GradScaler; None without one.
        engine: DeepSpeed's engine; None without DeepSpeed.
    """
    if scaler is not None:
        state = scaler.state_dict()
        return (
            {"scale": float(state["scale"]), "good_steps": int(state["_growth_tracker"])}
            if state
            else None
        )
    dynamic = _dynamic(engine)
    if dynamic is None:
        return None
    return {
        "scale": float(dynamic.cur_scale),
        "good_steps": int(dynamic.cur_iter - dynamic.last_overflow_iter - 1),
        "hysteresis": int(dynamic.cur_hysteresis),
    }


def restore_scale(saved: dict[str, float] | None, scaler: Any, engine: Any) -> None:
    """Set what `read_scale` returned, wherever it was read."""
    if saved is None:
        return
    if scaler is not None and (state := scaler.state_dict()):
        good_steps = int(saved["good_steps"]) % int(state["growth_interval"])
        scaler.load_state_dict(state | {"scale": saved["scale"], "_growth_tracker": good_steps})
    dynamic = _dynamic(engine)
    if dynamic is not None:
        dynamic.cur_scale = saved["scale"]
        dynamic.last_overflow_iter, dynamic.cur_iter = -1, int(saved["good_steps"])
        dynamic.cur_hysteresis = int(saved.get("hysteresis", dynamic.delayed_shift))


def _dynamic(engine: Any) -> Any:
    if engine is None or not engine.fp16_enabled():
        return None
    scaler = engine.optimizer.loss_scaler
    return scaler if scaler.dynamic else None  # one that the user has fixed has no state
