"""Bad input: one sentence, the right class, and the runtime goes on working."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio import to_thread
from numpy.typing import NDArray
from onnx import TensorProto, helper

import aionn
from aionn.errors import AionnError, CallerError, CompilationError, DeviceUnavailableError
from tests.journeys.silero import Directly, assert_same, still, windows
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio


def good() -> dict[str, NDArray[Any]]:
    return {"input": next(windows(1)), "state": still()}


@asynccontextmanager
async def still_working(silero_path: Path) -> AsyncIterator[tuple[aionn.Runtime, aionn.Compilation]]:
    """A runtime that must give right answers before and after the body, and leave nothing."""
    expected = Directly(silero_path).run(good())
    model = aionn.Model.from_onnx(silero_path)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        assert_same(await compilation.compute(good()), expected)
        yield runtime, compilation
        assert_same(await compilation.compute(good()), expected)
        async with compilation.burst() as burst:
            assert_same(await burst.compute(good()), expected)


def is_one_sentence(error: AionnError, *named: str) -> None:
    """One line that names what was found and what would be right."""
    text = str(error)
    assert text
    assert "\n" not in text
    assert "Traceback" not in text
    missing = [word for word in named if word not in text]
    assert not missing, f"{text!r} does not name {missing}"


def add_model(op_type: str = "Add", domain: str = "") -> bytes:
    node = helper.make_node(op_type, ["a", "b"], ["c"], name="the_sum", domain=domain)
    operands = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "abc"}
    graph = helper.make_graph([node], "g", [operands["a"], operands["b"]], [operands["c"]])
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    contents: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return contents


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(CallerError) as caught:
        aionn.Model.from_onnx(tmp_path / "nowhere.onnx")
    is_one_sentence(caught.value, "nowhere.onnx")


@pytest.mark.parametrize("contents", [b"", b"this is no model", b"\x00" * 64, b"RIFF\x24\x00\x00\x00WAVEfmt "])
def test_a_file_that_is_no_onnx_model_is_the_callers_error(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "other.onnx"
    path.write_bytes(contents)
    with pytest.raises(CallerError) as caught:
        aionn.Model.from_onnx(path)
    is_one_sentence(caught.value, "other.onnx")
    with pytest.raises(CallerError) as caught:
        aionn.Model.from_onnx(contents)
    is_one_sentence(caught.value)


def test_a_directory_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(CallerError) as caught:
        aionn.Model.from_onnx(tmp_path)
    is_one_sentence(caught.value, str(tmp_path))


def test_a_cut_off_model_is_refused(silero_path: Path) -> None:
    contents = silero_path.read_bytes()
    with pytest.raises((CallerError, CompilationError)) as caught:
        aionn.Model.from_onnx(contents[: len(contents) // 2])
    is_one_sentence(caught.value)


async def test_an_unsupported_node_is_named(silero_path: Path) -> None:
    async with still_working(silero_path) as (runtime, _):
        for contents in (add_model("NoSuchOperator"), add_model("Add", domain="com.example.unknown")):
            with pytest.raises(CompilationError) as caught:
                await runtime.compile(aionn.Model.from_onnx(contents), devices=("onnxruntime",))
            is_one_sentence(caught.value, "the_sum", "onnxruntime")
            assert caught.value.node == "the_sum"
            assert caught.value.reason


# --- arguments -------------------------------------------------------------------------------------------------------

BAD_INPUTS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "unknown name": (lambda: {**good(), "sate": still()}, ("sate", "state")),
    "missing name": (lambda: {"input": next(windows(1))}, ("state",)),
    "nothing": (dict, ("input",)),
    "wrong shape": (lambda: {**good(), "input": np.zeros((1, 512), np.float32)}, ("input", "(1, 512)", "(1, 576)")),
    "wrong rank": (lambda: {**good(), "input": np.zeros(576, np.float32)}, ("input", "(576,)", "(1, 576)")),
    "empty array": (lambda: {**good(), "input": np.zeros((1, 0), np.float32)}, ("input", "(1, 0)", "(1, 576)")),
    "float64": (lambda: {**good(), "input": np.zeros((1, 576))}, ("input", "float64", "float32")),
    "integers": (lambda: {**good(), "input": np.zeros((1, 576), np.int32)}, ("input", "int32", "float32")),
    "other byte order": (lambda: {**good(), "input": np.zeros((1, 576), ">f4")}, ("input", "float32")),
    "objects": (lambda: {**good(), "input": np.full((1, 576), None)}, ("input", "object")),
    "no array": (lambda: {**good(), "input": "hello"}, ("input",)),
    "a list": (lambda: {**good(), "input": [[0.0] * 576]}, ("input",)),
    "masked": (lambda: {**good(), "input": np.ma.masked_less(next(windows(1)), 0)}, ("input", "mask", "filled")),
    "no mapping": (lambda: [1, 2, 3], ()),
}


async def test_bad_arguments_are_refused_on_both_paths_and_nothing_is_cast(silero_path: Path) -> None:
    async with still_working(silero_path) as (_, compilation), compilation.burst() as burst:
        expected = Directly(silero_path).run(good())
        paths: tuple[Callable[[Any], Awaitable[Mapping[str, Any]]], ...] = (compilation.compute, burst.compute)
        for what, (make, named) in BAD_INPUTS.items():
            for compute in paths:
                try:
                    await compute(make())
                except CallerError as error:
                    is_one_sentence(error, *named)
                else:
                    pytest.fail(f"{what}: accepted")
                assert_same(await compute(good()), expected)


@pytest.mark.parametrize("device", ["onnxruntime", "openvino", "reference"])
async def test_a_model_that_declares_another_output_gives_the_true_one(silero_path: Path, device: str) -> None:
    x, y = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3]), helper.make_tensor_value_info("y", TensorProto.FLOAT, [5])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    contents = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    async with (
        still_working(silero_path) as (runtime, _),
        await runtime.compile(aionn.Model.from_onnx(contents), devices=(device,)) as compilation,
        compilation.burst() as burst,
    ):
        for compute in (compilation.compute, burst.compute):
            for number in (1, 2):
                outputs = await compute({"x": np.full(3, number, np.float32)})
                np.testing.assert_array_equal(outputs["y"], np.full(3, number))
            del outputs


async def test_timing_may_be_asked_for_by_any_truth(silero_path: Path) -> None:
    async with still_working(silero_path) as (_, compilation), compilation.burst() as burst:
        for truth in (np.True_, 1, "yes"):
            for compute in (compilation.compute, burst.compute):
                assert (await compute(good(), measure_timing=truth)).timing is not None  # type: ignore[arg-type]


async def test_an_open_dimension_is_still_checked_for_its_rank_and_the_others(silero_path: Path, orientation: aionn.Model) -> None:
    async with still_working(silero_path) as (runtime, _):
        compilation = await runtime.compile(orientation, devices=("onnxruntime",))
        for shape in ((3, 224, 224), (1, 3, 224, 225)):
            with pytest.raises(CallerError) as caught:
                await compilation.compute({"x": np.zeros(shape, np.float32)})
            is_one_sentence(caught.value, "x", str(shape))


async def test_an_option_that_does_not_exist_is_named_with_those_that_do(silero_path: Path, silero: aionn.Model) -> None:
    async with still_working(silero_path) as (runtime, _):
        options: list[tuple[dict[str, Any], tuple[str, ...]]] = [
            ({"preference": "fastest"}, ("fastest", "sustained_speed", "fast_single_answer", "low_power")),
            ({"priority": "urgent"}, ("urgent", "low", "medium", "high")),
            ({"mode": "lazy"}, ("lazy", "eager", "jit", "staged")),
            ({"token": b"\x00" * 32}, ("token", "cache_dir")),
            ({"devices": ()}, ("devices",)),
            ({"timeout_s": -1.0}, ("timeout_s",)),
        ]
        for option, named in options:
            with pytest.raises(CallerError) as caught:
                await runtime.compile(silero, **{"devices": ("onnxruntime",), **option})
            is_one_sentence(caught.value, *named)


# --- devices ---------------------------------------------------------------------------------------------------------


async def test_an_unknown_device_is_named_with_those_there_are(silero_path: Path, silero: aionn.Model) -> None:
    async with still_working(silero_path) as (runtime, _):
        with pytest.raises(DeviceUnavailableError) as caught:
            await runtime.compile(silero, devices=("tpu9",))
        is_one_sentence(caught.value, "tpu9", "onnxruntime")
        assert caught.value.device == "tpu9"


async def test_a_device_whose_package_is_not_installed_says_what_is_missing(
    silero_path: Path, silero: aionn.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "ghost-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ghost\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[aionn.engines]\nghost = a_package_that_is_not_there.engine:Ghost\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    async with still_working(silero_path) as (runtime, _):
        with pytest.raises(DeviceUnavailableError) as caught:
            await runtime.compile(silero, devices=("ghost",))
        is_one_sentence(caught.value, "ghost", "a_package_that_is_not_there")
        assert caught.value.device == "ghost"


# --- the wrong moment, the wrong loop --------------------------------------------------------------------------------


async def test_after_the_runtime_has_been_left_every_call_is_the_callers_error(silero_path: Path, silero: aionn.Model) -> None:
    async with leak_check():
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(silero, devices=("onnxruntime",))
        with pytest.raises(CallerError) as caught:
            await runtime.compile(silero, devices=("onnxruntime",))
        is_one_sentence(caught.value)
        with pytest.raises(CallerError) as caught:
            await compilation.compute(good())
        is_one_sentence(caught.value)


async def test_a_burst_and_a_frame_that_have_been_left_are_refused(silero_path: Path) -> None:
    async with still_working(silero_path) as (_, compilation):
        async with compilation.burst() as burst:
            async with burst.frame() as frame:
                pass
            with pytest.raises(CallerError) as caught:
                await burst.compute(frame)
            is_one_sentence(caught.value)
        with pytest.raises(CallerError) as caught:
            await burst.compute(good())
        is_one_sentence(caught.value)


async def test_a_frame_of_another_burst_is_refused(silero_path: Path) -> None:
    async with (
        still_working(silero_path) as (_, compilation),
        compilation.burst() as one,
        compilation.burst() as other,
        other.frame() as frame,
    ):
        with pytest.raises(CallerError) as caught:
            await one.compute(frame)
        is_one_sentence(caught.value)


async def test_another_event_loop_is_refused(silero_path: Path, silero: aionn.Model) -> None:
    async with (
        still_working(silero_path) as (runtime, compilation),
        compilation.burst() as burst,
        burst.frame() as frame,
        await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state,
    ):
        await state.reset(1)
        await burst.compute(good())
        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: compilation.compute(good()),
            lambda: runtime.compile(silero, devices=("onnxruntime",)),
            lambda: compilation.burst().__aenter__(),
            lambda: compilation.allocate(inputs=("state",)),
            compilation.aclose,
            lambda: burst.compute(good()),
            lambda: burst.compute(frame),
            lambda: burst.compute({**good(), "state": state}, outputs={"stateN": state}),
            lambda: burst.frame().__aenter__(),
            lambda: anext(burst.map([good()])),
            burst.aclose,
            state.reset,
            state.snapshot,
            state.aclose,
        ]

        async def elsewhere() -> None:
            for use in uses:
                with pytest.raises(CallerError) as caught:
                    await use()
                is_one_sentence(caught.value, "loop")

        await to_thread.run_sync(lambda: asyncio.run(elsewhere()))
        with pytest.raises(CallerError) as without:
            await to_thread.run_sync(lambda: burst.compute(good()).send(None))
        is_one_sentence(without.value, "aionn.run")
        np.testing.assert_array_equal(await state.snapshot(), np.ones((2, 1, 128), np.float32))


def test_no_event_loop_at_all_is_refused(silero_path: Path) -> None:
    with pytest.raises(CallerError) as caught:
        aionn.Runtime().__aenter__().send(None)
    is_one_sentence(caught.value, "aionn.run")
