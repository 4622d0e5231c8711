"""What a device stores and gets back, and that storing never fails or holds up a compilation."""

from __future__ import annotations

import dataclasses
import os
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.caching.blob_cache import BlobCache
from aionn.driver.artifacts import Artifacts, LentHandles
from aionn.driver.device import EngineDevice
from aionn.errors import CallerError, CompilationError, DeadlineError
from aionn.hal import Artifact, CacheFiles, CacheHandles, CompileOptions, Executable, IBlobCache, Model, PrepareOptions
from aionn.hal.model import known_contents
from aionn.testing.fake_engine import FakeEngine
from tests.conformance.test_app_memory import BYTES, two_additions
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio
TOKEN = bytes(32)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("AIONN_FAKE_DEVICE", raising=False)


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(scaled_model(np.arange(1000, dtype=np.float32)))


@pytest.fixture
def handles(tmp_path: Path) -> Iterator[CacheHandles]:
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("model0", "data0")]
    yield CacheHandles((fds[0],), (fds[1],), TOKEN)
    for fd in fds:
        os.close(fd)


class Gate:
    """Lets a test stop an engine's thread at one place and know that it is there."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(30)


class ScriptedEngine(FakeEngine):
    """The fake engine, with an export and a compilation that a test steps through."""

    def __init__(self) -> None:
        super().__init__()
        self.exporting: Callable[[], None] = lambda: None
        self.compiling: Callable[[CompileOptions], None] = lambda options: None
        self.compiled_with: list[CompileOptions] = []
        self.given: Artifact | None = None

    def compile(self, model: Model, options: CompileOptions) -> Any:
        self.compiled_with.append(options)
        self.compiling(options)
        return super().compile(model, options)

    def export(self, executable: Executable) -> Artifact | None:
        self.exporting()
        return super().export(executable)

    def load(self, artifact: Artifact, options: CompileOptions) -> Any:
        self.given = artifact
        return super().load(artifact, options)


@pytest.fixture
async def opened() -> AsyncIterator[tuple[ScriptedEngine, EngineDevice]]:
    engine = ScriptedEngine()
    async with anyio.create_task_group() as tasks:
        device = EngineDevice(engine, tasks)
        yield engine, device
        device.close()


Opened = tuple[ScriptedEngine, EngineDevice]


async def test_an_engine_is_given_exactly_the_bytes_it_exported(opened: Opened, model: aionn.Model, handles: CacheHandles) -> None:
    engine, device = opened
    prepared = await device.prepare_model(model, PrepareOptions(), handles)
    assert prepared.save_outcome == "saved"
    exported = engine.export(engine.compile(model, CompileOptions()))
    loaded = await device.prepare_model_from_cache(PrepareOptions(), handles)
    assert engine.given is not None
    assert exported is not None
    assert [bytes(content) for content in (*engine.given.model, *engine.given.data)] == [*exported.model, *exported.data]
    assert list(loaded.inputs.items()) == list(model.inputs.items())
    assert list(loaded.outputs.items()) == list(model.outputs.items())


def test_a_known_executable_is_returned_only_for_files_that_are_verified(model: aionn.Model, handles: CacheHandles) -> None:
    engine = ScriptedEngine()
    artifacts = Artifacts(engine)
    assert artifacts.save(engine.compile(model, CompileOptions(may_export=True)), model, handles) == "saved"
    first = artifacts.load(handles, CompileOptions())
    engine.given = None
    assert artifacts.load(handles, CompileOptions(), {first.digests: first}) is first
    assert engine.given is None  # the engine loads nothing
    again = artifacts.load(handles, CompileOptions(), {b"another": first})
    assert again is not first
    assert (again.digests, again.description) == (first.digests, first.description)
    (byte,) = os.pread(handles.data[0], 1, 0)
    os.pwrite(handles.data[0], bytes([byte ^ 1]), 0)
    with pytest.raises(CompilationError, match="wrong_bytes"):
        artifacts.load(handles, CompileOptions(), {first.digests: first})
    artifacts.close()


def test_what_an_engine_exports_is_digested_and_written_where_it_lies(
    model: aionn.Model, handles: CacheHandles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the first file, to which the description is added, would need the memory of the weights twice."""
    exported, written = np.arange(1000, dtype=np.uint8), list[tuple[memoryview, ...]]()
    engine = ScriptedEngine()
    monkeypatch.setattr(engine, "export", lambda executable: Artifact((exported,), (b"data",)))
    monkeypatch.setattr("aionn.caching.integrity.write_whole", lambda fd, *pieces: written.append(pieces))
    artifacts = Artifacts(engine)
    assert artifacts.save(engine.compile(model, CompileOptions(may_export=True)), model, handles) == "saved"
    (first, description), _ = written
    assert np.shares_memory(np.frombuffer(first, np.uint8), exported)
    assert int.from_bytes(description[-8:], "little") == len(description) - 8
    artifacts.close()


@pytest.mark.parametrize("said", [True, False], ids=["the_client_says_what_they_were", "it_does_not"])
async def test_weights_that_change_while_they_are_compiled_are_stored_as_they_were_digested(
    opened: Opened, handles: CacheHandles, said: bool
) -> None:
    engine, device = opened
    with aionn.Memory.allocate(2 * BYTES) as memory:
        read = aionn.Model.from_onnx(two_additions(0, BYTES), memories={"weights": memory})
        assert known_contents(read)
        model = read if said else dataclasses.replace(read, _contents=b"")
        engine.compiling = lambda options: memory.view().__setitem__(0, 1)
        prepared = await device.prepare_model(model, PrepareOptions(), handles)
        assert prepared.save_outcome == "saved"
        assert memory.view()[0] == 1
        await device.prepare_model_from_cache(PrepareOptions(), handles)
        assert engine.given is not None
        assert bytes(engine.given.data[0]) == bytes(2 * BYTES)


@pytest.mark.parametrize("declines", [True, False], ids=["declined", "exported"])
async def test_weights_that_have_changed_before_they_are_compiled_are_not_stored(
    opened: Opened, handles: CacheHandles, declines: bool
) -> None:
    engine, device = opened
    with aionn.Memory.allocate(2 * BYTES) as memory:
        model = aionn.Model.from_onnx(two_additions(0, BYTES), memories={"weights": memory})
        memory.view()[0] = 1
        if declines:
            engine.export = lambda executable: None  # type: ignore[method-assign]
        prepared = await device.prepare_model(model, PrepareOptions(), handles)
        assert prepared.save_outcome.startswith("changed_weights: ")
        assert [os.fstat(fd).st_size for fd in (*handles.model, *handles.data)] == [0, 0]
        assert [options.may_export for options in engine.compiled_with] == [False]
        memory.view()[0] = 0
        again = await device.prepare_model(model, PrepareOptions(), handles)
        assert again.save_outcome == ("declined" if declines else "saved")


async def test_a_device_asks_for_the_files_its_engine_does(model: aionn.Model) -> None:
    for files in (CacheFiles(32, 32), CacheFiles(0, 1), CacheFiles(0, 0), CacheFiles(33, 0)):
        engine = FakeEngine()
        engine.cache_files = files
        assert Artifacts(engine).files == files


async def test_nothing_is_prepared_for_an_export_that_nobody_wants(opened: Opened, model: aionn.Model, handles: CacheHandles) -> None:
    engine, device = opened
    await device.prepare_model(model, PrepareOptions())
    await device.prepare_model(model, PrepareOptions(), handles)
    assert [options.may_export for options in engine.compiled_with] == [False, True]


async def test_a_save_that_is_late_is_reported_and_the_model_is_prepared_all_the_same(
    opened: Opened, model: aionn.Model, handles: CacheHandles
) -> None:
    engine, device = opened
    gate = Gate()
    engine.exporting = gate.pass_through
    deadline_ns = time.monotonic_ns() + 2_000_000_000  # the save is given half of it: a loaded machine compiles in the other half
    prepared = await device.prepare_model(model, PrepareOptions(deadline_ns=deadline_ns), handles)
    assert prepared.save_outcome.startswith("too_slow")
    gate.open()


async def test_an_abandoned_save_never_writes_into_a_file_that_took_its_descriptors_number(
    opened: Opened, model: aionn.Model, tmp_path: Path
) -> None:
    engine, device = opened
    gate = Gate()
    engine.exporting = gate.pass_through
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("model0", "data0")]
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(device.prepare_model, model, PrepareOptions(), CacheHandles((fds[0],), (fds[1],), TOKEN))
            await anyio.to_thread.run_sync(gate.reached.wait)
            scope.cancel()
    # The client closes its descriptors, and the numbers come to stand for other files of its own.
    for index, fd in enumerate(fds):
        other = os.open(tmp_path / f"other{index}", os.O_RDWR | os.O_CREAT, 0o600)
        os.write(other, b"precious")
        os.dup2(other, fd)
        os.close(other)
    gate.open()
    await anyio.to_thread.run_sync(lambda: wait_until(lambda: (tmp_path / "data0").stat().st_size > 0))
    for fd in fds:
        assert os.pread(fd, 100, 0) == b"precious"
        os.close(fd)


async def test_what_comes_after_the_closing_is_refused_and_opens_nothing(model: aionn.Model, handles: CacheHandles, tmp_path: Path) -> None:
    engine = FakeEngine()
    executable = engine.compile(model, CompileOptions(may_export=True))
    artifacts = Artifacts(engine)
    artifacts.close()
    assert artifacts.save(executable, model, handles) == "io_error: the device is closed"
    with pytest.raises(CompilationError, match="the device is closed"):
        artifacts.load(handles, CompileOptions())
    assert not (tmp_path / "state").exists()


def wait_until(true: Callable[[], bool]) -> None:
    """Wait, in a thread, for what another thread does to a file."""
    give_up_at = time.monotonic() + 30
    while not true():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def test_lent_handles_are_closed_once_whoever_is_first() -> None:
    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    fd = os.memfd_create("lent")
    before = open_now()
    lent = LentHandles(CacheHandles((fd,), (), TOKEN))
    assert open_now() == before + 1
    assert lent.during(lambda handles: handles.model[0]) != fd
    lent.release()
    assert open_now() == before
    lent = LentHandles(CacheHandles((fd, -1, 10**6), (), TOKEN))
    lent.release()
    lent.release()
    with pytest.raises(CallerError, match="given up"):
        lent.during(lambda handles: None)
    assert open_now() == before
    os.close(fd)


async def test_an_engine_that_compiles_only_without_its_artifact_compiles(
    opened: Opened, model: aionn.Model, handles: CacheHandles
) -> None:
    engine, device = opened

    def full(options: CompileOptions) -> None:
        if options.may_export:
            raise OSError(28, "No space left on device")

    engine.compiling = full
    prepared = await device.prepare_model(model, PrepareOptions(), handles)
    assert prepared.save_outcome.startswith("io_error")
    assert "No space left" in prepared.save_outcome
    with pytest.raises(CompilationError):
        await device.prepare_model_from_cache(PrepareOptions(), handles)


async def test_the_deadline_of_a_preparation_is_told_as_such_however_early_the_timer(
    opened: Opened, model: aionn.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, device = opened
    gate = Gate()
    engine.compiling = lambda options: gate.pass_through()
    now_ns = time.monotonic_ns()
    # A loop's timer may go off while the clock still stands before the deadline: here it always does.
    monkeypatch.setattr("aionn.driver.device.time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    try:
        with pytest.raises(DeadlineError, match="had not prepared the model by the deadline"):
            await device.prepare_model(model, PrepareOptions(deadline_ns=now_ns + 50_000_000))
        assert engine.compiled_with[0].cancelled.is_set()
    finally:
        gate.open()


async def test_a_model_that_cannot_be_compiled_is_told_once(opened: Opened, model: aionn.Model, handles: CacheHandles) -> None:
    engine, device = opened

    def bad(options: CompileOptions) -> None:
        raise CompilationError("node x is bad", node="x")

    engine.compiling = bad
    with pytest.raises(CompilationError, match="node x"):
        await device.prepare_model(model, PrepareOptions(), handles)
    assert len(engine.compiled_with) == 1


@pytest.mark.parametrize("wrong", [None, "text", 7], ids=str)
async def test_an_export_of_no_bytes_fails_the_save_alone(
    opened: Opened, model: aionn.Model, handles: CacheHandles, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, device = opened
    monkeypatch.setattr(engine, "export", lambda executable: Artifact((wrong,), (b"",)))
    prepared = await device.prepare_model(model, PrepareOptions(), handles)
    assert prepared.save_outcome.startswith("io_error")


async def test_an_export_that_raises_fails_the_save_alone(opened: Opened, model: aionn.Model, handles: CacheHandles) -> None:
    engine, device = opened

    def broken() -> None:
        raise RuntimeError("failed on demand")

    engine.exporting = broken
    prepared = await device.prepare_model(model, PrepareOptions(), handles)
    assert prepared.save_outcome == "io_error: the engine's export failed (RuntimeError: failed on demand)"


async def test_onnxruntime_without_memory_for_its_artifact_compiles_and_stores_nothing(
    orientation_path: Path, handles: CacheHandles
) -> None:
    """It writes its artifact while it compiles, 6.8 MB of it here."""
    from aionn.engines.onnxruntime import OnnxRuntimeEngine

    model = aionn.Model.from_onnx(orientation_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with anyio.create_task_group() as tasks:
        device = EngineDevice(OnnxRuntimeEngine(), tasks)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            prepared = await device.prepare_model(model, PrepareOptions(), handles)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert prepared.save_outcome.startswith("io_error: it compiles only without an artifact")
        assert "Failed to write" in prepared.save_outcome
        await prepared.aclose()
        device.close()


class RememberingEngine(FakeEngine):
    """Counts its compilations and loads in the blob cache of its device. Used by tests/journeys/test_state_folder.py too."""

    name = "remembering"

    def compile(self, model: Model, options: CompileOptions) -> Any:
        assert options.blob_cache is not None
        count(options.blob_cache, b"compilations")
        return super().compile(model, options)

    def load(self, artifact: Artifact, options: CompileOptions) -> Any:
        assert options.blob_cache is not None
        count(options.blob_cache, b"loads")
        return super().load(artifact, options)


def count(blobs: IBlobCache, what: bytes) -> None:
    assert blobs.set(what, b"%d" % (int(blobs.get(what) or b"0") + 1))


async def test_an_engine_is_handed_the_blob_cache_of_its_device_which_outlives_the_driver(
    model: aionn.Model, handles: CacheHandles, tmp_path: Path
) -> None:
    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            device = EngineDevice(RememberingEngine(), tasks, tmp_path / "own")
            await device.prepare_model(model, PrepareOptions(), handles)
            await device.prepare_model_from_cache(PrepareOptions(), handles)
            device.close()
            assert device._blobs.get(b"loads") is None  # it is closed with the device
            assert not device._blobs.set(b"loads", b"7")
    with BlobCache(device="remembering", version="1", state_directory=tmp_path / "own") as kept:
        assert (kept.get(b"compilations"), kept.get(b"loads")) == (b"2", b"2")


async def test_an_engine_that_keeps_no_blobs_costs_no_blob_cache(
    opened: Opened, model: aionn.Model, handles: CacheHandles, tmp_path: Path
) -> None:
    engine, device = opened
    await device.prepare_model(model, PrepareOptions(), handles)
    assert engine.compiled_with[0].blob_cache is not None
    names = [path.name for path in (tmp_path / "state" / "aionn").iterdir()]
    assert [name for name in names if name.startswith("integrity-")] != []
    assert [name for name in names if "blob" in name] == []
