"""An app of a shared driver sends descriptors of every kind: each is refused with one sentence, and the driver goes on."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

import aionn
from aionn.burst.packets import DATUM_BYTES
from aionn.errors import AionnError, CallerError
from aionn.fmq import MessageQueue
from aionn.hal import CacheHandles, PrepareOptions
from aionn.hal.types import ErrorStatus, MemoryDescription, MemoryKind
from aionn.memory.descriptors import check_descriptor
from aionn.memory.region import Region
from aionn.remote.calls import CopyTo, Execute, Fd, LentMemory
from tests.conformance.test_devices import FACTOR, GOOD, channels, ways
from tests.driver.test_apps_of_a_service import Driver, driver, prepare, quotas  # noqa: F401 -- fixtures
from tests.driver.test_shared_driver import claiming, product
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio

SIZE = 1 << 16


def _memfd(flags: int = 0, seals: int = 0) -> int:
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING | flags)
    if not flags:
        os.truncate(fd, SIZE)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _file(flags: int, folder: str | None = None) -> int:
    fd, path = tempfile.mkstemp(dir=folder)
    os.truncate(fd, SIZE)
    os.close(fd)
    fd = os.open(path, flags)
    os.unlink(path)
    return fd


def _epoll() -> int:
    with select.epoll() as epoll:
        return os.dup(epoll.fileno())


KINDS: dict[str, Callable[[], int]] = {
    "pipe": lambda: os.pipe()[0],
    "directory": lambda: os.open("/", os.O_RDONLY | os.O_DIRECTORY),
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "/dev/zero": lambda: os.open("/dev/zero", os.O_RDWR),
    "epoll": _epoll,
    "eventfd": lambda: os.eventfd(0),
    "file for writing only": lambda: _file(os.O_WRONLY),
    "file": lambda: _file(os.O_RDWR),
    "file in memory": lambda: _file(os.O_RDWR, "/dev/shm"),
    "memfd without seals": _memfd,
    "memfd sealed against growing": lambda: _memfd(seals=fcntl.F_SEAL_GROW),
    "O_PATH": lambda: os.open("/etc/passwd", os.O_PATH),
}


@pytest.fixture(params=list(KINDS))
def foreign(request: pytest.FixtureRequest) -> Iterator[int]:
    fd = KINDS[request.param]()
    yield fd
    os.close(fd)


@pytest.mark.parametrize("kind", [MemoryKind.ASHMEM, MemoryKind.MMAP_FD])
async def test_memory_of_an_execution(driver: Driver, foreign: int, kind: MemoryKind) -> None:  # noqa: F811
    async with driver.app(7) as app, ways(app, aionn.Model.from_onnx(scaled_model(FACTOR))) as way:
        lent = LentMemory(MemoryDescription(kind, 4096), Fd(foreign))
        result, _ = await app.connection.call(Execute(way.prepared.number, GOOD, (lent, lent), False, None))  # type: ignore[attr-defined]
        assert result.status in (ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE)
        assert "memory of kind" in result.message
        assert (await way.execute("burst", GOOD)).status is ErrorStatus.NONE
        assert driver.used(7).mapped_bytes == 8192


async def test_memory_of_a_burst(driver: Driver, foreign: int) -> None:  # noqa: F811
    class Foreign:
        description = MemoryDescription(MemoryKind.MMAP_FD, 4096)
        size_bytes = 4096

        def fileno(self) -> int:
            return foreign

    async with driver.app(7) as app, ways(app, aionn.Model.from_onnx(scaled_model(FACTOR))) as way:
        own, way.memories.input = way.memories.input, Foreign()  # type: ignore[assignment]
        assert (await way.execute("burst", GOOD)).status is not ErrorStatus.NONE
        way.memories.input = own
        assert (await way.execute("burst", GOOD)).status is ErrorStatus.NONE


async def test_memory_that_comes_with_the_opening_of_a_burst(driver: Driver, foreign: int) -> None:  # noqa: F811
    class Foreign:
        size_bytes = 4096

        def __init__(self, kind: MemoryKind) -> None:
            self.description = MemoryDescription(kind, 4096)

        def fileno(self) -> int:
            return foreign

    async with driver.app(7) as app, ways(app, aionn.Model.from_onnx(scaled_model(FACTOR))) as way:
        for kind in (MemoryKind.ASHMEM, MemoryKind.MMAP_FD):
            requests, results = MessageQueue.create(DATUM_BYTES, 1024), MessageQueue.create(DATUM_BYTES, 1024)
            callback: Any = SimpleNamespace(brought={0: Region.allocate(4096), 1: Foreign(kind)})
            with pytest.raises(AionnError, match="memory of kind"):
                await way.prepared.configure_execution_burst(callback, *channels(app, requests, results))
            requests.close()
            results.close()
            assert (driver.used(7).bursts, driver.used(7).mapped_bytes) == (1, 0)  # of the first memory nothing is left, too
        assert (await way.execute("burst", GOOD)).status is ErrorStatus.NONE


async def test_constants_and_files(driver: Driver, foreign: int) -> None:  # noqa: F811
    class Foreign:
        def __init__(self, kind: MemoryKind, size_bytes: int) -> None:
            self.description = MemoryDescription(kind, size_bytes, writable=False)
            self.size_bytes = size_bytes

        def fileno(self) -> int:
            return foreign

    model = product()
    async with driver.app(7) as app:
        for kind in (MemoryKind.ASHMEM, MemoryKind.MMAP_FD):
            pools = (Foreign(kind, model.pools[0].size_bytes),)
            with suppress(AionnError):  # the bytes of a usual file are copied, so they can be used
                await (await app.prepare_model(claiming(model, bytes(32), pools), PrepareOptions())).aclose()
        with pytest.raises(AionnError):
            await app.prepare_model_from_cache(PrepareOptions(), CacheHandles((foreign,), (foreign,), bytes(32)))
        kept = await app.prepare_model(product(), PrepareOptions(), CacheHandles((foreign,), (foreign,), bytes(32)))
        assert kept.save_outcome not in ("", "saved")
        with pytest.raises(CallerError):
            await app.connection.call(CopyTo(99, LentMemory(MemoryDescription(MemoryKind.ASHMEM, 4096), Fd(foreign))))
        await prepare(app)


async def test_memory_in_use_cannot_be_cut_off(driver: Driver) -> None:  # noqa: F811
    fd = _memfd(seals=fcntl.F_SEAL_SHRINK)
    os.posix_fallocate(fd, 0, SIZE)
    region, output = Region.attach(fd, MemoryDescription(MemoryKind.MMAP_FD, 4096)), Region.allocate(4096)
    async with driver.app(7) as app, ways(app, aionn.Model.from_onnx(scaled_model(FACTOR))) as way:
        assert (await way.prepared.execute(GOOD, [region, output])).status is ErrorStatus.NONE
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    region.close()
    output.close()


async def test_memory_that_is_cut_off_and_sealed_while_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = _memfd()
    real = os.fstat

    def fstat(asked: int) -> Any:
        found = real(asked)
        if asked == fd:
            os.truncate(fd, 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return found

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(CallerError, match="its size is not sealed"):
        check_descriptor(fd, MemoryDescription(MemoryKind.ASHMEM, 4096), write_through=False)
    monkeypatch.undo()
    os.close(fd)
