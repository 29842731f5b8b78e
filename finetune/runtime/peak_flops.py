"""What devices can compute at most, by their names."""

from __future__ import annotations

# Dense bfloat16 (float16 on Ascend) operations per second, from the vendors' data sheets; more
# specific names first. 910B3 and 910B4 are an eighth of their servers' figures (Atlas 800T A2,
# Atlas 800I A2).
PEAK_FLOPS = (
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("910B3", 313e12),
    ("910B4", 280e12),
    ("910A", 256e12),
)


def peak_flops(name: str) -> float | None:
    """Peak of a device by its name; None for one that is not in the table."""
    padded = f" {name} ".replace("-", " ").lower()
    return next((flops for known, flops in PEAK_FLOPS if f"{known.lower()} " in padded), None)
