"""`fake_device.answer` and `fake_model`: what a test says is what its app gets, and what goes wrong in an answer is never lost."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.testing import FakeDevice, fake_model, identity_model

pytestmark = pytest.mark.anyio

DETECTOR = fake_model({"image": ((1, 3, 8, 8), "float32")}, {"boxes": ((1, 5, 4), "float32"), "count": ((1,), "int64")})
IMAGE = {"image": np.ones((1, 3, 8, 8), np.float32)}
BOXES = np.arange(20, dtype=np.float32).reshape(1, 5, 4)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


def model(content: bytes) -> aionn.Model:
    return aionn.Model.from_onnx(content)


async def test_arrays_are_answered_on_every_way_to_run(fake_device: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model(DETECTOR), devices=(fake_device.name,))
        fake_device.answer({"boxes": BOXES, "count": [5]})
        outputs = await compilation.compute(IMAGE)
        assert outputs["boxes"].tolist() == BOXES.tolist()
        assert outputs["count"].tolist() == [5]
        async with compilation.burst() as burst:
            assert (await burst.compute(IMAGE))["boxes"].tolist() == BOXES.tolist()
            fake_device.answer({"boxes": BOXES + 1, "count": [4]})
            seen = [result.outputs["boxes"].copy() async for result in burst.map([IMAGE] * 3)]
        assert [boxes.tolist() for boxes in seen] == [(BOXES + 1).tolist()] * 3
        fake_device.behave()
        assert not (await compilation.compute(IMAGE))["boxes"].any()


async def test_a_function_of_the_test_runs_in_the_test_with_its_closure(fake_device: FakeDevice) -> None:
    calls: list[tuple[int, NDArray[Any]]] = []

    def doubled(inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        calls.append((os.getpid(), inputs["x"]))
        return {"y": inputs["x"] * 2}

    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model(fake_model()), devices=(fake_device.name,), instances=2)
        fake_device.answer(doubled)
        async with compilation.burst() as burst, anyio.create_task_group() as tasks:

            async def one(number: int) -> None:
                x = np.full((1, 16), number, np.float32)
                assert (await burst.compute({"x": x}))["y"].tolist() == (x * 2).tolist()
                assert (await compilation.compute({"x": x}))["y"].tolist() == (x * 2).tolist()

            for number in range(4):
                tasks.start_soon(one, number)
    assert len(calls) == 8
    assert {pid for pid, _ in calls} == {os.getpid()}
    assert not any(x.flags.writeable for _, x in calls)


async def test_a_list_gives_one_answer_after_another_and_the_last_stays(fake_device: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model(fake_model()), devices=(fake_device.name,))
        ones = np.ones((1, 16), np.float32)
        fake_device.answer([{"y": ones}, lambda inputs: {"y": inputs["x"] + 5}, {"y": ones * 3}])
        found = [(await compilation.compute({"x": ones}))["y"][0, 0] for _ in range(4)]
        assert found == [1, 6, 3, 3]


async def test_what_a_function_raises_reaches_the_caller_and_the_test(fake_device: FakeDevice) -> None:
    def broken(inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        raise KeyError("no such camera")

    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model(fake_model()), devices=(fake_device.name,))
        fake_device.answer(broken)
        with pytest.raises(aionn.ExecutionError, match=r"the function given to answer\(\) raised KeyError: .*no such camera"):
            await compilation.compute({"x": np.ones((1, 16), np.float32)})
        (error,) = fake_device.answer_errors()
        assert isinstance(error, KeyError)
        assert fake_device.answer_errors() == []
        fake_device.answer(lambda inputs: {"y": inputs["x"]})
        assert (await compilation.compute({"x": np.ones((1, 16), np.float32)}))["y"].all(), "the driver goes on"


@pytest.mark.parametrize(("ends", "kind"), [(lambda: pytest.fail("odd input"), "Failed"), (lambda: sys.exit("odd input"), "SystemExit")])
async def test_a_function_that_ends_the_test_or_the_program_is_told_like_others(
    fake_device: FakeDevice, ends: Callable[[], Any], kind: str
) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model(fake_model()), devices=(fake_device.name,))
        fake_device.answer(lambda inputs: ends())
        for _ in range(2):
            with pytest.raises(aionn.ExecutionError, match=rf"the function given to answer\(\) raised {kind}: .*odd input"):
                await asyncio.wait_for(compilation.compute({"x": np.ones((1, 16), np.float32)}), 20)
        assert [type(error).__name__ for error in fake_device.answer_errors()] == [kind] * 2


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"boxes": BOXES}, r"answer\(\) gives the outputs \['boxes'\]; give exactly those of the model, \['boxes', 'count'\]"),
        ({"boxes": BOXES, "count": [5], "z": 1}, r"\['boxes', 'count', 'z'\]; give exactly"),
        ({"boxes": BOXES[0], "count": [5]}, r"output 'boxes' the shape \(5, 4\), but the model declares \(1, 5, 4\)"),
        ({"boxes": BOXES.astype(np.float64), "count": [5]}, r"output 'boxes' as float64, but the model declares float32; use .astype"),
        (lambda inputs: [BOXES], r"the function given to answer\(\) returned list; return a dict of arrays"),
    ],
)
async def test_an_answer_that_does_not_fit_the_model_is_one_sentence(fake_device: FakeDevice, answer: Any, sentence: str) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model(DETECTOR), devices=(fake_device.name,))
        fake_device.answer(answer)
        with pytest.raises(aionn.ExecutionError, match=sentence):
            await compilation.compute(IMAGE)
        assert len(fake_device.answer_errors()) == 1


@pytest.mark.parametrize("answer", [5, [], [{}, "x"], "boxes"])
async def test_what_is_no_answer_is_refused_at_once(fake_device: FakeDevice, answer: Any) -> None:
    with pytest.raises(aionn.CallerError, match=r"answer\(\) got"):
        fake_device.answer(answer)


async def test_zeros_have_the_declared_shapes_and_open_dimensions_follow_the_inputs(fake_device: FakeDevice) -> None:
    content = fake_model({"image": (("N", 3, 0), "uint8")}, {"boxes": (("N", 0, 4), "float32"), "scale": ((), "float64")})
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model(content), devices=(fake_device.name,))
        for batch in (2, 5):
            outputs = await compilation.compute({"image": np.ones((batch, 3, 7), np.uint8)})
            assert {name: (array.shape, array.dtype.name, bool(array.any())) for name, array in outputs.items()} == {
                "boxes": ((batch, 1, 4), "float32", False),
                "scale": ((), "float64", False),
            }
        fake_device.answer(lambda inputs: {"boxes": np.ones((len(inputs["image"]), 9, 4), np.float32), "scale": 2.5})
        outputs = await compilation.compute({"image": np.ones((3, 3, 7), np.uint8)})
        assert outputs["boxes"].shape == (3, 9, 4)
        assert outputs["boxes"].all()
        assert outputs["scale"] == 2.5


async def test_a_fake_model_from_a_cache_still_answers_zeros(fake_device: FakeDevice, tmp_path: Path) -> None:
    async with aionn.Runtime(start=(), state_dir=tmp_path / "state") as runtime:
        for outcome in ("MISS", "HIT"):
            compilation = await runtime.compile(model(DETECTOR), devices=(fake_device.name,), cache_dir=tmp_path / "cache")
            assert [one.kind.name for one in compilation.outcomes] == [outcome]
            assert not (await compilation.compute(IMAGE))["boxes"].any()


async def test_a_real_engine_refuses_a_fake_model(fake_device: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        for engine in ("onnxruntime", "reference"):
            with pytest.raises(aionn.CompilationError, match="Fake"):
                await runtime.compile(model(fake_model()), devices=(engine,))


async def test_the_identity_model_repeats_its_inputs_again_after_an_answer(fake_device: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(model(identity_model()), devices=(fake_device.name,))
        x = np.full((1, 16), 7, np.float32)
        fake_device.answer({"input_out": x * 0})
        assert not (await compilation.compute({"input": x}))["input_out"].any()
        fake_device.behave()
        assert (await compilation.compute({"input": x}))["input_out"].tolist() == x.tolist()


def test_errors_that_no_test_looks_at_fail_it() -> None:
    async def use(fake: FakeDevice) -> None:
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(model(fake_model()), devices=(fake.name,))
            fake.answer(lambda inputs: {"y": inputs["typo"]})
            with pytest.raises(aionn.ExecutionError):
                await compilation.compute({"x": np.ones((1, 16), np.float32)})

    with pytest.raises(AssertionError, match=r"did not look at answer_errors.*KeyError: 'typo'") as caught, FakeDevice() as fake:
        aionn.run(use, fake)
    assert isinstance(caught.value.__cause__, KeyError)


def test_closing_ends_a_run_whose_function_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gets its answer at once. The function's thread is named, because no one can end it."""
    monkeypatch.setattr("aionn.testing.answers._CLOSES_WITHIN_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    def stuck(inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        entered.set()
        leave.wait(30)
        return {"y": inputs["x"]}

    async def use(fake: FakeDevice) -> None:
        async with aionn.Runtime(start=()) as runtime, anyio.create_task_group() as tasks:
            compilation = await runtime.compile(model(fake_model()), devices=(fake.name,))
            fake.answer(stuck)

            async def call() -> None:
                with pytest.raises(aionn.ExecutionError, match="the fake device was closed before"):
                    await compilation.compute({"x": np.ones((1, 16), np.float32)})

            tasks.start_soon(call)
            await anyio.to_thread.run_sync(entered.wait, 30)
            with pytest.raises(AssertionError, match="has not returned"):
                fake.__exit__(None, None, None)

    fake = FakeDevice()
    fake.__enter__()
    aionn.run(use, fake)
    leave.set()


def test_the_socket_is_reached_in_a_folder_with_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("long" * 30)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def use(fake: FakeDevice) -> None:
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(model(fake_model()), devices=(fake.name,))
            fake.answer({"y": np.ones((1, 16), np.float32)})
            assert (await compilation.compute({"x": np.zeros((1, 16), np.float32)}))["y"].all()

    with FakeDevice() as fake:
        aionn.run(use, fake)
    monkeypatch.setattr("tempfile.tempdir", None)
