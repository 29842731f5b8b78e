"""What test modules of training share."""

from __future__ import annotations

import pytest
from run_helpers import Materials, make_materials


@pytest.fixture(scope="module")
def materials(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Materials:
    """A tiny model and data for the runs of a module, with the sizes that its MATERIALS asks for."""
    folder = tmp_path_factory.mktemp(request.module.__name__)
    return make_materials(folder, **getattr(request.module, "MATERIALS", {}))
