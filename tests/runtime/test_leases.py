"""`burst.lease()` and `aionn.Item`: frames that a stream owns, by whatever way it ends. Real driver processes, a fake engine."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from itertools import product
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aionn
from aionn.errors import MemoryAllocationError
from aionn.memory.region import PAGE_BYTES, Region
from aionn.testing import FakeDevice

PAGE_FRAMES = PAGE_BYTES // 128
"""So many frames of this model fit a page. While a request is in flight, the burst allocates no more for leases."""

pytestmark = pytest.mark.anyio


def number_in(result: aionn.StreamResult) -> int:
    return int(result.outputs["input_out"][0, 0])


async def wait(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, 30)


class Source:
    """A source of leased frames in either manner. `produced` counts what it has yielded."""

    def __init__(self, burst: aionn.Burst, count: int, error: Exception | None = None) -> None:
        self._burst = burst
        self._count = count
        self._error = error
        self.produced = 0

    async def in_a_task(self) -> AsyncIterator[aionn.Item]:
        for number in range(self._count):
            frame = await self._burst.lease()
            frame["input"][...] = number
            self.produced += 1
            yield aionn.Item(frame, tag=str(number))
        frame = await self._burst.lease()  # held when the error comes
        if self._error is not None:
            raise self._error

    def in_a_thread(self) -> Iterator[aionn.Item]:
        for number in range(self._count):
            frame = self._burst.lease()
            frame["input"][...] = number
            self.produced += 1
            yield aionn.Item(frame, str(number))
        frame = self._burst.lease()
        if self._error is not None:
            raise self._error


MANNERS: list[Callable[[Source], Any]] = [Source.in_a_task, Source.in_a_thread]


def all_are_back(burst: aionn.Burst) -> bool:
    gc.collect()
    statistics = burst.statistics()
    return statistics["pinned_frames"] == 0 and statistics["free_frames"] == statistics["frames"]


# --- what a stream does with a leased frame ---------------------------------------------------------------------------


@pytest.mark.parametrize("manner", MANNERS)
async def test_leased_frames_are_sent_without_a_copy_and_come_back_with_tag_and_contents(
    burst: aionn.Burst, manner: Callable[[Source], Any]
) -> None:
    async for result in burst.map(manner(Source(burst, 30)), depth=3):
        assert result.tag == str(result.seq)
        assert number_in(result) == result.seq
        assert list(result.inputs) == ["input"]
        np.testing.assert_array_equal(result.inputs["input"], np.full((1, 16), result.seq, np.float32))
        last = result.seq
    del result
    assert last == 29
    assert burst.statistics()["copied_bytes"] == 0
    assert burst.statistics()["computed"] == 30
    await anyio.wait_all_tasks_blocked()
    assert all_are_back(burst)


async def test_a_tag_is_any_object_and_none_without_an_item(burst: aionn.Burst) -> None:
    picture = np.zeros((2, 2))
    inputs = {"input": np.ones((1, 16), np.float32)}
    results = [result async for result in burst.map([aionn.Item(inputs, picture), inputs, aionn.Item(inputs)])]
    assert results[0].tag is picture
    assert [result.tag for result in results[1:]] == [None, None]
    assert all(result.inputs is inputs for result in results)


async def test_inputs_and_outputs_of_a_leased_frame_keep_their_values_while_they_are_held(burst: aionn.Burst) -> None:
    held = [result async for result in burst.map(Source(burst, 40).in_a_thread(), depth=3)]
    assert [int(result.inputs["input"][0, 0]) for result in held] == list(range(40))
    assert [number_in(result) for result in held] == list(range(40))


async def test_a_bare_leased_frame_and_one_of_an_async_with_block_are_owned_alike(burst: aionn.Burst) -> None:
    async def camera() -> AsyncIterator[aionn.Frame]:
        frame = await burst.lease()
        frame["input"] = np.full((1, 16), 1, np.float32)
        yield frame
        async with burst.frame() as frame:
            frame["input"][...] = 2
            yield frame

    assert [number_in(result) async for result in burst.map(camera(), depth=2)] == [1, 2]
    await anyio.wait_all_tasks_blocked()
    assert all_are_back(burst)


async def test_memory_that_stands_for_an_input_of_a_leased_frame_is_used(burst: aionn.Burst) -> None:
    values = np.full((1, 16), 5, np.float32)
    with aionn.Memory.allocate(values.nbytes) as memory:
        memory.view()[:] = values.tobytes()
        frame = await burst.lease()
        frame["input"] = memory
        (result,) = [result async for result in burst.map([frame])]
        assert number_in(result) == 5
        assert result.inputs["input"] is memory
        del result
    assert all_are_back(burst)


# --- every way for a frame to end ------------------------------------------------------------------------------------


async def consume(stream: Any) -> BaseException | None:
    """Take all results; the error that ended them, if one did."""
    try:
        async for _ in stream:
            pass
    except (aionn.AionnError, OSError) as error:
        return error
    return None


async def everything(fake: FakeDevice, stream: Any, policy: str) -> BaseException | None:
    error = await consume(stream)
    assert error is None or isinstance(error, OSError) or policy == "reject", error
    return error


async def an_early_end(fake: FakeDevice, stream: Any, policy: str) -> None:
    async with aclosing(stream):
        assert (await anext(stream)).seq == 0


async def a_cancelled_consumer(fake: FakeDevice, stream: Any, policy: str) -> None:
    fake.hang()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume, stream)
        await fake.heard("run")
        tasks.cancel_scope.cancel()


async def a_late_answer(fake: FakeDevice, stream: Any, policy: str) -> BaseException | None:
    fake.hang()
    error = await consume(stream)
    assert policy == "latest" or isinstance(error, aionn.DeadlineError), error
    return error


async def a_failing_engine(fake: FakeDevice, stream: Any, policy: str) -> BaseException | None:
    fake.fail()
    error = await consume(stream)
    assert isinstance(error, aionn.ExecutionError), error
    return error


async def a_dying_driver(fake: FakeDevice, stream: Any, policy: str) -> BaseException | None:
    fake.crash()
    error = await consume(stream)
    assert isinstance(error, aionn.DriverDiedError), error
    return error


WAYS: list[Callable[..., Any]] = [everything, an_early_end, a_cancelled_consumer, a_late_answer, a_failing_engine, a_dying_driver]


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("policy", ["block", "latest", "reject"])
async def test_each_frame_is_counted_once_and_comes_back_by_whatever_way_it_ends(
    burst: aionn.Burst, fake: FakeDevice, policy: Any, manner: Callable[[Source], Any]
) -> None:
    dropped = 0
    for way, error in product(WAYS, [None, OSError("the camera was unplugged")]):
        before = burst.statistics()
        source = Source(burst, 8, error)
        stream = burst.map(manner(source), policy=policy, depth=2, deadline_s=0.05 if way is a_late_answer else None)
        found = await way(fake, stream, policy)
        fake.behave()
        await stream.aclose()
        await burst.compute({"input": np.zeros((1, 16), np.float32)})  # the driver is done with all before
        await anyio.wait_all_tasks_blocked()
        after = burst.statistics()
        counted = {name: after[name] - before[name] for name in ("computed", "failed", "dropped")}
        counted["computed"] -= 1
        assert source.produced > 0
        assert sum(counted.values()) == source.produced, (way.__name__, counted)
        assert all_are_back(burst), (way.__name__, after)
        if way is not a_late_answer:  # there the driver itself may answer that it is too late
            assert (counted["failed"] > 0) == (way is a_failing_engine), (way.__name__, error, found, counted)
        dropped += counted["dropped"]
    assert dropped > 0


# --- frames that are not yielded, or wrongly -----------------------------------------------------------------------------


async def test_a_leased_frame_that_is_never_yielded_comes_back_when_it_is_collected(burst: aionn.Burst) -> None:
    frame = await burst.lease()
    assert burst.statistics()["pinned_frames"] == 1
    del frame
    gc.collect()
    await anyio.lowlevel.checkpoint()
    assert all_are_back(burst)

    def forget() -> None:
        burst.lease()["input"][...] = 1

    await anyio.to_thread.run_sync(forget)
    await anyio.wait_all_tasks_blocked()
    assert all_are_back(burst)


async def test_a_burst_that_is_closed_before_its_frame_is_yielded_says_so(compilation: aionn.Compilation) -> None:
    async with compilation.burst() as burst:
        frame = await burst.lease()
        place = frame["input"]
    place[...] = 1  # the memory is there as long as the view is
    sentence = "the burst of this frame was closed"
    with pytest.raises(aionn.CallerError, match=sentence):
        frame["input"]
    with pytest.raises(aionn.CallerError, match=sentence):
        frame["input"] = place
    async with compilation.burst() as other:
        with pytest.raises(aionn.CallerError, match="belongs to another burst; compute it with that one"):
            await anext(other.map([frame]))
    with pytest.raises(aionn.CallerError, match="the burst is not open, or was closed"):
        await burst.lease()
    with pytest.raises(aionn.CallerError, match="the burst is not open, or was closed"):
        await anyio.to_thread.run_sync(burst.lease)


async def test_a_frame_that_is_yielded_twice_ends_the_stream_and_corrupts_nothing(burst: aionn.Burst) -> None:
    async def camera() -> AsyncIterator[aionn.Frame]:
        frame = await burst.lease()
        frame["input"][...] = 1
        yield frame
        yield frame

    seen = []
    with pytest.raises(aionn.CallerError, match=r"this frame was yielded to a stream, which owns it since then"):
        async for result in burst.map(camera(), depth=2):
            seen.append(number_in(result))
    del result
    assert seen == [1]
    assert burst.statistics()["dropped"] == 1
    assert all_are_back(burst)


async def test_a_frame_of_another_burst_is_refused_and_stays_with_the_app(compilation: aionn.Compilation, burst: aionn.Burst) -> None:
    async with compilation.burst() as other:
        frame = await other.lease()
        frame["input"][...] = 4
        with pytest.raises(aionn.CallerError, match="belongs to another burst"):
            await anext(burst.map([frame]))
        assert [number_in(result) async for result in other.map([frame])] == [4]


async def test_a_frame_is_of_no_use_to_the_app_once_it_has_been_yielded(burst: aionn.Burst, fake: FakeDevice) -> None:
    sentence = "this frame was yielded to a stream"
    frame = await burst.lease()
    view = frame["input"]
    view[...] = 6
    fake.hang()
    async with anyio.create_task_group() as tasks:
        found: list[int] = []

        async def watch() -> None:
            found.extend([number_in(result) async for result in burst.map([frame])])

        tasks.start_soon(watch)
        await fake.heard("run")
        with pytest.raises(aionn.CallerError, match=sentence):
            frame["input"]
        with pytest.raises(aionn.CallerError, match=sentence):
            frame["input"] = np.zeros((1, 16), np.float32)
        with pytest.raises(aionn.CallerError, match=sentence):
            await burst.compute(frame)
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 9
        fake.behave()
    assert found == [6]


async def test_a_frame_may_be_computed_before_it_is_yielded(burst: aionn.Burst) -> None:
    frame = await burst.lease()
    frame["input"][...] = 2
    outputs = await burst.compute(frame)
    assert int(outputs["input_out"][0, 0]) == 2
    del outputs
    assert [number_in(result) async for result in burst.map([aionn.Item(frame, "again")])] == [2]
    assert all_are_back(burst)


async def test_a_lease_that_was_not_awaited_in_a_task_is_one_sentence(burst: aionn.Burst) -> None:
    frame = burst.lease()
    with pytest.raises(aionn.CallerError, match=r"write .*`frame = await burst\.lease\(\)`"):
        frame["input"]
    with pytest.raises(aionn.CallerError, match="lease has not begun"):
        await anext(burst.map([frame]))
    assert await frame is frame
    with pytest.raises(aionn.CallerError, match="leased already"):
        await frame
    del frame
    gc.collect()
    await anyio.lowlevel.checkpoint()
    assert all_are_back(burst)


async def test_two_tasks_that_await_one_lease_get_one_frame(burst: aionn.Burst, fake: FakeDevice) -> None:
    fake.hang()
    refused = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(burst.compute, {"input": np.zeros((1, 16), np.float32)})
        await fake.heard("run")
        leased = [await burst.lease() for _ in range(PAGE_FRAMES - 1)]
        frames = [burst.lease()]

        async def begin() -> None:
            try:
                await frames[0]
            except aionn.CallerError as error:
                refused.append(str(error))

        tasks.start_soon(begin)  # it waits for a frame that comes back
        tasks.start_soon(begin)
        await anyio.wait_all_tasks_blocked()
        fake.behave()
    assert len(refused) == 1
    assert "leased already" in refused[0]
    assert frames[0]["input"].shape == (1, 16)
    frames.clear()
    leased.clear()
    await anyio.wait_all_tasks_blocked()
    assert all_are_back(burst)


@pytest.mark.parametrize("inputs", [None, 5, np.zeros(3), aionn.Item({})], ids=lambda value: type(value).__name__)
async def test_an_item_without_inputs_is_one_sentence(inputs: Any) -> None:
    with pytest.raises(aionn.CallerError, match=f"expected inputs as a mapping, got {type(inputs).__name__}"):
        aionn.Item(inputs)


async def test_a_shape_that_does_not_fit_is_refused_before_there_is_a_lease(burst: aionn.Burst) -> None:
    with pytest.raises(aionn.CallerError, match="does not fit"):
        burst.lease({"input": (2, 3)})
    with pytest.raises(aionn.CallerError, match="which the model does not have"):
        burst.lease({"other": (1, 16)})


async def test_frames_that_a_thread_waits_for_come_when_requests_are_answered(
    burst: aionn.Burst, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All frames of the burst are in use: some with the driver, the rest leased."""
    fake.hang()
    in_flight = 4
    async with anyio.create_task_group() as tasks:
        for number in range(in_flight):
            tasks.start_soon(burst.compute, {"input": np.full((1, 16), number, np.float32)})
        await anyio.wait_all_tasks_blocked()
        leased = [await burst.lease() for _ in range(PAGE_FRAMES - in_flight)]
        waiting = threading.Event()
        got: list[aionn.Frame] = []

        def lease() -> None:
            waiting.set()
            got.append(burst.lease())

        tasks.start_soon(anyio.to_thread.run_sync, lease)
        await wait(waiting)
        assert got == []
        fake.behave()
    assert len(got) == 1
    leased += [await burst.lease() for _ in range(in_flight - 1)]

    def refuse(size_bytes: int) -> Region:
        raise MemoryAllocationError("no memory", needed_bytes=size_bytes, available_bytes=0)

    with monkeypatch.context() as limits:
        limits.setattr(Region, "allocate", refuse)
        with pytest.raises(MemoryAllocationError, match=f"all {PAGE_FRAMES} frames of this burst are leased"):
            await anyio.to_thread.run_sync(burst.lease)
    leased.clear()
    got.clear()
    await anyio.wait_all_tasks_blocked()
    assert all_are_back(burst)


async def test_a_thread_that_waits_for_a_frame_is_released_when_the_burst_is_closed(
    compilation: aionn.Compilation, fake: FakeDevice
) -> None:
    fake.hang()
    refused = []
    async with anyio.create_task_group() as tasks, compilation.burst() as burst:

        async def one() -> None:
            with pytest.raises(aionn.CallerError):
                await burst.compute({"input": np.zeros((1, 16), np.float32)})

        tasks.start_soon(one)
        await fake.heard("run")
        leased = [await burst.lease() for _ in range(PAGE_FRAMES - 1)]
        waiting = threading.Event()

        def lease() -> None:
            waiting.set()
            try:
                burst.lease()
            except aionn.CallerError as error:
                refused.append(str(error))

        tasks.start_soon(anyio.to_thread.run_sync, lease)
        await wait(waiting)
        await anyio.wait_all_tasks_blocked()
        await burst.aclose()
    fake.behave()
    assert len(refused) == 1
    assert "closed" in refused[0]
    assert len(leased) == PAGE_FRAMES - 1
