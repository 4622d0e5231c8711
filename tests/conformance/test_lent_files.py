"""Cache files in driver processes: no driver opens one, and two drivers that get the same descriptors do not mix them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest

import aionn
from aionn.caching import CacheOutcomeKind
from aionn.hal import CacheFiles, CacheHandles, DeviceType, PrepareOptions
from aionn.remote.calls import Prepared, PrepareModel
from aionn.remote.connection import Connection, Descriptors
from aionn.remote.control import Ready
from aionn.remote.device import RemoteDevice
from aionn.runtime.processes.devices import Devices
from tests.conformance.cache_files import DRIVER_PROCESS, TOKEN, Files, load, open_device, own_state, save, saved
from tests.conformance.caching_models import chain, input_of
from tests.conformance.storing_reference import NAME as STORING_REFERENCE
from tests.conformance.watched_opens import NAME as WATCHED_REFERENCE
from tests.conformance.watched_opens import WATCHED
from tests.descriptors import free_descriptors

__all__ = ["own_state"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(chain("float32", "Add"))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(WATCHED, str(tmp_path / "opened"))
    return tmp_path / "opened"


def check_opened(log: Path, cache: Path, times: int) -> None:
    """Check that the driver opened no path in the cache directory, none relative to another, and no descriptor's path."""
    paths = log.read_text().splitlines()
    assert paths.count(os.devnull) == times  # the hook works, and both acts took place in that process
    assert any(path.endswith(".sqlite") for path in paths)  # the driver's records, which are not the app's
    files = {entry.name for entry in cache.rglob("*")}
    bad = [path for path in paths if path.startswith(str(cache)) or "/fd/" in path or os.path.basename(path) in files]
    assert files
    assert bad == []


async def test_a_driver_opens_no_cache_file_of_a_client_that_uses_the_hal(opened: Path, model: aionn.Model, tmp_path: Path) -> None:
    async with open_device(WATCHED_REFERENCE, DRIVER_PROCESS) as device:
        with Files(tmp_path / "cache", await device.get_number_of_cache_files_needed()) as files:
            await saved(device, model, files.handles())
            await (await load(device, files.handles())).aclose()
    check_opened(opened, tmp_path / "cache", times=2)


async def test_a_driver_opens_no_file_of_the_cache_directory(opened: Path, model: aionn.Model, tmp_path: Path) -> None:
    outcomes = []
    ((name, operand),) = model.inputs.items()
    assert operand.dimensions is not None
    x = input_of("float32", operand.dimensions)
    for _ in range(2):
        async with aionn.Runtime(sandbox="off") as runtime:  # a confined driver could not write down what it opens
            compilation = await runtime.compile(model, devices=(WATCHED_REFERENCE,), cache_dir=tmp_path / "cache", token=model.token)
            await compilation.compute({name: np.asarray(x)})
            outcomes += [outcome.kind for outcome in compilation.outcomes]
    assert outcomes == [CacheOutcomeKind.MISS, CacheOutcomeKind.HIT]
    check_opened(opened, tmp_path / "cache", times=2)


@pytest.fixture
def wide() -> list[aionn.Model]:
    """Two models of equal sizes, which take a while to write."""
    return [aionn.Model.from_onnx(chain("float32", operation, 16384)) for operation in ("Mul", "Add")]


async def test_two_drivers_that_get_the_same_descriptors_never_mix_their_files(wide: list[aionn.Model], tmp_path: Path) -> None:
    """The app sends each driver descriptions of its own. A lock on a shared description would keep no driver out."""
    async with anyio.create_task_group() as tasks:
        devices = [Devices(tasks), Devices(tasks)]
        try:
            drivers = [await each.get(STORING_REFERENCE) for each in devices]
            with Files(tmp_path / "cache", drivers[0].cache_files) as files:
                handles = files.handles()
                again = CacheHandles(tuple(map(os.dup, handles.model)), tuple(map(os.dup, handles.data)), TOKEN)
                for _ in range(5):
                    outcomes: list[str] = []

                    async def save_in(number: int, handles: CacheHandles, outcomes: list[str] = outcomes) -> None:
                        prepared = await save(drivers[number], wide[number], handles)
                        outcomes.append(prepared.save_outcome)
                        await prepared.aclose()

                    async with anyio.create_task_group() as savers:
                        savers.start_soon(save_in, 0, handles)
                        savers.start_soon(save_in, 1, again)
                    assert outcomes == ["saved", "saved"]
                    await (await load(drivers[0], files.handles())).aclose()
                for fd in (*again.model, *again.data):
                    os.close(fd)
        finally:
            for each in devices:
                await each.aclose()
        tasks.cancel_scope.cancel()


class Sent:
    """Stands for the connection to a driver. Keeps duplicates of the cache files that each preparation sends, as a driver has them."""

    def __init__(self) -> None:
        self.fds: list[list[int]] = []

    async def call(self, body: PrepareModel, **_: object) -> tuple[Prepared, Descriptors]:
        assert body.cache is not None
        self.fds.append([os.dup(fd) for fd in (*body.cache.model, *body.cache.data)])
        return Prepared(1, (), (), "saved"), Descriptors(())


async def test_each_preparation_sends_descriptions_that_it_shares_with_no_other(model: aionn.Model, tmp_path: Path) -> None:
    sent = Sent()
    device: Any = RemoteDevice(cast("Connection", sent), Ready(1, "device", "1", DeviceType.CPU, CacheFiles(1, 1)))
    with Files(tmp_path, CacheFiles(1, 1)) as files:
        handles = files.handles()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            await device.prepare_model(model, PrepareOptions(), handles)
        assert len(os.listdir("/proc/self/fd")) == before + 4  # the app keeps none open
        for mine, first, second in zip((*handles.model, *handles.data), *sent.fds, strict=True):
            for holder, others in ((mine, (first, second)), (first, (mine, second)), (second, (mine, first))):
                fcntl.flock(holder, fcntl.LOCK_EX)
                for other in others:
                    with pytest.raises(BlockingIOError):
                        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(holder, fcntl.LOCK_UN)
        for fd in (*sent.fds[0], *sent.fds[1]):
            os.close(fd)


async def test_files_that_cannot_be_opened_again_are_not_stored_and_the_model_is_prepared(model: aionn.Model, tmp_path: Path) -> None:
    async with open_device(STORING_REFERENCE, DRIVER_PROCESS) as device:
        with Files(tmp_path / "cache", await device.get_number_of_cache_files_needed()) as files:
            handles = files.handles()
            with free_descriptors(2):
                prepared = await device.prepare_model(model, PrepareOptions(), handles)
            assert prepared.save_outcome.startswith("no_space: opening cache file 2 again for the driver")
            await prepared.aclose()
            await saved(device, model, handles)
