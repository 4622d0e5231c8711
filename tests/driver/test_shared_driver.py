"""A driver that several apps share believes no token: it compiles equal models once, and gives each app its own model."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from onnx import helper

import aionn
from aionn.driver.device import EngineDevice
from aionn.driver.prepared_model import EnginePreparedModel
from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.hal import CacheHandles, CompileOptions, Executable, PrepareOptions
from aionn.hal.model import PooledModel, may_change
from aionn.memory.region import Region
from tests.engines.onnx_graphs import model_of, value

pytestmark = pytest.mark.anyio
N = 64
W = np.random.default_rng(0).standard_normal((N, N)).astype(np.float32)
X = np.ones((1, N), np.float32)


class Counted(OnnxRuntimeEngine):
    """Counts what it compiles and loads. A compilation waits for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = self.loaded = 0
        self.go = threading.Event()
        self.go.set()

    def compile(self, model: Any, options: CompileOptions) -> Any:
        self.compiled += 1
        while not self.go.wait(0.001):
            if options.cancelled.is_set():
                raise RuntimeError("cancelled")
        return super().compile(model, options)

    def load(self, artifact: Any, options: CompileOptions) -> Any:
        self.loaded += 1
        return super().load(artifact, options)


@pytest.fixture
def engine() -> Counted:
    return Counted()


@pytest.fixture
async def device(engine: Counted, tmp_path: Path) -> AsyncIterator[EngineDevice]:
    async with anyio.create_task_group() as tasks:
        device = EngineDevice(engine, tasks, tmp_path / "state", shared=True)
        yield device
        device.close()


@pytest.fixture
def handles(tmp_path: Path) -> Iterator[Callable[[str], CacheHandles]]:
    fds: list[int] = []

    def made(name: str, token: bytes = bytes(32)) -> CacheHandles:
        both = [os.open(tmp_path / f"{name}{kind}", os.O_RDWR | os.O_CREAT, 0o600) for kind in ("model", "data")]
        fds.extend(both)
        return CacheHandles((both[0],), (both[1],), token)

    yield made
    for fd in fds:
        os.close(fd)


def product(weights: Any = W) -> aionn.Model:
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", [1, N])], [value("y", [1, N])], {"w": weights})
    return aionn.Model.from_onnx(model.SerializeToString())


def claiming(model: Any, token: bytes, pools: Any = None) -> PooledModel:
    """The model with another token, as a client may send it."""
    fields = {name: getattr(model, name) for name in ("graph", "inputs", "outputs", "operations", "constants", "pools")}
    return PooledModel(**(fields | ({} if pools is None else {"pools": pools})), token=token)


def computed(prepared: EnginePreparedModel) -> Any:
    executable: Executable = prepared._executables[0]
    return executable.run({"x": X}, {}, False).outputs["y"]


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not holds():
            await anyio.lowlevel.checkpoint()


async def test_apps_that_ask_at_once_get_one_compilation(device: EngineDevice, engine: Counted) -> None:
    engine.go.clear()
    models = [claiming(product(), os.urandom(32)) for _ in range(5)]
    asking = [asyncio.create_task(device.prepare_model(model, PrepareOptions())) for model in models]
    await until(lambda: engine.compiled == 1 and any(len(lock._waiters or ()) == 4 for lock in device.sharing._flights.values()))
    engine.go.set()
    prepared = await asyncio.gather(*asking)
    assert engine.compiled == 1
    assert len({id(each._shared) for each in prepared}) == 1
    for each in prepared:
        np.testing.assert_allclose(computed(each), X @ W, rtol=1e-4)
        await each.aclose()


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_the_next_app_compiles_if_the_first_one_leaves(device: EngineDevice, engine: Counted, how: str) -> None:
    engine.go.clear()
    deadline_ns = time.monotonic_ns() + 200_000_000 if how == "late" else None
    first = asyncio.create_task(device.prepare_model(product(), PrepareOptions(deadline_ns=deadline_ns)))
    await until(lambda: engine.compiled == 1)
    second = asyncio.create_task(device.prepare_model(product(), PrepareOptions()))
    if how == "cancelled":
        await until(lambda: any(lock._waiters for lock in device.sharing._flights.values()))
        first.cancel()
    with pytest.raises((asyncio.CancelledError, aionn.DeadlineError)):
        await first
    await until(lambda: engine.compiled == 2)
    engine.go.set()
    prepared = await second
    np.testing.assert_allclose(computed(prepared), X @ W, rtol=1e-4)
    await prepared.aclose()


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_an_app_that_stops_waiting_stops_no_other_app(device: EngineDevice, engine: Counted, how: str) -> None:
    engine.go.clear()
    first = asyncio.create_task(device.prepare_model(product(), PrepareOptions()))
    await until(lambda: engine.compiled == 1)
    deadline_ns = time.monotonic_ns() + 100_000_000 if how == "late" else None
    second = asyncio.create_task(device.prepare_model(product(), PrepareOptions(deadline_ns=deadline_ns)))
    if how == "cancelled":
        await until(lambda: any(lock._waiters for lock in device.sharing._flights.values()))
        second.cancel()
    with pytest.raises((asyncio.CancelledError, aionn.DeadlineError)):
        await second
    engine.go.set()
    await (await first).aclose()
    assert engine.compiled == 1


async def test_a_claimed_token_gives_no_other_model(device: EngineDevice) -> None:
    owner = product()
    theirs = await device.prepare_model(claiming(owner, owner.token), PrepareOptions())
    mine = await device.prepare_model(claiming(product(W * 2), owner.token), PrepareOptions())
    assert mine._shared is not theirs._shared
    np.testing.assert_allclose(computed(mine), computed(theirs) * 2, rtol=1e-4)
    await mine.aclose()
    await theirs.aclose()


async def test_files_with_a_claimed_token_give_no_other_model(
    device: EngineDevice, engine: Counted, handles: Callable[[str], CacheHandles]
) -> None:
    owner = product()
    theirs = await device.prepare_model(claiming(owner, owner.token), PrepareOptions(), handles("a"))
    mine = await device.prepare_model(claiming(product(W * 2), owner.token), PrepareOptions(), handles("b"))
    for each, files in ((theirs, "a"), (mine, "b")):
        again = await device.prepare_model_from_cache(PrepareOptions(), handles(files))
        assert again._shared is each._shared
        np.testing.assert_array_equal(computed(again), computed(each))
        await again.aclose()
    assert engine.loaded == 0  # a load finds what was compiled and stored, by what was stored
    await mine.aclose()
    await theirs.aclose()
    del theirs, mine, each, again
    assert device.sharing.evict() == 2
    gc.collect()
    loaded = [await device.prepare_model_from_cache(PrepareOptions(), handles(files)) for files in ("a", "b", "a")]
    assert loaded[0]._shared is loaded[2]._shared
    assert engine.loaded == 2
    np.testing.assert_allclose(computed(loaded[1]), computed(loaded[0]) * 2, rtol=1e-4)
    for prepared in loaded:
        await prepared.aclose()


async def test_memory_that_is_sealed_by_name_only_is_copied(device: EngineDevice, engine: Counted) -> None:
    """The app's mapping from before the seal can still write."""
    model = product()
    (pool,) = [pool for pool in model.pools if not may_change(pool)]
    region = Region.allocate(pool.size_bytes, freezable=True)
    kept = region.view()
    kept[:] = pool.view()
    region.freeze()
    engine.go.clear()
    first = asyncio.create_task(device.prepare_model(claiming(model, bytes(32), (region,)), PrepareOptions()))
    await until(lambda: engine.compiled == 1)  # the identity has been found
    kept[:] = bytes(pool.size_bytes)
    engine.go.set()
    prepared, same = await first, await device.prepare_model(model, PrepareOptions())
    assert same._shared is prepared._shared
    np.testing.assert_allclose(computed(prepared), X @ W, rtol=1e-4)
    await prepared.aclose()
    await same.aclose()


async def test_memory_that_cannot_be_written_to_is_used_in_place() -> None:
    from aionn.driver.sharing import digested

    model = product()
    (pool,) = model.pools
    fd = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
    os.write(fd, pool.view())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    region = Region.attach(fd, pool.description, aionn.memory.region.Access.READ)
    held = Region.allocate(pool.size_bytes, freezable=True)
    kept = held.view()
    kept[:] = pool.view()
    held.freeze()
    (own, digest), (whole, same), (copied, equal) = (digested(claiming(model, bytes(32), (each,))) for each in (region, pool, held))
    assert (own.pools[0], whole.pools[0]) == (region, pool)
    assert copied.pools[0] is not held
    assert digest == same == equal
    del kept
    region.close()
    held.close()
