"""A model: from a file or bytes, through the control socket and shared memory, into the driver's engine."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import aionn
from aionn.hal import CONSTANT_COPY_BYTES
from tests.journeys.silero import Directly, assert_same, still, windows
from tests.leaks import driver_pids, leak_check

pytestmark = pytest.mark.anyio


def contents_of(path: Path) -> bytes:
    return path.read_bytes()


def mappings_of(pid: int) -> dict[int, str]:
    """Per inode mapped by that process, its permissions."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()]
    return {int(inode): perms for _, perms, _, _, inode, *_ in lines}


async def test_a_path_and_its_bytes_are_the_same_model(silero_path: Path) -> None:
    from_path = aionn.Model.from_onnx(silero_path)
    from_bytes = aionn.Model.from_onnx(contents_of(silero_path))
    assert from_path.token == from_bytes.token
    assert len(from_path.token) == 32
    assert dict(from_path.inputs) == dict(from_bytes.inputs)
    inputs = {"input": next(windows(1)), "state": still()}
    expected = Directly(silero_path).run(inputs)
    async with leak_check(), aionn.Runtime() as runtime:
        for model in (from_path, from_bytes):
            compilation = await runtime.compile(model, devices=("onnxruntime",))
            assert_same(await compilation.compute(inputs), expected)


def test_a_model_tells_its_inputs_and_outputs_in_order(silero_path: Path, orientation_path: Path) -> None:
    silero = aionn.Model.from_onnx(str(silero_path))
    assert {name: operand.dimensions for name, operand in silero.inputs.items()} == {"input": (1, 576), "state": (2, 1, 128)}
    assert list(silero.inputs) == ["input", "state"]
    assert {name: operand.type.value for name, operand in silero.outputs.items()} == {"output": "float32", "stateN": "float32"}
    orientation = aionn.Model.from_onnx(orientation_path)
    assert [operand.dimensions for operand in orientation.inputs.values()] == [(0, 3, 224, 224)]
    assert orientation.token != silero.token


async def test_the_driver_keeps_no_mapping_of_the_apps_constants(orientation_path: Path, orientation: aionn.Model) -> None:
    assert len(orientation.graph) < len(contents_of(orientation_path)) / 10
    assert orientation.constants
    assert all(constant.location.length > CONSTANT_COPY_BYTES for constant in orientation.constants)
    inodes = {os.fstat(pool.fileno()).st_ino for pool in orientation.pools}
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(orientation, devices=("onnxruntime",))
        await compilation.compute({"x": np.zeros((1, 3, 224, 224), np.float32)})
        (driver,) = driver_pids()
        assert inodes
        assert not inodes & mappings_of(driver).keys()  # ONNX Runtime has laid out all of them, so the app alone keeps them


async def test_an_open_dimension_takes_any_size_in_one_burst(orientation_path: Path, orientation: aionn.Model) -> None:
    direct = Directly(orientation_path)
    random = np.random.default_rng(0)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(orientation, devices=("onnxruntime",))
        async with compilation.burst() as burst:
            for pictures in (1, 3, 2):
                x = random.standard_normal((pictures, 3, 224, 224)).astype(np.float32)
                outputs = await burst.compute({"x": x})
                # Sums over other batch sizes are ordered otherwise in some kernels: a little more than for one frame.
                for name, array in direct.run({"x": x}).items():
                    assert outputs[name].shape == array.shape
                    np.testing.assert_allclose(outputs[name], array, rtol=0, atol=1e-5)
                del outputs


async def test_two_models_share_one_driver(
    silero_path: Path, silero: aionn.Model, orientation_path: Path, orientation: aionn.Model
) -> None:
    inputs = {"input": next(windows(1)), "state": still()}
    expected = Directly(silero_path).run(inputs)
    async with leak_check(), aionn.Runtime() as runtime:
        first = await runtime.compile(silero, devices=("onnxruntime",))
        second = await runtime.compile(orientation, devices=("onnxruntime",))
        assert len(driver_pids()) == 1
        assert_same(await first.compute(inputs), expected)
        assert [array.shape for array in (await second.compute({"x": np.zeros((2, 3, 224, 224), np.float32)})).values()] == [(2, 4)]


async def test_without_a_cache_directory_every_step_says_no_cache(silero_path: Path, silero: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        (outcome,) = compilation.outcomes
        assert (outcome.kind.name, outcome.reason, outcome.device) == ("NO_CACHE", None, "onnxruntime")


async def test_an_app_that_only_opens_a_runtime_starts_no_driver() -> None:
    async with leak_check(), aionn.Runtime():
        assert driver_pids() == []
