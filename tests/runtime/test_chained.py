"""Chains within one driver: a start that depends on another one lies in a queue of the driver, which runs it without the app's loop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import onnx.parser
import pytest

import aionn
from aionn.driver.prepared_model import LANES
from aionn.runtime.compilation import parts_of
from aionn.runtime.executing.link import Link
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.scaled_model import scaled_model

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

waits_in_driver = pytest.mark.skipif(not LANES, reason="without lanes the app waits, and sends the second step then")

X = np.arange(16, dtype=np.float32)[None]
ORT = "onnxruntime"


def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": (1, 16)}, outputs=["y"]))


def double() -> aionn.Model:
    return aionn.Model.from_onnx(scaled_model(np.full((1, 16), 2, np.float32)))


async def connected(*compilations: aionn.Compilation) -> None:
    """Let the bursts of their starts be connected."""
    for compilation in compilations:
        await compilation.start({"x": X})


@pytest.fixture
async def fakes(fake: FakeDevice) -> AsyncIterator[list[aionn.Compilation]]:
    """Three compilations on one driver. The tests let this driver hang or fail."""
    async with aionn.Runtime() as runtime:
        found = [await runtime.compile(model(), devices=(fake.name,)) for _ in range(3)]
        await connected(*found)
        yield found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each request that went over a burst was sent to run after."""
    found: list[int] = []
    start = Link.start

    def noted(link: Link, execution: Any, body: bytes, after: int) -> int:
        found.append(after)
        return start(link, execution, body, after)

    monkeypatch.setattr(Link, "start", noted)
    return found


def wait_without_the_loop(memory: aionn.Memory, expected: Any, timeout_s: float = 10.0) -> None:
    """Hold the loop until a driver has written this."""
    until = time.monotonic() + timeout_s
    while not np.array_equal(memory.array(np.float32, (1, 16)), expected):
        assert time.monotonic() < until, "the loop stands still, and the chain with it"
        os.sched_yield()


@waits_in_driver
async def test_three_steps_run_while_the_apps_loop_stands_still(sent: list[int], fake: FakeDevice, fakes: list[aionn.Compilation]) -> None:
    with aionn.Memory.allocate(64) as one, aionn.Memory.allocate(64) as two, aionn.Memory.allocate(64) as three:
        for turn in range(4):
            sent.clear()
            fake.hang()
            first = fakes[0].start({"x": X + turn}, outputs={"y": one})
            second = fakes[1].start({"x": one}, outputs={"y": two}, after=(first,))
            third = fakes[2].start({"x": two}, outputs={"y": three}, after=(second,))
            assert [bool(after) for after in sent] == [False, True, True]
            fake.behave()
            if turn:  # a driver asks the app for each memory that it sees for the first time
                wait_without_the_loop(three, X + turn)
            np.testing.assert_array_equal((await third)["y"], X + turn)
            assert first.done()
            assert second.done()


async def test_two_steps_after_one_and_one_of_its_compilation(sent: list[int], fake: FakeDevice, fakes: list[aionn.Compilation]) -> None:
    first, second, third = fakes
    sent.clear()
    fake.hang()
    with aionn.Memory.allocate(64) as between:
        before = first.start({"x": X}, outputs={"y": between})
        after = [one.start({"x": between}, after=(before,)) for one in (second, third, first)]
        await fake.heard("run")
        assert not any(event.done() for event in after)
        assert sent[1:] == [sent[1]] * 3
        assert sent[1]
        fake.behave()
        for event in after:
            np.testing.assert_array_equal((await event)["y"], X)


async def test_a_step_whose_predecessor_fails_has_its_error_and_never_runs(fake: FakeDevice, fakes: list[aionn.Compilation]) -> None:
    first, second, third = fakes
    ran: list[float] = []

    def run(inputs: Any) -> Any:
        ran.append(float(inputs["x"][0, 0]))
        if ran[-1] == 1:
            raise ValueError("on purpose")
        return {"y": inputs["x"]}

    fake.answer(run)
    bad = first.start({"x": np.full((1, 16), 1, np.float32)})
    after = second.start({"x": np.full((1, 16), 2, np.float32)}, after=(bad,))
    last = third.start({"x": np.full((1, 16), 3, np.float32)}, after=(after,))
    with pytest.raises(aionn.ExecutionError, match=f"{after.name}.*depends") as caught:
        await last
    assert f"{bad.name!r}, on which" in str(caught.value.__cause__)
    with pytest.raises(aionn.ExecutionError, match=bad.name) as caught:
        await after
    assert "on purpose" in str(caught.value.__cause__)
    with pytest.raises(aionn.ExecutionError, match="on purpose"):
        await bad
    np.testing.assert_array_equal((await third.start({"x": X * 0 + 4}))["y"], X * 0 + 4)
    assert ran == [1, 4]
    assert len(fake.answer_errors()) == 1


async def test_a_deadline_and_a_cancellation_keep_a_waiting_step_from_running(fake: FakeDevice, fakes: list[aionn.Compilation]) -> None:
    first, second, third = fakes
    fake.hang()
    with aionn.Memory.allocate(64) as late, aionn.Memory.allocate(64) as left:
        before = first.start({"x": X})
        await fake.heard("run")
        too_late = second.start({"x": X}, outputs={"y": late}, after=(before,), timeout_s=0.05)
        cancelled = third.start({"x": X}, outputs={"y": left}, after=(before,))
        behind = third.start({"x": X}, after=(before,))
        assert cancelled.cancel()
        with pytest.raises(aionn.DeadlineError):
            await too_late
        assert not before.done()
        fake.behave()
        await before
        np.testing.assert_array_equal((await behind)["y"], X)
        np.testing.assert_array_equal((await second.start({"x": X}))["y"], X)
        for memory in (late, left):
            assert not memory.array(np.float32, (1, 16)).any(), "the step ran"


async def test_a_predecessor_that_is_cancelled_fails_the_step_at_once(fake: FakeDevice, fakes: list[aionn.Compilation]) -> None:
    first, second, _ = fakes
    fake.hang()
    before = first.start({"x": X})
    await fake.heard("run")
    after = second.start({"x": X}, after=(before,))
    before.cancel()
    with pytest.raises(aionn.ExecutionError, match=before.name):
        await after
    fake.behave()
    np.testing.assert_array_equal((await second.start({"x": X}))["y"], X)


async def test_the_death_of_the_driver_between_two_steps_ends_both(fake: FakeDevice, fakes: list[aionn.Compilation]) -> None:
    first, second, third = fakes
    fake.hang()
    before = first.start({"x": X})
    pid = await fake.heard("run")
    after = second.start({"x": X}, after=(before,))
    last = third.start({"x": X}, after=(after,))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(aionn.DriverDiedError):
        await before
    for event in (after, last):
        with pytest.raises(aionn.AionnError):
            await event
    fake.behave()
    with aionn.Memory.allocate(64) as between:
        before = first.start({"x": X}, outputs={"y": between})
        np.testing.assert_array_equal((await second.start({"x": between}, after=(before,)))["y"], X)


@pytest.mark.parametrize("closes", ["first", "second"])
async def test_closing_a_compilation_ends_the_chain(fake: FakeDevice, fakes: list[aionn.Compilation], closes: str) -> None:
    first, second, third = fakes
    fake.hang()
    before = first.start({"x": X})
    after = second.start({"x": X}, after=(before,))
    last = third.start({"x": X}, after=(after,))
    await (first if closes == "first" else second).aclose()
    for event in (before, after, last):
        if closes == "first" or event is not before:
            with pytest.raises(aionn.AionnError):
                await event
    fake.behave()
    if closes == "second":
        await before
    np.testing.assert_array_equal((await third.start({"x": X}))["y"], X)


@waits_in_driver
async def test_device_memory_lies_between_two_steps(sent: list[int]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        first, second = [await runtime.compile(double(), devices=(ORT,)) for _ in range(2)]
        await connected(first, second)
        between = await runtime.allocate(inputs=[(second, "x")], outputs=[(first, "y")])
        with aionn.Memory.allocate(64) as end:
            for turn in range(4):
                sent.clear()
                before = first.start({"x": X * turn}, outputs={"y": between})
                after = second.start({"x": between}, outputs={"y": end}, after=(before,))
                if turn:
                    wait_without_the_loop(end, X * 4 * turn)
                await after
                assert len(sent) == 2
                del before, after
        await between.aclose()


async def test_a_first_step_that_needs_more_room_is_waited_for(sent: list[int]) -> None:
    """The first step fails once in the driver, for want of room. The app repeats it, and then sends the second step again."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n] x) => (float[m] y, float[1] sum) {
            zero = Constant<value_ints = [0]>()
            limit = Constant<value_float = 0.5>()
            positive = Greater(x, limit)
            y = Compress<axis = 0>(x, positive)
            sum = ReduceSum<keepdims = 1>(x, zero)
        }"""
    filtering = aionn.Model.from_onnx(onnx.parser.parse_model(text).SerializeToString())
    async with aionn.Runtime() as runtime:
        first = await runtime.compile(filtering, devices=(ORT,))
        second = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (1,)}, outputs=["y"])), devices=(ORT,))
        await first.start({"x": np.zeros(4000, np.float32)})
        await second.start({"x": np.zeros(1, np.float32)})
        sent.clear()
        with aionn.Memory.allocate(4) as between:
            x = np.ones(4000, np.float32)
            before = first.start({"x": x}, outputs={"sum": between})
            after = second.start({"x": between}, after=(before,))
            np.testing.assert_array_equal((await after)["y"], [4000])
            np.testing.assert_array_equal((await before)["y"], x)
    assert len(sent) == 4, "one of them was not sent again, so this shows nothing"


@waits_in_driver
async def test_a_first_step_that_only_the_app_finds_wrong_fails_the_second_one() -> None:
    """The driver has run both. The second answer is taken first, and settles nothing yet."""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[a, b] x) => (float[p, q] y) { y = Transpose(x) }'
    turning = aionn.Model.from_onnx(onnx.parser.parse_model(text).SerializeToString())
    async with aionn.Runtime() as runtime:
        first, second = [await runtime.compile(each, devices=("reference",)) for each in (turning, model())]
        await connected(first, second)
        starts = parts_of(second).starts
        with aionn.Memory.allocate(64) as between, aionn.Memory.allocate(64) as end:
            await first.start({"x": X}, outputs={"y": between.shaped((16, 1))})
            await second.start({"x": X}, outputs={"y": end})
            wrong = after = None
            while after is None or wrong is None or wrong.done():  # an answer may come while the request is being sent
                wrong = first.start({"x": X}, outputs={"y": between.shaped((2, 8))})
                after = second.start({"x": X + 1}, outputs={"y": end}, after=(wrong,))
            wait_without_the_loop(end, X + 1)
            link = starts.connection.link
            assert link is not None
            while link.in_flight:
                link.controller.caller.event()
            assert not after.done()
            with pytest.raises(aionn.ExecutionError, match=r"shape \(16, 1\).*\(2, 8\)"):
                await wrong
            with pytest.raises(aionn.ExecutionError, match=wrong.name):
                await after


async def test_a_swap_between_two_steps(sent: list[int]) -> None:
    async with aionn.Runtime() as runtime:
        first, second = [await runtime.compile(double(), devices=(ORT,)) for _ in range(2)]
        await connected(first, second)
        triple = aionn.Model.from_onnx(scaled_model(np.full((1, 16), 3, np.float32)))
        with aionn.Memory.allocate(64) as between:
            before = first.start({"x": X}, outputs={"y": between})
            await runtime.swap(second, triple)
            np.testing.assert_array_equal((await second.start({"x": between}, after=(before,)))["y"], X * 6)
            before = first.start({"x": X}, outputs={"y": between})
            after = second.start({"x": between}, after=(before,))
            await runtime.swap(first, triple)
            np.testing.assert_array_equal((await after)["y"], X * 6)
            before = first.start({"x": X}, outputs={"y": between})
            np.testing.assert_array_equal((await second.start({"x": between}, after=(before,)))["y"], X * 9)


@pytest.mark.parametrize("device", [ORT, "reference"])
async def test_a_step_after_several_and_one_on_another_driver_go_through_the_loop(device: str, sent: list[int]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        first = await runtime.compile(double(), devices=(ORT,))
        second = await runtime.compile(double(), devices=(device,))
        await connected(first, second)
        with aionn.Memory.allocate(64) as one, aionn.Memory.allocate(64) as two:
            before = [first.start({"x": X * n}, outputs={"y": memory}) for n, memory in ((1, one), (2, two))]
            after = second.start({"x": two}, outputs={"y": one}, after=before)
            last = second.start({"x": one}, after=(after,))
            np.testing.assert_array_equal((await last)["y"], X * 16)
            del before, after, last


async def test_many_chains_at_once_keep_their_order() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        steps = [await runtime.compile(double(), devices=(ORT,), instances=2) for _ in range(3)]
        await connected(*steps)
        memories = [[aionn.Memory.allocate(64) for _ in range(2)] for _ in range(20)]
        for turn in range(3):
            ends = []
            for number, (one, two) in enumerate(memories):
                x = X + number + turn
                event = steps[number % 3].start({"x": x}, outputs={"y": one})
                event = steps[(number + 1) % 3].start({"x": one}, outputs={"y": two}, after=(event,))
                ends.append((steps[(number + 2) % 3].start({"x": two}, after=(event,)), x))
            for event, x in ends:
                np.testing.assert_array_equal((await event)["y"], x * 8)
            del ends, event
        for pair in memories:
            for memory in pair:
                memory.close()


async def test_a_chain_whose_task_is_cancelled_goes_on(fakes: list[aionn.Compilation]) -> None:
    first, second, _ = fakes
    with aionn.Memory.allocate(64) as between:
        before = first.start({"x": X}, outputs={"y": between})
        after = second.start({"x": between}, after=(before,))
        waiting = asyncio.create_task(_await(after))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        np.testing.assert_array_equal((await after)["y"], X)


async def _await(event: aionn.Event) -> Any:
    return await event
