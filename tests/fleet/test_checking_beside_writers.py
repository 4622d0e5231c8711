"""`aionn fleet verify --remove` beside a writer: what another process puts in the place of a bad object stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.cli import main
from aionn.fleet import content_of, sweeping
from aionn.fleet.artifact_store import ArtifactStore, claimed_files, trusted_files
from aionn.fleet.models import put_model
from aionn.fleet.places import file_path, model_path
from aionn.fleet.requests import open_address
from aionn.fleet.sweeping import Checked, check_store, sweep
from tests.fleet.entries import KEYRING, Artifact, artifact, some_bytes
from tests.fleet.fake_s3 import FakeS3
from tests.fleet.pusher import FILE_BYTES
from tests.scaled_model import scaled_model

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
Writes = Callable[[], Awaitable[str]]
NAME = "a model"


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, s3: FakeS3) -> ArtifactStore:
    """A store that another process can use, too."""
    address = "s3://artifacts/fleet" if request.param == "bucket" else os.fspath(tmp_path / "store")
    return ArtifactStore(open_address(address, patience_s=20.0, make=True))


@pytest.fixture
def pushed() -> Artifact:
    """What the other process pushes."""
    return artifact(NAME, *(some_bytes(index, FILE_BYTES) for index in range(3)), NAME.encode())


@pytest.fixture
def push(store: ArtifactStore) -> Iterator[Writes]:
    """Another process, which pushes when it is called, and says what became of it."""
    command = [sys.executable, "-m", "tests.fleet.pusher", store.address, "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = process.stdout

        async def push() -> str:
            process.stdin.write(f"{NAME}\n")  # type: ignore[union-attr]
            return (await anyio.to_thread.run_sync(said.readline)).strip()

        assert said.readline().strip() == "ready"
        yield push
        process.stdin.close()


async def damage(store: ArtifactStore, one: Artifact, what: str) -> set[str]:
    """Damage an artifact in a store. Return the paths of what no machine can use then."""
    file = file_path(one.files[1][0].digest)
    if what == "a torn file":
        await store.requests.replace(file, one.contents[1][:1000])
        return {file, one.place.path}
    if what == "a missing file":
        await store.requests.remove(file)
        return {one.place.path}
    await store.requests.replace(one.place.path, b"x" * len(one.signed))
    return {one.place.path}


DAMAGES = ("a torn file", "a missing file", "a statement of junk")


async def check(store: ArtifactStore) -> Checked:
    return await check_store(store, trusted_files(KEYRING), remove=True)


def once_before(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, act: Callable[[], Awaitable[object]]) -> None:
    """Have something done at the moment at which a method is called for the first time."""
    original = getattr(owner, method)

    async def then(*arguments: Any) -> Any:
        monkeypatch.setattr(owner, method, original)
        await act()
        return await original(*arguments)

    monkeypatch.setattr(owner, method, then)


MOMENTS = {"between two readings": "find", "before the removal": "remove"}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", DAMAGES)
async def test_what_another_process_mends_stays(
    store: ArtifactStore, pushed: Artifact, push: Writes, what: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pushed.push(store)
    bad = await damage(store, pushed, what)
    said: list[str] = []

    async def mend() -> None:
        said.append(await push())

    once_before(monkeypatch, store.requests if moment == "between two readings" else sweeping._Check, MOMENTS[moment], mend)
    found = await check(store)
    assert said == ["added" if what == "a statement of junk" else "repaired"]
    assert found.removed == 0
    assert {one.path for one in found.bad} == (set() if moment == "between two readings" else bad)
    left = await check(store)
    assert (left.statements, left.files, left.bad) == (1, 4, ())


async def test_a_statement_whose_file_comes_back_after_its_removal_stays(
    store: ArtifactStore, pushed: Artifact, push: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pushed.push(store)
    await damage(store, pushed, "a torn file")
    once_before(monkeypatch, sweeping._Check, "_is_still_caused", push)
    assert (await check(store)).removed == 1
    left = await check(store)
    assert (left.statements, left.files, left.bad) == (1, 4, ())


async def test_what_a_sweep_has_taken_and_another_process_has_pushed_anew_stays(
    store: ArtifactStore, pushed: Artifact, push: Writes, s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damaged file has the right length, so that only a sweep makes the writer write it."""
    await pushed.push(store)
    await store.requests.replace(file_path(pushed.files[1][0].digest), bytes(FILE_BYTES))
    said: list[str] = []

    async def mend() -> None:
        await sweep(store, claimed_files, keep_s=-1.0, grace_s=-1.0)
        said.append(await push())

    once_before(monkeypatch, sweeping._Check, "remove", mend)
    assert ((await check(store)).removed, said) == (0, ["added"])
    left = await check(store)
    assert (left.statements, left.files, left.bad) == (1, 4, ())


async def test_a_model_that_is_written_anew_stays(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the length of the damaged one, and may be written within the same second."""
    model = aionn.Model.from_onnx(scaled_model(np.arange(5000, dtype=np.float32)))
    files = await content_of(model)
    assert files is not None
    writer = ArtifactStore(open_address(store.address, patience_s=20.0))
    await put_model(writer, model.token, files)
    whole = await store.requests.find(model_path(model.token))
    assert whole is not None
    await store.requests.replace(whole.path, bytes(whole.size_bytes))
    once_before(monkeypatch, sweeping._Check, "remove", lambda: put_model(writer, model.token, files, anew=True))
    found = await check(store)
    assert ([one.path for one in found.bad], found.removed) == ([whole.path], 0)
    assert (await check(store)).bad == ()


@pytest.mark.parametrize("how", ["another time", "another file with the same time"])
async def test_a_file_that_changes_in_the_last_moment_is_not_removed_from_a_folder(tmp_path: Path, how: str) -> None:
    store = ArtifactStore(open_address(tmp_path / "store", patience_s=20.0, make=True))
    one = artifact("one", b"contents")
    await one.push(store)
    found = await store.requests.find(one.place.path)
    assert found is not None
    path = tmp_path / "store" / one.place.path
    if how == "another time":
        os.utime(path, ns=(0, 0))
    else:  # as a backup that is restored
        shutil.copy2(path, tmp_path / "copy")
        os.replace(tmp_path / "copy", path)
    assert not await store.requests.remove_found(found)
    assert await store.statement(one.place) == one.signed
    again = await store.requests.find(one.place.path)
    assert again is not None
    assert await store.requests.remove_found(again)
    assert await store.statement(one.place) is None


async def test_the_command_says_what_it_has_not_removed(
    store: ArtifactStore, pushed: Artifact, push: Writes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    await pushed.push(store)
    await damage(store, pushed, "a torn file")
    once_before(monkeypatch, sweeping._Check, "remove", push)
    assert await anyio.to_thread.run_sync(main, ["fleet", "verify", store.address, "--remove"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "2 objects could not serve; 0 removed, and 2 not, because another process has replaced, repaired" in said
    assert await anyio.to_thread.run_sync(main, ["fleet", "verify", store.address]) == 0
