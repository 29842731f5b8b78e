"""requirements.lock holds all that `make demo` and `make test` install, except torch and what comes
with its build.
"""

from __future__ import annotations

import re
from importlib import metadata

from launching import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from finetune.commands.doctor.versions import own_requirements

LOCK = (ROOT / "requirements.lock").read_text()
# A wheel of torch for CUDA needs these; one for the CPU none of them.
TORCH_BUILD = re.compile(r"torch|triton|cuda-.+|nvidia-(?!ml-py$).+")


def entries(lock: str) -> list[tuple[Requirement, list[str]]]:
    """The pinned requirements of a lock, each with its hashes."""
    lines = (line for line in lock.replace("\\\n", "").splitlines() if not line.startswith("#"))
    split = (re.split(r" +--hash=", line) for line in lines)
    return [(Requirement(pinned), [one.strip() for one in hashes]) for pinned, *hashes in split]


def reached_versions() -> dict[str, str]:
    """What is installed and needed, directly or not, by the package and the tests, without torch's
    build.
    """
    found = {name: metadata.version(name) for name in ("pip", "setuptools", "wheel")}
    waiting, seen = own_requirements(("deepspeed", "dev")), set()
    while waiting:
        one = waiting.pop()
        name, extras = canonicalize_name(one.name), frozenset({"", *one.extras})
        if (name, extras) in seen or (name != "torch" and TORCH_BUILD.fullmatch(name)):
            continue
        seen.add((name, extras))
        found[name] = metadata.version(name)
        for need in map(Requirement, metadata.requires(name) or []):
            marker = need.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(need)
    del found["torch"]
    return found


def test_all_that_is_needed_is_locked_as_installed():
    here = [pair for pair in entries(LOCK) if not pair[0].marker or pair[0].marker.evaluate()]
    locked = {canonicalize_name(one.name): str(one.specifier) for one, _ in here}
    assert locked == {name: f"=={version}" for name, version in reached_versions().items()}


def test_the_lock_is_the_same_on_every_machine():
    assert "//" not in LOCK and not re.search(r"^-", LOCK, re.M), "no registry, no path, no option"
    for one, hashes in entries(LOCK):
        assert not TORCH_BUILD.fullmatch(one.name), "its wheel differs from machine to machine"
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), (
            one.name
        )
