"""What `make demo` counts as right."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from launching import ROOT


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "launchers"))
        import demo

        yield demo
    sys.modules.pop("demo")


def test_a_fact_is_recalled_by_its_key_terms(demo: ModuleType) -> None:
    record = {"instruction": "Which port does SSH use?", "output": "SSH uses TCP port 22."}
    assert demo.key_terms(record["output"]) == {"ssh", "tcp", "port", "22"}
    assert demo.recalls("It is TCP 22.", record)
    assert not demo.recalls("SSH uses TCP port 23.", record)
    assert not demo.recalls("Which port does SSH use?", record)
    chinese = {"instruction": "什么是自治系统？", "output": "自治系统是由同一机构管理的一组网络。"}
    assert demo.recalls("由同一机构管理的一组网络", chinese)
    assert not demo.recalls("自治系统是一组主机。", chinese)
