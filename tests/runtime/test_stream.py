"""`Burst.map`: order, policies, bounded age, and what is left when a stream ends early. Real driver processes, a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.hal import ErrorStatus
from aionn.testing import FakeDevice, identity_model

pytestmark = pytest.mark.anyio

Frame = dict[str, NDArray[np.float32]]


def frame(number: int) -> Frame:
    return {"input": np.full((1, 16), number, np.float32)}


def number_in(result: aionn.StreamResult) -> int:
    return int(result.outputs["input_out"][0, 0])


class Camera:
    """A source that gives a frame when it is told to. `asked` grows each time the stream wants the next one."""

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[Frame](100)

    def shoot(self, number: int) -> None:
        self._send.send_nowait(frame(number))

    def stop(self) -> None:
        self._send.close()

    async def frames(self) -> AsyncIterator[Frame]:
        async with self._receive:
            async for inputs in self._receive:
                yield inputs


async def test_results_come_in_order_with_nothing_dropped_by_default(burst: aionn.Burst) -> None:
    results = [(result.seq, number_in(result)) async for result in burst.map([frame(n) for n in range(30)], depth=4)]

    assert results == [(n, n) for n in range(30)]
    assert burst.statistics()["dropped"] == 0


async def test_a_frame_that_waits_is_replaced_by_a_newer_one_with_latest(burst: aionn.Burst, fake: FakeDevice) -> None:
    camera, seen = Camera(), []
    fake.hang()

    async def watch() -> None:
        async for result in burst.map(camera.frames(), policy="latest", depth=2):
            seen.append((result.seq, number_in(result)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        camera.shoot(0)
        await fake.heard("run")
        for number in range(1, 6):
            camera.shoot(number)
        camera.stop()
        await anyio.wait_all_tasks_blocked()
        fake.behave()

    assert seen == [(0, 0), (5, 5)]
    assert burst.statistics()["dropped"] == 4


async def test_a_frame_without_a_place_ends_the_stream_with_reject(burst: aionn.Burst, fake: FakeDevice) -> None:
    fake.hang()
    camera, seen, refused = Camera(), [], []
    for number in range(3):
        camera.shoot(number)

    async def watch() -> None:
        try:
            async for result in burst.map(camera.frames(), policy="reject", depth=1):
                seen.append(result.seq)
        except aionn.ExecutionError as error:
            refused.append(error)

    camera.stop()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await fake.heard("run")
        await anyio.wait_all_tasks_blocked()
        fake.behave()

    assert seen == [0]  # what was admitted before is still answered
    assert [error.status for error in refused] == [ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT]
    assert "frame 1: all 1 places" in str(refused[0])
    outputs = await burst.compute(frame(7))
    assert outputs["input_out"][0, 0] == 7


async def test_late_frames_are_dropped_with_latest_and_end_the_stream_otherwise(burst: aionn.Burst, fake: FakeDevice) -> None:
    fake.hang()
    with pytest.raises(aionn.DeadlineError):
        async for _ in burst.map([frame(0)], deadline_s=0.05):
            pass
    assert [result async for result in burst.map([frame(1)], policy="latest", deadline_s=0.05)] == []
    assert burst.statistics()["dropped"] == 2
    fake.behave()
    assert [number_in(result) async for result in burst.map([frame(2)], policy="latest", deadline_s=30)] == [2]


async def test_leaving_a_stream_early_stops_it_and_the_burst_goes_on(burst: aionn.Burst) -> None:
    pulled = 0

    def endless() -> Iterator[Frame]:
        nonlocal pulled
        while True:
            pulled += 1
            yield frame(pulled - 1)

    async with aclosing(burst.map(endless(), depth=2)) as results:
        async for result in results:
            if result.seq == 3:
                break
    stopped_at = pulled
    await anyio.wait_all_tasks_blocked()
    assert pulled <= stopped_at + 1
    assert [number_in(result) async for result in burst.map([frame(5)])] == [5]


async def test_an_error_of_the_source_reaches_whoever_takes_the_results(burst: aionn.Burst) -> None:
    async def broken() -> AsyncIterator[Frame]:
        yield frame(0)
        raise OSError("the camera was unplugged")

    seen = []
    with pytest.raises(OSError, match="unplugged"):
        async for result in burst.map(broken()):
            seen.append(result.seq)
    assert seen == [0]


async def test_the_death_of_the_driver_ends_the_stream_and_the_next_one_has_a_new_driver(burst: aionn.Burst, fake: FakeDevice) -> None:
    fake.crash()
    with pytest.raises(aionn.DriverDiedError):
        async for _ in burst.map([frame(0), frame(1)]):
            pass
    fake.behave()
    assert [number_in(result) async for result in burst.map([frame(4)])] == [4]
    assert burst.statistics()["connections"] == 2


async def test_closing_the_burst_ends_its_streams(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        camera, ended_by = Camera(), []

        async def watch(burst: aionn.Burst) -> None:
            try:
                async for _ in burst.map(camera.frames()):
                    pass
            except aionn.CallerError as error:
                ended_by.append(str(error))

        async with anyio.create_task_group() as tasks:
            async with compilation.burst() as burst:
                tasks.start_soon(watch, burst)
                await anyio.wait_all_tasks_blocked()
            await anyio.wait_all_tasks_blocked()
            camera.stop()
        assert len(ended_by) == 1


async def test_outputs_held_by_the_app_are_never_overwritten(burst: aionn.Burst) -> None:
    held = [result.outputs["input_out"] async for result in burst.map([frame(n) for n in range(40)], depth=3)]

    assert [int(array[0, 0]) for array in held] == list(range(40))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "newest"}, "policy 'newest'"),
        ({"depth": 0}, "depth=0"),
        ({"depth": "x"}, "depth='x'"),
        ({"depth": 1.5}, "depth=1.5"),
        ({"deadline_s": 0}, "deadline_s is 0"),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
        ({"deadline_s": "x"}, "deadline_s is 'x'"),
        ({"frames": 5}, "expected an iterable or async iterable of inputs by name, got int"),
    ],
)
async def test_a_wrong_argument_is_one_sentence(burst: aionn.Burst, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(aionn.CallerError, match=words):
        burst.map(**{"frames": [], **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("deadline_s", [1e300, float("inf"), 10**300])
async def test_a_deadline_beyond_all_time_is_like_none(burst: aionn.Burst, deadline_s: float) -> None:
    assert [result.seq async for result in burst.map([frame(n) for n in range(3)], deadline_s=deadline_s)] == [0, 1, 2]


class Silence:
    """A consumer of another stream of the same runtime, which must not notice anything."""

    def __init__(self, compilation: aionn.Compilation) -> None:
        self._compilation = compilation
        self.answered = 0

    async def watch(self) -> None:
        async with self._compilation.burst() as other:
            async for _ in other.map([frame(n) for n in range(50)]):
                self.answered += 1


async def raising(error: BaseException, after: int) -> AsyncIterator[Frame]:
    for number in range(after):
        yield frame(number)
    raise error


def raising_in_place(error: BaseException, after: int) -> Iterator[Frame]:
    for number in range(after):
        yield frame(number)
    raise error


@pytest.mark.parametrize("source", [raising, raising_in_place])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("error", "comes_out"),
    [
        (asyncio.CancelledError("theirs"), aionn.CallerError),
        (SystemExit(3), SystemExit),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (GeneratorExit(), GeneratorExit),
        (BaseExceptionGroup("theirs", [SystemExit(4)]), BaseExceptionGroup),
        (ExceptionGroup("theirs", [OSError("lens")]), ExceptionGroup),
        (StopAsyncIteration(), RuntimeError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_whatever_a_source_raises_reaches_its_own_consumer_and_nobody_else(
    compilation: aionn.Compilation,
    burst: aionn.Burst,
    source: Callable[[BaseException, int], Any],
    error: BaseException,
    comes_out: type[BaseException],
    after: int,
) -> None:
    other, seen = Silence(compilation), []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other.watch)
        try:
            async for result in burst.map(source(error, after)):
                seen.append(result.seq)
        except BaseException as caught:
            found = caught
    assert type(found) is comes_out, found
    assert comes_out is RuntimeError or found is error or found.__cause__ is error
    assert seen == list(range(after))
    assert other.answered == 50
    assert list(await burst.compute(frame(1))) == ["input_out"]


async def test_a_source_that_awaits_a_cancelled_task_ends_its_stream_alone(burst: aionn.Burst) -> None:
    async def camera() -> AsyncIterator[Frame]:
        driver = asyncio.ensure_future(asyncio.sleep(3600))
        yield frame(0)
        driver.cancel()
        await driver

    with pytest.raises(aionn.CallerError, match="source of this stream raised CancelledError"):
        async for _ in burst.map(camera()):
            pass
    assert [result.seq async for result in burst.map([frame(0)])] == [0]


async def test_a_source_may_close_the_runtime(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))

        async def closing() -> AsyncIterator[Frame]:
            yield frame(0)
            await runtime.aclose()
            await anyio.sleep_forever()

        with anyio.fail_after(5):  # well below what closing may take
            with pytest.raises(aionn.CallerError):
                async for _ in compilation_stream(compilation, closing()):
                    pass
            await runtime.aclose()


async def compilation_stream(compilation: aionn.Compilation, source: AsyncIterator[Frame]) -> AsyncIterator[aionn.StreamResult]:
    async with compilation.burst() as burst:
        async for result in burst.map(source):
            yield result


class Poisoned(dict[str, Any]):
    """Inputs that raise when they are read."""

    error: BaseException

    def items(self) -> Any:
        raise self.error

    def __getitem__(self, name: str) -> Any:
        raise self.error

    def get(self, *_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), KeyError("theirs"), asyncio.CancelledError()], ids=repr)
async def test_inputs_that_raise_end_their_own_stream(burst: aionn.Burst, error: BaseException) -> None:
    poisoned = Poisoned(frame(0))
    poisoned.error = error
    try:
        async for _ in burst.map([frame(0), poisoned]):
            pass
    except BaseException as caught:
        found = caught
    assert found is error or isinstance(found, aionn.CallerError)
    assert [result.seq async for result in burst.map([frame(0)])] == [0]


async def test_a_stream_that_waits_ends_when_its_runtime_is_closed(fake: FakeDevice) -> None:
    runtime = aionn.Runtime()
    await runtime.open()
    compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
    camera, ended_by = Camera(), []

    async def watch() -> None:
        async with compilation.burst() as burst:
            try:
                async for _ in burst.map(camera.frames()):
                    pass
            except aionn.CallerError as error:
                ended_by.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await anyio.wait_all_tasks_blocked()
        await runtime.aclose()
    assert len(ended_by) == 1
    camera.stop()
