from __future__ import annotations

import pytest

from tests.adapters.wyoming.satellites import Recording


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Recording(tmp_path_factory.mktemp("recording"))
