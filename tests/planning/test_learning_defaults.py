"""Learning rate and batch where they are auto: the law, what wins over it, and the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import make_data, make_materials

from finetune import run
from finetune.config.run_config import AUTO_BATCHES, RunConfig
from finetune.errors import ConfigError, FinetuneError
from finetune.planning.learning_defaults import STEPS, learning_defaults, with_batch_of_data


def config(**settings: Any) -> RunConfig:
    return RunConfig(model="m", data="d.jsonl", output_dir="runs/x", **settings)


def derived(width: int = 1024, samples: int = 10_000, **settings: Any) -> dict[str, Any]:
    return dict(learning_defaults(config(**settings), width=width, samples=samples).values)


def test_what_is_given_stays() -> None:
    both = {"learning_rate": 1e-3, "global_batch_size": 12}
    none = learning_defaults(config(**both), width=8, samples=9)
    assert (none.values, none.reason) == ({}, "")
    assert derived(learning_rate=1e-3).keys() == {"global_batch_size"}
    assert derived(global_batch_size=12).keys() == {"learning_rate"}
    with pytest.raises(ConfigError, match="no hidden_size"):
        learning_defaults(config(), width=None, samples=9)
    given = learning_defaults(config(learning_rate=1e-3), width=None, samples=9)
    assert given.values == {"global_batch_size": 8}
    begun = {"global_batch_size": 8, "learning_rate": 1e-3, "lora_r": 4}
    found = learning_defaults(config(), width=1024, samples=10**6, begun=begun)
    assert dict(found.values) == {"global_batch_size": 8, "learning_rate": 1e-3}
    assert "began" in found.reason
    given = learning_defaults(config(learning_rate=2e-3), width=1024, samples=10**6, begun=begun)
    assert dict(given.values) == {"global_batch_size": 8}


@given(
    samples=st.integers(1, 10**6),
    epochs=st.floats(0.1, 20),
    micro=st.sampled_from(["auto", 1, 2, 3, 5, 8, 12, 48]),
)
def test_the_batch_leaves_steps_to_learn_in(samples: int, epochs: float, micro: int | str) -> None:
    """Whatever the microbatch is, which is lowered where it does not divide the batch."""
    found = derived(samples=samples, num_epochs=epochs, micro_batch_size=micro)
    batch = found["global_batch_size"]
    assert batch in AUTO_BATCHES
    if batch > AUTO_BATCHES[0]:
        assert samples * epochs / batch >= STEPS
    if batch < AUTO_BATCHES[-1]:
        assert samples * epochs / (2 * batch) < STEPS
    if micro != "auto":
        size = found.get("micro_batch_size", micro)
        assert batch % size == 0 and size <= micro and (size == micro or batch % micro)


def test_the_plan_has_the_batch_of_the_data(tmp_path: Path) -> None:
    """That of a run on as many samples; without data here, auto stays."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"instruction": "q", "output": "a"}\n' * 5000)
    settings = {"model": "m", "output_dir": "o", "num_epochs": 1.0, "micro_batch_size": 12}
    planned = with_batch_of_data(RunConfig(data=str(data), **settings))
    assert (planned.global_batch_size, planned.micro_batch_size) == (16, 8)
    assert planned.learning_rate == "auto"
    for elsewhere in ("hub:owner/name", "not-said"):
        assert with_batch_of_data(RunConfig(data=elsewhere, **settings)).global_batch_size == "auto"


def test_the_rate_falls_with_the_width_and_is_a_tenth_for_full_training() -> None:
    rates = {
        how: [derived(w, finetuning=how)["learning_rate"] for w in (256, 1024, 4096)]
        for how in ("lora", "full")
    }
    for values in rates.values():
        assert values == sorted(values, reverse=True)
        assert values[0] / values[1] == pytest.approx(4**0.78, rel=0.05)
    assert rates["lora"][2] / rates["full"][2] == pytest.approx(10, rel=0.05)


def test_an_adapter_that_is_scaled_up_takes_a_lower_rate() -> None:
    """A step of Adam changes B A by the rate, the scale and the rank: the product is the same."""
    plain = derived()["learning_rate"]
    assert derived(lora_r=64, lora_alpha=32)["learning_rate"] == plain
    # alpha is twice the rank
    assert derived(lora_r=64)["learning_rate"] == pytest.approx(plain / 4, rel=0.05)
    assert derived(lora_r=16, lora_alpha=8, use_rslora=True)["learning_rate"] == plain
    assert derived(lora_plus_ratio=16.0)["learning_rate"] == pytest.approx(plain / 4, rel=0.05)


def test_a_run_is_that_of_the_numbers_it_chose(tmp_path: Path, capsys) -> None:
    """run.yaml, the identity and the console have the numbers; given, they are the same run."""
    opened = dict.fromkeys(("learning_rate", "global_batch_size", "micro_batch_size"))
    settings = make_materials(tmp_path).settings(tmp_path / "open", max_steps=3, **opened)
    chosen = learning_defaults(RunConfig(**settings), width=32, samples=60)
    assert chosen.values.keys() == {"global_batch_size", "learning_rate"}
    run(settings)
    assert chosen.reason in "".join(capsys.readouterr())
    written = yaml.safe_load((tmp_path / "open" / "run.yaml").read_text())
    identity = (tmp_path / "open" / "run_identity.json").read_text()
    for name, value in chosen.values.items():
        assert written[name] == value and str(value) in identity
    for same in ({}, chosen.values, {"micro_batch_size": 16}):  # 8 of it do
        assert run({**settings, **same}).first_step is None  # finished
    rate = chosen.values["learning_rate"]
    with pytest.raises(FinetuneError, match=f"learning_rate: {rate} in the folder, 0.5 now"):
        run({**settings, "learning_rate": 0.5})
    # and keeps them when there is more data
    data = str(make_data(tmp_path / "more.jsonl", 6000))
    assert derived(samples=6000)["global_batch_size"] > written["global_batch_size"]
    assert run({**settings, "data": data, "max_steps": 4, "allow_data_change": True}).steps == 4
    now = yaml.safe_load((tmp_path / "open" / "run.yaml").read_text())
    assert all(now[name] == value for name, value in chosen.values.items())
