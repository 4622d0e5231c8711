"""What tests of a fleet share: an empty keyring, and stores (a folder, memory, a bucket of a fake S3 server)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aionn.caching import keyring as keyrings
from aionn.fleet.artifact_store import ArtifactStore
from aionn.fleet.requests import open_address
from tests.fleet.fake_s3 import FakeS3, fake_s3

PATIENCE_S = 20.0  # far beyond what a busy machine needs; tests of a dead store give their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/fleet/" in item.path.as_posix():
            item.add_marker(pytest.mark.own_process("fleet"))  # the stores start threads of tokio that never end


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The keyring of this user, empty."""
    folder = tmp_path / "trusted"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", str(folder))
    monkeypatch.delenv("AIONN_ADOPT", raising=False)
    monkeypatch.setattr(keyrings, "_warned", set())
    return folder


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    """A fake S3 server, which this process's stores use."""
    with fake_s3() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(params=["folder", "memory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    """An empty store of each kind."""
    if request.param == "bucket":
        request.getfixturevalue("s3")
    address = {"folder": os.fspath(tmp_path / "store"), "memory": "memory://", "bucket": "s3://artifacts/fleet"}[request.param]
    return ArtifactStore(open_address(address, patience_s=PATIENCE_S, make=True))
