"""A caller is cancelled at each point where it awaits, one after the other; what comes after it stays right.

The point is not found by time: `cancelled_at` counts how often the call gives control back to the loop and cancels its
scope at the n-th time, for n = 1, 2, ... until the call comes to its end uncancelled.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest

import aionn
from tests.journeys.silero import Directly, assert_same, still, windows
from tests.leaks import driver_pids, leak_check

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

T = TypeVar("T")
MOST_POINTS = 400  # a call with more awaits than this never ends


@types.coroutine
def _counting(call: Coroutine[Any, Any, T], at: int, scope: anyio.CancelScope) -> Generator[Any, Any, T]:
    """Drive `call` and cancel `scope` when it suspends for the `at`-th time."""
    suspended = 0
    answer: Any = None
    thrown: BaseException | None = None
    while True:
        try:
            waits_for = call.throw(thrown) if thrown is not None else call.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        thrown = None
        suspended += 1
        if suspended == at:
            scope.cancel()
        try:
            answer = yield waits_for
        except BaseException as error:
            thrown = error


async def cancelled_at(at: int, call: Callable[[], Coroutine[Any, Any, object]]) -> bool:
    """Run the call with a cancellation at its `at`-th await. False if it ended before."""
    with anyio.CancelScope() as scope:
        await _counting(call(), at, scope)
    return scope.cancel_called


async def at_every_point(call: Callable[[], Coroutine[Any, Any, object]], after: Callable[[], Awaitable[None]]) -> int:
    """Cancel the call at each of its awaits, with `after` in between. How many there are."""
    for at in range(1, MOST_POINTS):
        was_cancelled = await cancelled_at(at, call)
        await after()
        if not was_cancelled:
            return at - 1
    pytest.fail(f"the call still awaits after {MOST_POINTS} points")


async def test_a_cancelled_compute_leaves_both_paths_right_and_every_slot_free(silero_path: Path, silero: aionn.Model) -> None:
    frames = [{"input": window, "state": still()} for window in windows(8, seed=2)]
    direct = Directly(silero_path)
    expected = [direct.run(frame) for frame in frames]
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        async with compilation.burst() as burst:
            turn = 0

            async def all_is_well() -> None:
                nonlocal turn
                turn += 1
                index = turn % len(frames)
                assert_same(await burst.compute(frames[index]), expected[index])
                assert_same(await compilation.compute(frames[-index]), expected[-index])

            with anyio.fail_after(60):
                for compute in (burst.compute, compilation.compute):
                    while not await at_every_point(lambda: compute(frames[0]), all_is_well):  # noqa: B023
                        pass  # it was answered without an await
        assert len(driver_pids()) == 1


async def test_a_cancelled_frame_gives_its_slot_back(silero_path: Path, silero: aionn.Model) -> None:
    inputs = {"input": next(windows(1)), "state": still()}
    expected = Directly(silero_path).run(inputs)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        async with compilation.burst() as burst:

            async def one_frame() -> None:
                async with burst.frame() as frame:
                    for name, array in inputs.items():
                        frame[name][...] = array
                    assert_same(await burst.compute(frame), expected)

            with anyio.fail_after(60):
                while not await at_every_point(one_frame, one_frame):
                    pass  # it was answered without an await
                # Far more of them than any burst has slots: a slot lost each time would be missed by now.
                for _ in range(200):
                    with anyio.CancelScope() as scope:
                        scope.cancel()
                        await one_frame()
                await one_frame()


async def test_a_cancelled_compilation_leaves_the_runtime_able_to_compile(silero_path: Path, silero: aionn.Model) -> None:
    inputs = {"input": next(windows(1)), "state": still()}
    expected = Directly(silero_path).run(inputs)
    async with leak_check(), aionn.Runtime() as runtime:

        async def compile_once() -> None:
            compilation = await runtime.compile(silero, devices=("onnxruntime",))
            assert_same(await compilation.compute(inputs), expected)

        await compile_once()
        serving = driver_pids()  # others may be served by it meanwhile: a caller that leaves does not take it along
        with anyio.fail_after(60):
            assert await at_every_point(compile_once, compile_once) >= 1
        assert driver_pids() == serving
        assert len(serving) == 1


async def test_a_start_that_is_cancelled_leaves_no_process(silero_path: Path, silero: aionn.Model) -> None:
    points = 0

    async def whole_life() -> None:
        async with aionn.Runtime() as runtime:
            await runtime.compile(silero, devices=("onnxruntime",))

    with anyio.fail_after(100):
        for at in (1, 2, 3, 5, 8, 13, 21, 34):
            async with leak_check():
                points += await cancelled_at(at, whole_life)
    assert points >= 1


async def test_a_deadline_of_the_callers_own_is_only_a_timeout(silero_path: Path, silero: aionn.Model) -> None:
    inputs = {"input": next(windows(1)), "state": still()}
    expected = Directly(silero_path).run(inputs)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(silero, devices=("onnxruntime",))
        for delay_s in np.linspace(0, 2e-3, 20):
            with anyio.move_on_after(float(delay_s)):
                await compilation.compute(inputs)
            assert_same(await compilation.compute(inputs), expected)
