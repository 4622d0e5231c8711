"""A frame: from the app's array to the driver's engine and back, over a burst and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from tests.journeys.silero import Directly, assert_same, still, windows
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio

FRAMES = 60


def in_shared_memory(array: NDArray[Any]) -> bool:
    """Whether the array's bytes lie in a shared mapping of one of aionn's memfds."""
    begin = array.__array_interface__["data"][0]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            span, perms, *_ = line.split()
            first, last = (int(edge, 16) for edge in span.split("-"))
            if first <= begin and begin + array.nbytes <= last:
                return "memfd:aionn" in line and perms.endswith("s")
    return False


async def test_a_stream_over_a_burst_answers_what_onnx_runtime_answers(silero_path: Path, silero: aionn.Model) -> None:
    expected = Directly(silero_path).stream(FRAMES)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        async with compilation.burst() as burst:
            state = still()
            for window, answer in zip(windows(FRAMES), expected, strict=True):
                outputs = await burst.compute({"input": window, "state": state})
                assert_same(outputs, answer)
                state[...] = outputs["stateN"]
            del outputs


async def test_a_frame_is_written_into_shared_memory_and_its_outputs_are_read_there(silero_path: Path, silero: aionn.Model) -> None:
    expected = Directly(silero_path).stream(FRAMES)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        async with compilation.burst() as burst:
            state = still()
            for window, answer in zip(windows(FRAMES), expected, strict=True):
                async with burst.frame() as frame:
                    assert all(in_shared_memory(frame[name]) for name in ("input", "state"))
                    frame["input"][...] = window
                    frame["state"][...] = state
                    outputs = await burst.compute(frame)
                    assert all(in_shared_memory(outputs[name]) for name in ("output", "stateN"))
                    assert_same(outputs, answer)
                    state[...] = outputs["stateN"]
            del frame, outputs


async def test_compute_without_a_burst_answers_the_same_and_its_outputs_are_the_callers(silero_path: Path, silero: aionn.Model) -> None:
    expected = Directly(silero_path).stream(FRAMES)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        answers = []
        state: NDArray[Any] = still()
        for window in windows(FRAMES):
            answers.append(await compilation.compute({"input": window, "state": state}))
            state = answers[-1]["stateN"]
        assert not any(in_shared_memory(array) for answer in answers for array in answer.values())
        for found, answer in zip(answers, expected, strict=True):  # none was overwritten by a later one
            assert_same(found, answer)


async def test_both_paths_give_bit_for_bit_the_same(silero_path: Path, silero: aionn.Model) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        inputs = {"input": next(windows(1)), "state": still()}
        slow = await compilation.compute(inputs)
        async with compilation.burst() as burst:
            fast = await burst.compute(inputs)
            assert {name: array.tobytes() for name, array in fast.items()} == {name: array.tobytes() for name, array in slow.items()}
            del fast


async def test_a_strided_array_is_copied_and_counts_the_same(silero_path: Path, silero: aionn.Model) -> None:
    window = next(windows(1))
    every_other = np.repeat(window, 2, axis=1)[:, ::2]
    reversed_twice = still()[::-1, :, ::-1]
    expected = Directly(silero_path).run({"input": window, "state": still()})
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        assert_same(await compilation.compute({"input": every_other, "state": reversed_twice}), expected)
        async with compilation.burst() as burst:
            assert_same(await burst.compute({"input": every_other, "state": reversed_twice}), expected)


async def test_many_callers_at_once_each_get_their_own_answer(silero_path: Path, silero: aionn.Model) -> None:
    inputs = [{"input": window, "state": still()} for window in windows(24, seed=1)]
    direct = Directly(silero_path)
    expected = [direct.run(one) for one in inputs]
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))

        async def slowly(index: int) -> None:
            assert_same(await compilation.compute(inputs[index]), expected[index])

        async def over_a_burst(first: int) -> None:
            async with compilation.burst() as burst:
                for index in range(first, len(inputs), 3):
                    assert_same(await burst.compute(inputs[index]), expected[index])

        async with anyio.create_task_group() as callers:
            for index in range(len(inputs)):
                callers.start_soon(slowly, index)
            for first in range(3):
                callers.start_soon(over_a_burst, first)


async def test_a_call_tells_its_device_and_its_timing_when_asked(silero_path: Path, silero: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        inputs = {"input": next(windows(1)), "state": still()}
        timed = await compilation.compute(inputs, measure_timing=True)
        assert timed.device == "onnxruntime"
        assert timed.timing is not None
        assert 0 <= timed.timing.on_device_us <= timed.timing.in_driver_us < 60_000_000
