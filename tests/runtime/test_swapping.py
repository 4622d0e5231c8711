"""An app's new model version is tried on inputs that the app has sent, before it takes over.

Both versions look words up in a table. The new table is shorter, so it fails on words that the made-up inputs do not have.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import aionn
from aionn.runtime.preparing import background
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def lookup(words: int, factor: float) -> aionn.Model:
    table = np.arange(words, dtype=np.float32) * np.float32(factor)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "word"], ["y"])],
        "lookup",
        [helper.make_tensor_value_info("word", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(table, "table")],
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return aionn.Model.from_onnx(model.SerializeToString())


OLD, SHORTER, NEW = lookup(100, 2), lookup(10, 3), lookup(100, 3)


def word(number: int) -> dict[str, Any]:
    return {"word": np.array([number], np.int64)}


@pytest.mark.parametrize("path", ["compute", "burst", "frame", "compute beside a burst"])
async def test_a_new_version_that_cannot_run_the_last_input_is_refused(path: str) -> None:
    async with leak_check(grace_s=5), aionn.Runtime() as runtime:
        compilation = await runtime.compile(OLD, devices=("reference",))
        if path == "compute":
            await compilation.compute(word(1))
            await compilation.compute(word(50))
        async with compilation.burst() as burst:
            if path == "burst":
                for number in (1, 2, 3, 50):  # the last ones are a stream's usual frames
                    await burst.compute(word(number))
            elif path == "frame":
                async with burst.frame() as frame:
                    frame["word"][0] = 50
                    await burst.compute(frame)
            else:
                await compilation.compute(word(50))
            with pytest.raises(aionn.CompilationError, match="the new model cannot run"):
                await runtime.swap(compilation, SHORTER)
            assert (await burst.compute(word(50)))["y"][0] == 100
            await runtime.swap(compilation, NEW)
            assert (await burst.compute(word(50)))["y"][0] == 150
        assert (await compilation.compute(word(50)))["y"][0] == 150


async def test_a_new_version_is_tried_on_inputs_that_come_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, answered = anyio.Event(), anyio.Event()
    original = background.make

    async def make(*arguments: Any, **named: Any) -> Any:
        compiling.set()
        await answered.wait()
        return await original(*arguments, **named)

    monkeypatch.setattr(background, "make", make)
    async with leak_check(grace_s=5), aionn.Runtime() as runtime:
        compilation = await runtime.compile(OLD, devices=("reference",))
        await compilation.compute(word(1))

        async def frames() -> AsyncIterator[dict[str, Any]]:
            await compiling.wait()
            while True:
                yield word(50)

        async with compilation.burst() as burst, anyio.create_task_group() as tasks:

            async def stream() -> None:
                async for result in burst.map(frames()):
                    assert result.outputs["y"][0] == 100
                    answered.set()

            tasks.start_soon(stream)
            with pytest.raises(aionn.CompilationError, match="the new model cannot run"):
                await runtime.swap(compilation, SHORTER)
            tasks.cancel_scope.cancel()
        assert compilation._parts.compiled.sampling is None
        assert compilation._parts.compiled.watched == 0


async def test_a_swap_of_what_is_no_compilation_of_the_runtime_says_what_it_got() -> None:
    async with aionn.Runtime() as runtime, aionn.Runtime() as other:
        compilation = await other.compile(OLD, devices=("reference",))
        for given, found in ((OLD, "Model"), (compilation, "one of another runtime")):
            with pytest.raises(aionn.CallerError, match=f"of this runtime, not {found}; write runtime.swap"):
                await runtime.swap(given, NEW)  # type: ignore[arg-type]


async def test_a_swap_of_a_compilation_that_is_closed_meanwhile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    original = background.make

    async def make(*arguments: Any, **named: Any) -> Any:
        made = await original(*arguments, **named)
        await compilation.aclose()
        return made

    monkeypatch.setattr(background, "make", make)
    async with leak_check(grace_s=5), aionn.Runtime() as runtime:
        compilation = await runtime.compile(OLD, devices=("reference",))
        await compilation.compute(word(1))
        with pytest.raises(aionn.CallerError, match="this compilation has been closed"):
            await runtime.swap(compilation, NEW)


async def test_an_input_that_the_version_before_cannot_run_either_decides_nothing() -> None:
    async with leak_check(grace_s=5), aionn.Runtime() as runtime:
        compilation = await runtime.compile(OLD, devices=("reference",))
        with pytest.raises(aionn.ExecutionError):
            await compilation.compute(word(1000))
        await runtime.swap(compilation, SHORTER)
        assert (await compilation.compute(word(5)))["y"][0] == 15


async def test_a_compilation_that_has_executed_nothing_gives_made_up_inputs() -> None:
    async with leak_check(grace_s=5), aionn.Runtime() as runtime:
        compilation = await runtime.compile(OLD, devices=("reference",))
        with pytest.raises(aionn.CompilationError, match="the new model cannot run"):
            await runtime.swap(compilation, lookup(1, 3))
        async with compilation.burst():
            await runtime.swap(compilation, SHORTER)
        assert (await compilation.compute(word(5)))["y"][0] == 15


async def test_the_last_inputs_are_those_of_the_last_shape() -> None:
    rows: list[Any] = ["rows"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "open",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, rows)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, rows)],
    )
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    async with leak_check(grace_s=5), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(content), devices=("reference",))
        async with compilation.burst() as burst:
            assert burst._executor.frames.last_inputs() is None
            for extent in (3, 500, 4):
                await burst.compute({"x": np.full(extent, extent, np.float32)})
                found = burst._executor.frames.last_inputs()
                assert found is not None
                np.testing.assert_array_equal(found["x"], np.full(extent, extent, np.float32))
        assert burst._executor.frames.last_inputs() is None


async def test_a_new_version_with_another_default_is_refused() -> None:
    """Frames, and calls under way, hold the default of the model before. The new version would compute with it."""

    def adding(number: float) -> aionn.Model:
        graph = helper.make_graph(
            [helper.make_node("Add", ["x", "weight"], ["y"])],
            "adding",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "weight")],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
            [numpy_helper.from_array(np.full(3, number, np.float32), "weight")],
        )
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return aionn.Model.from_onnx(model.SerializeToString())

    x = np.zeros(3, np.float32)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(adding(1), devices=("reference",))
        with pytest.raises(aionn.CallerError, match="input 'weight' of the new model has another default"):
            await runtime.swap(compilation, adding(2))
        await runtime.swap(compilation, adding(1))
        np.testing.assert_array_equal((await compilation.compute({"x": x}))["y"], np.ones(3, np.float32))
