from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: for tests that make hundreds of small files and learn nothing from a disk's speed."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    # Not named after aionn: a run of the tests beside this one counts what aionn leaves there.
    where = Path(tempfile.mkdtemp(prefix="cache-of-test-", dir=shared))
    yield where
    shutil.rmtree(where)
