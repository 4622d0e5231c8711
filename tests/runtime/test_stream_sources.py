"""`Burst.map` over sources that may block: their thread, its permits, its end. Real driver processes, a fake engine."""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.hal import ErrorStatus
from aionn.loopless import call_soon_from_anywhere
from aionn.runtime.streaming import item as source_module
from aionn.runtime.streaming.stream import CLOSE_S
from aionn.testing import FakeDevice, identity_model

pytestmark = pytest.mark.anyio

Inputs = dict[str, NDArray[np.float32]]


def frame(number: int) -> Inputs:
    return {"input": np.full((1, 16), number, np.float32)}


def number_in(result: aionn.StreamResult) -> int:
    return int(result.outputs["input_out"][0, 0])


async def wait(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, 30)


class Blocking:
    """A camera that blocks in the middle of a frame until it is released."""

    def __init__(self, burst: aionn.Burst, good: int = 0) -> None:
        self._burst = burst
        self._good = good
        self.reads, self.release, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self.closed_in: threading.Thread | None = None

    def frames(self) -> Iterator[aionn.Frame]:
        self.thread = threading.current_thread()
        try:
            for number in range(self._good):
                leased = self._burst.lease()
                leased["input"][...] = number
                yield leased
            leased = self._burst.lease()
            place = leased["input"]
            self.reads.set()
            self.release.wait(60)
            place[...] = 7  # the memory is still mapped, and belongs to this request alone
            yield leased
        finally:
            self.closed_in = threading.current_thread()
            self.ended.set()


async def test_a_generator_that_blocks_does_not_hold_up_the_loop(burst: aionn.Burst) -> None:
    ready, went_on = threading.Event(), []

    def camera() -> Iterator[Inputs]:
        went_on.append(ready.wait(10))  # set by the loop, which must run meanwhile
        yield frame(3)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, ready.set)
        assert [number_in(result) async for result in burst.map(camera())] == [3]
    assert went_on == [True]


async def test_a_generator_runs_in_one_daemon_thread_and_a_collection_in_place(burst: aionn.Burst) -> None:
    threads: list[threading.Thread] = []

    class Pictures(Collection[Inputs]):
        def __len__(self) -> int:
            return 3

        def __contains__(self, _: object) -> bool:
            return False

        def __iter__(self) -> Iterator[Inputs]:
            for number in range(len(self)):
                threads.append(threading.current_thread())
                yield frame(number)

    def camera() -> Iterator[Inputs]:
        yield from Pictures()

    assert [number_in(result) async for result in burst.map(camera())] == [0, 1, 2]
    (thread,) = set(threads)
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert "camera" in thread.name
    threads.clear()
    assert [number_in(result) async for result in burst.map(Pictures())] == [0, 1, 2]
    assert set(threads) == {threading.current_thread()}


class Iterating:
    """A camera as a class, which is neither a generator nor a collection."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._numbers = iter(range(3))

    def __iter__(self) -> Iterator[Inputs]:
        return self

    def __next__(self) -> Inputs:
        self.thread = threading.current_thread()
        return frame(next(self._numbers))


async def test_a_generator_that_has_ended_is_refused_by_the_next_stream(burst: aionn.Burst, fake: FakeDevice) -> None:
    """It would yield nothing, and the rest of a recording would be missing without an error."""

    def numbered() -> Iterator[Inputs]:
        yield from (frame(number) for number in range(3))

    async def microphone() -> AsyncIterator[Inputs]:
        yield frame(0)
        await anyio.sleep_forever()

    whole = numbered()
    assert [number_in(result) async for result in burst.map(whole)] == [0, 1, 2]
    for ended in (whole, numbered(), microphone()):
        if ended is not whole:
            fake.crash()
            with pytest.raises(aionn.DriverDiedError):
                async for _ in burst.map(ended):
                    pass
            fake.behave()
        with pytest.raises(aionn.CallerError, match="this generator has ended, by itself or with the stream that it was given to"):
            burst.map(ended)
    assert [number_in(result) async for result in burst.map(numbered())] == [0, 1, 2]


async def test_an_iterator_without_a_length_may_block_too(burst: aionn.Burst) -> None:
    camera = Iterating()
    assert [number_in(result) async for result in burst.map(camera)] == [0, 1, 2]
    assert camera.thread not in (None, threading.current_thread())


async def test_a_generator_sees_the_context_of_the_caller_and_changes_only_a_copy(burst: aionn.Burst) -> None:
    name = contextvars.ContextVar("name", default="nothing")
    seen = []

    def camera() -> Iterator[Inputs]:
        seen.append(name.get())
        name.set("camera")
        yield frame(0)

    name.set("caller")
    results = burst.map(camera())
    name.set("later")
    assert [result.seq async for result in results] == [0]
    assert seen == ["caller"]
    assert name.get() == "later"


async def test_with_block_a_generator_is_asked_only_when_there_is_a_place(burst: aionn.Burst, fake: FakeDevice) -> None:
    fake.hang()
    asked = 0
    second = threading.Event()

    def camera() -> Iterator[Inputs]:
        nonlocal asked
        while True:
            asked += 1
            if asked == 2:
                second.set()
            yield frame(asked)

    async with anyio.create_task_group() as tasks:
        results = burst.map(camera(), depth=2)
        tasks.start_soon(anext, results)
        await wait(second)
        await anyio.wait_all_tasks_blocked()
        assert burst.statistics()["in_flight"] == 2
        tasks.cancel_scope.cancel()
    fake.behave()
    assert asked == 2
    assert burst.statistics()["dropped"] == 2


async def test_with_latest_a_generator_goes_on_and_its_newest_frame_wins(burst: aionn.Burst, fake: FakeDevice) -> None:
    fake.hang()
    first_runs, all_shot = threading.Event(), threading.Event()

    def camera() -> Iterator[Inputs]:
        yield frame(0)
        first_runs.wait(30)
        for number in range(1, 6):
            yield frame(number)
        all_shot.set()

    async def direct() -> None:
        await fake.heard("run")
        first_runs.set()
        await wait(all_shot)
        await anyio.wait_all_tasks_blocked()
        fake.behave()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(direct)
        seen = [(result.seq, number_in(result)) async for result in burst.map(camera(), policy="latest")]
    assert seen == [(0, 0), (5, 5)]
    assert burst.statistics()["dropped"] == 4


async def test_a_source_faster_than_the_loop_wakes_it_at_most_once_per_item(burst: aionn.Burst, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = 0
    really = call_soon_from_anywhere

    def counted(*arguments: Any) -> None:
        nonlocal wakes
        wakes += 1
        really(*arguments)

    monkeypatch.setattr(source_module, "call_soon_from_anywhere", counted)
    for policy in ("block", "latest"):
        wakes = 0
        before = burst.statistics()
        seen = [result.seq async for result in burst.map((frame(n) for n in range(500)), policy=policy)]
        after = burst.statistics()
        assert seen == sorted(set(seen))
        assert seen[-1] == 499
        assert len(seen) + after["dropped"] - before["dropped"] == 500
        assert wakes <= 501  # and one for the end
    assert len(seen) < 500  # the case did occur


async def test_a_generator_that_yields_nonsense_ends_its_stream_with_one_sentence(burst: aionn.Burst) -> None:
    def camera() -> Iterator[Any]:
        yield frame(0)
        yield 5

    seen = []
    with pytest.raises(aionn.CallerError, match="expected inputs as a mapping, got int"):
        async for result in burst.map(camera()):
            seen.append(result.seq)
    assert seen == [0]
    assert burst.statistics()["dropped"] == 1


async def test_reject_refuses_a_frame_of_a_generator_that_is_too_fast(burst: aionn.Burst, fake: FakeDevice) -> None:
    fake.hang()
    seen, errors, ended = [], [], threading.Event()

    def camera() -> Iterator[Inputs]:
        try:
            for number in range(3):
                yield frame(number)
        finally:
            ended.set()

    async def watch() -> None:
        try:
            async for result in burst.map(camera(), policy="reject", depth=1):
                seen.append(result.seq)
        except aionn.ExecutionError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await wait(ended)
        fake.behave()
    assert seen == [0]
    assert [error.status for error in errors] == [ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT]
    assert burst.statistics()["dropped"] == 1  # the third was never asked for


@pytest.mark.parametrize("policy", ["block", "latest", "reject"])
async def test_closing_a_stream_closes_its_generator_in_its_thread(burst: aionn.Burst, policy: Any) -> None:
    closed_in = []

    def camera() -> Iterator[Inputs]:
        try:
            while True:
                yield frame(0)
        except GeneratorExit:
            closed_in.append(threading.current_thread())
            raise

    async with aclosing(burst.map(camera(), policy=policy, depth=10**6)) as results:
        await anext(results)
    assert len(closed_in) == 1
    assert closed_in[0] is not threading.current_thread()
    statistics = burst.statistics()
    assert statistics["pinned_frames"] <= statistics["in_flight"]


async def test_an_error_while_a_generator_is_closed_is_logged(burst: aionn.Burst, caplog: pytest.LogCaptureFixture) -> None:
    def camera() -> Iterator[Inputs]:
        try:
            while True:
                yield frame(0)
        finally:
            raise OSError("the camera is stuck")

    async with aclosing(burst.map(camera())) as results:
        await anext(results)
    (record,) = [record for record in caplog.records if "raised an error while it was closed" in record.getMessage()]
    assert "camera" in record.getMessage()
    assert record.exc_info
    assert isinstance(record.exc_info[1], OSError)


async def test_an_error_of_a_source_whose_stream_is_closed_is_logged(burst: aionn.Burst, caplog: pytest.LogCaptureFixture) -> None:
    reads, release = threading.Event(), threading.Event()

    def camera() -> Iterator[Inputs]:
        reads.set()
        if release.wait(60):
            raise OSError("the camera was unplugged")
        yield frame(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, burst.map(camera()))
        await wait(reads)
        (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("aionn source")]
        tasks.cancel_scope.cancel()
    release.set()
    await anyio.to_thread.run_sync(thread.join, 30)
    await anyio.lowlevel.checkpoint()
    (record,) = [record for record in caplog.records if "after its stream was closed" in record.getMessage() and record.exc_info]
    assert record.exc_info
    assert isinstance(record.exc_info[1], OSError)


class Closing:
    """A camera whose `__iter__` is a generator."""

    def __init__(self) -> None:
        self.closed_in: threading.Thread | None = None

    def __iter__(self) -> Iterator[Inputs]:
        try:
            while True:
                yield frame(0)
        finally:
            self.closed_in = threading.current_thread()


async def test_the_generator_of_an_iterable_is_closed_too(burst: aionn.Burst) -> None:
    camera = Closing()
    async with aclosing(burst.map(camera)) as results:
        await anext(results)
    assert camera.closed_in not in (None, threading.current_thread())


@pytest.mark.own_process
async def test_a_child_that_a_source_forks_touches_nothing_of_the_stream(burst: aionn.Burst) -> None:
    statuses = []

    def camera() -> Iterator[Inputs]:
        yield frame(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            child = os.fork()
        if child == 0:
            try:
                burst.lease()
            except aionn.CallerError as error:
                if "child" in str(error):
                    yield frame(1)  # goes nowhere, and the child's only thread ends
            os._exit(1)
        statuses.append(os.waitpid(child, 0)[1])
        yield frame(2)

    assert [number_in(result) async for result in burst.map(camera())] == [0, 2]
    assert statuses == [0]
    assert burst.statistics()["dropped"] == 0


async def closing_the_results(results: Any, burst: aionn.Burst, tasks: Any) -> None:
    tasks.cancel_scope.cancel()


async def closing_the_burst(results: Any, burst: aionn.Burst, tasks: Any) -> None:
    await burst.aclose()


@pytest.mark.parametrize("close", [closing_the_results, closing_the_burst])
@pytest.mark.parametrize("policy", ["block", "latest"])
async def test_a_generator_that_blocks_for_ever_is_left_within_a_second_with_one_warning(
    burst: aionn.Burst, caplog: pytest.LogCaptureFixture, policy: Any, close: Callable[..., Any]
) -> None:
    camera = Blocking(burst)
    ended = []

    async def watch(results: Any) -> None:
        try:
            async for _ in results:
                pass
        except aionn.CallerError as error:
            ended.append(error)

    results = burst.map(camera.frames(), policy=policy)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, results)
        await wait(camera.reads)
        began = time.monotonic()
        await close(results, burst, tasks)
    assert time.monotonic() - began < 30  # long before the source returns
    assert source_module.GRACE_S < CLOSE_S < 1
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].name == "aionn.runtime"
    assert "Blocking.frames" in warnings[0].getMessage()
    assert camera.thread is not None
    assert camera.thread.daemon
    assert camera.thread.is_alive()
    assert burst.statistics()["pinned_frames"] == 0

    camera.release.set()
    await wait(camera.ended)
    camera.thread.join(30)
    assert camera.closed_in is camera.thread
    if close is closing_the_results:
        await anyio.wait_all_tasks_blocked()
        assert [number_in(result) async for result in burst.map([frame(n) for n in range(20)])] == list(range(20))


async def test_a_runtime_that_is_closed_leaves_a_generator_that_blocks(fake: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    runtime = aionn.Runtime()
    await runtime.open()
    compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
    ended = []

    async def watch(burst: aionn.Burst, camera: Blocking) -> None:
        try:
            async for _ in burst.map(camera.frames()):
                pass
        except aionn.CallerError as error:
            ended.append(str(error))

    async with compilation.burst() as burst:
        camera = Blocking(burst)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, burst, camera)
            await wait(camera.reads)
            await runtime.aclose()
    assert len(ended) == 1
    assert len([record for record in caplog.records if "still blocks" in record.getMessage()]) == 1
    camera.release.set()
    await wait(camera.ended)
    assert camera.thread is not None
    camera.thread.join(30)


async def test_a_frame_that_comes_after_its_stream_was_closed_is_counted_as_dropped(burst: aionn.Burst) -> None:
    reads, release = threading.Event(), threading.Event()

    def camera() -> Iterator[Inputs]:
        reads.set()
        release.wait(60)
        yield frame(0)

    async with anyio.create_task_group() as tasks:
        results = burst.map(camera())
        tasks.start_soon(anext, results)
        await wait(reads)
        (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("aionn source")]
        tasks.cancel_scope.cancel()
    assert burst.statistics()["dropped"] == 0
    release.set()
    await anyio.to_thread.run_sync(thread.join, 30)
    await anyio.lowlevel.checkpoint()
    assert burst.statistics()["dropped"] == 1


async def test_a_leased_frame_that_comes_after_its_stream_was_closed_is_no_error_of_its_source(
    burst: aionn.Burst, caplog: pytest.LogCaptureFixture
) -> None:
    reads, release = threading.Event(), threading.Event()
    resumed = []

    def camera() -> Iterator[aionn.Frame]:
        leased = burst.lease()
        leased["input"][...] = 0
        reads.set()
        release.wait(60)
        try:
            yield leased
        except GeneratorExit:
            resumed.append("closed")
            raise

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, burst.map(camera()))
        await wait(reads)
        (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("aionn source")]
        tasks.cancel_scope.cancel()
    assert burst.statistics()["pinned_frames"] == 0
    release.set()
    await anyio.to_thread.run_sync(thread.join, 30)
    await anyio.lowlevel.checkpoint()
    assert resumed == ["closed"]
    assert burst.statistics()["dropped"] == 1
    (warning,) = [record for record in caplog.records if record.name == "aionn.runtime" and record.levelno == logging.WARNING]
    assert "still blocks" in warning.getMessage()


async def test_a_thread_that_cannot_be_started_is_one_sentence(burst: aionn.Burst, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(aionn.ExecutionError, match="no thread could be started for a stream's source") as caught:
            async for _ in burst.map(frame(n) for n in range(3)):
                pass
    assert caught.value.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert [number_in(result) async for result in burst.map([frame(1)])] == [1]


async def test_the_age_of_a_frame_begins_when_its_generator_yields_it(burst: aionn.Burst) -> None:
    """The loop stands still meanwhile, and sees the frame late."""
    yielding, looked, yielded = threading.Event(), threading.Event(), threading.Event()
    yielded_at = []

    def camera() -> Iterator[Inputs]:
        yielding.set()
        looked.wait(30)
        yield frame(0)
        yielded_at.append(time.monotonic())
        yielded.set()

    found: list[aionn.StreamResult] = []

    async def watch() -> None:
        found.extend([result async for result in burst.map(camera(), policy="latest")])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await wait(yielding)
        looked.set()
        assert yielded.wait(30)  # in the loop, which is held up
        saw_at = time.monotonic()
    assert found[0].age_s >= saw_at - yielded_at[0]


@pytest.mark.parametrize("leased", [False, True])
async def test_the_age_of_a_frame_begins_when_it_was_captured_if_its_source_says_so(burst: aionn.Burst, leased: bool) -> None:
    began_ns = time.monotonic_ns()
    captured_ns = (began_ns - 5_000_000_000, 0, began_ns + 3_600_000_000_000)  # 5 s before; not known; by no clock of this machine

    def source() -> Iterator[aionn.Item]:
        for number, at_ns in enumerate(captured_ns):
            if leased:
                item = burst.lease()
                item["input"][...] = number
                item.captured_ns = at_ns
                yield aionn.Item(item)
                del item
            else:
                yield aionn.Item(frame(number), captured_ns=at_ns)

    ages = [result.age_s async for result in burst.map(source())]
    passed_s = (time.monotonic_ns() - began_ns) / 1e9
    assert 5 <= ages[0] <= 5 + passed_s
    assert all(0 <= age <= passed_s for age in ages[1:])


async def test_a_stream_and_its_thread_are_collected_after_its_end(burst: aionn.Burst) -> None:
    async for _ in burst.map(frame(n) for n in range(3)):
        pass
    gc.collect()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("aionn source")] == []
