"""Writes into a loaded model's file that its size and time of modification do not show. No compilation becomes another model silently."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.errors import CallerError, DriverDiedError
from aionn.graph.arrays import constant_arrays
from aionn.hal.model import known_token
from tests.leaks import driver_pids, ended
from tests.runtime.test_loaded_models import KINDS, N, Reads, floats, inside

pytestmark = pytest.mark.anyio
CHANGED = "has changed since it was loaded; load the model again"
Kind = Callable[[int, Path], Path]


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def weights_of(path: Path) -> Path:
    beside = path.parent / "weights.bin"
    return beside if beside.exists() else path


def edit(path: Path, before: int, after: int) -> None:
    """Write other weights into the file that is there, and set its times back."""
    weights = weights_of(path)
    status, content = weights.stat(), weights.read_bytes()
    assert content.count(floats(before).tobytes()) == 1
    with open(weights, "r+b") as file:
        file.write(content.replace(floats(before).tobytes(), floats(after).tobytes()))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    now = weights.stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (status.st_ino, status.st_size, status.st_mtime_ns)


async def computed(compilation: aionn.Compilation) -> Any:
    """Compute, and once more if the app had not seen the end of the driver yet."""
    x = np.zeros(N, np.float32)
    with suppress(DriverDiedError):
        return (await compilation.compute({"x": x}))["y"]
    return (await compilation.compute({"x": x}))["y"]


async def compiled(runtime: aionn.Runtime, model: aionn.Model, **chosen: Any) -> aionn.Compilation:
    return await runtime.compile(model, devices=("onnxruntime",), **chosen)


async def kill_driver() -> None:
    (pid,) = driver_pids()
    os.kill(pid, signal.SIGKILL)
    assert await ended(pid, 30)


@KINDS
@pytest.mark.parametrize("digested", [False, True], ids=["not digested", "digested"])
async def test_a_new_driver_compiles_the_weights_that_the_first_one_compiled(kind: Kind, digested: bool, tmp_path: Path) -> None:
    path = kind(1, tmp_path)
    async with aionn.Runtime() as runtime:
        model = await runtime.load(path)
        if digested:
            await model.digest()
        compilation = await compiled(runtime, model)
        np.testing.assert_array_equal(await computed(compilation), floats(1))
        edit(path, 1, 2)
        await kill_driver()
        with pytest.raises(CallerError, match=CHANGED):
            await computed(compilation)
        edit(path, 2, 1)
        np.testing.assert_array_equal(await computed(compilation), floats(1))


@KINDS
async def test_a_model_that_has_a_token_is_compiled_only_as_the_token_says(kind: Kind, tmp_path: Path) -> None:
    path = kind(1, tmp_path)
    async with aionn.Runtime() as runtime:
        model = await runtime.load(path)
        await model.digest()
        edit(path, 1, 2)
        with pytest.raises(CallerError, match=CHANGED):
            await compiled(runtime, model)
        (tmp_path / "no directory").touch()
        with pytest.raises(CallerError, match=CHANGED):  # nothing can be stored there, and nothing is compiled either
            await compiled(runtime, model, cache_dir=tmp_path / "no directory", token=bytes(32))
        again = await compiled(runtime, await runtime.load(path))
        np.testing.assert_array_equal(await computed(again), floats(2))


@KINDS
async def test_a_second_compilation_and_a_token_are_of_the_weights_of_the_first(kind: Kind, tmp_path: Path) -> None:
    path = kind(1, tmp_path)
    async with aionn.Runtime() as runtime:
        model = await runtime.load(path)
        first = await compiled(runtime, model)
        edit(path, 1, 2)
        with pytest.raises(CallerError, match=CHANGED):
            await compiled(runtime, model)
        with pytest.raises(CallerError, match=CHANGED):
            await model.digest()
        assert not known_token(model)
        np.testing.assert_array_equal(await computed(first), floats(1))
        edit(path, 2, 1)
        second = await compiled(runtime, model)
        np.testing.assert_array_equal(await computed(second), floats(1))
        assert await model.digest() == aionn.Model.from_onnx(path).token


async def test_a_file_that_only_got_another_name_is_compiled_again(tmp_path: Path) -> None:
    path = inside(1, tmp_path)
    async with aionn.Runtime() as runtime:
        compilation = await compiled(runtime, await runtime.load(path))
        np.testing.assert_array_equal(await computed(compilation), floats(1))
        path.rename(tmp_path / "old.onnx")
        inside(2, tmp_path)
        await kill_driver()
        np.testing.assert_array_equal(await computed(compilation), floats(1))


@KINDS
async def test_a_token_is_made_again_where_only_the_inode_shows_a_change(kind: Kind, tmp_path: Path) -> None:
    path = kind(1, tmp_path)
    async with aionn.Runtime() as runtime:
        model = await runtime.load(path)
        token = await model.digest()
        edit(path, 1, 2)
        with pytest.raises(CallerError, match=CHANGED):
            await model.digest()
        with pytest.raises(CallerError, match=CHANGED):
            await compiled(runtime, model, cache_dir=tmp_path / "cache")
        edit(path, 2, 1)
        assert await model.digest() == token


@KINDS
async def test_a_digest_is_not_remembered_while_the_inode_is_young_however_old_the_file_looks(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kind(1, tmp_path)
    for file in {path, weights_of(path)}:
        os.utime(file, ns=(0, 0))
    reads = Reads(monkeypatch)
    for turn in (1, 2):
        await (await aionn.Model.load(path)).digest()
        assert reads.bytes >= turn * N * 4


@KINDS
async def test_a_copy_of_a_loaded_model_is_the_model_itself_and_closes_no_file(kind: Kind, tmp_path: Path) -> None:
    """A deep copy of what held the descriptor closed that descriptor. The next file to be opened got its number."""
    model = await aionn.Model.load(kind(1, tmp_path))
    assert copy.copy(model) is model
    assert copy.deepcopy({"model": model})["model"] is model
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(model)
    await model.read()
    for pool in model.pools:
        with pytest.raises(TypeError, match="an open file cannot be copied or pickled"):
            copy.deepcopy(pool)
    gc.collect()
    assert await model.digest() == aionn.Model.from_onnx(tmp_path / "model.onnx").token
    np.testing.assert_array_equal(constant_arrays(model)["w"], floats(1))
