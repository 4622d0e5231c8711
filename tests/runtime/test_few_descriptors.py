"""Few file descriptors and many calls at once: calls queue, one call may fail, and no healthy driver is ended."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.hal.types import ErrorStatus
from aionn.testing import FakeDevice, identity_model
from tests.descriptors import free_descriptors
from tests.leaks import driver_pids, leak_check

pytestmark = pytest.mark.anyio

MANY = 600

FRAMES = mmap.PAGESIZE // 128
"""So many frames of `model` lie in the first page of a burst. They are more than its depth."""


def x(number: float) -> NDArray[np.float32]:
    return np.full(4, number, np.float32)


def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": (4,)}))


def check(outputs: Mapping[str, Any], number: float) -> None:
    np.testing.assert_array_equal(outputs["x_out"], x(number))


async def _computed(burst: aionn.Burst, number: float) -> None:
    check(await burst.compute({"x": x(number)}), number)


@contextmanager
def no_free_descriptor(pid: int, *, but: int = 0) -> Iterator[None]:
    """Leave that process none but those it has, and so many more."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = [fd for fd in range(len(used) + but + 1) if fd not in used]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[but], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def test_a_driver_may_open_as_many_files_as_its_hard_limit_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 64
    assert low < hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        with FakeDevice() as fake:
            async with leak_check(), aionn.Runtime() as runtime:
                await runtime.compile(model(), devices=(fake.name,))
                (pid,) = driver_pids()
                assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_driver_without_a_free_descriptor_fails_the_call_and_lives() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",))
        async with compilation.burst() as old, compilation.burst() as new, aionn.Memory.allocate(16) as memory:
            memory.array(np.float32, (4,))[...] = 2
            await old.compute({"x": x(1)})
            (pid,) = driver_pids()
            third = compilation.burst()
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: compilation.compute({"x": x(2)}),
                lambda: new.compute({"x": memory}),
                lambda: third.__aenter__(),
            ]
            with no_free_descriptor(pid):
                for call in calls:
                    with pytest.raises(aionn.ExecutionError, match="too many open files") as caught:
                        await call()
                    assert caught.value.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
                    del caught
                check(await old.compute({"x": x(3)}), 3)  # its memory is in the driver already, as it is from the opening
                check(await new.compute({"x": x(3)}), 3)
            check(await compilation.compute({"x": x(4)}), 4)
            check(await new.compute({"x": x(5)}), 5)
            async with third:
                check(await third.compute({"x": x(6)}), 6)
            assert driver_pids() == [pid]


async def test_a_driver_maps_memory_after_memory_with_one_free_descriptor() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",))
        (pid,) = driver_pids()
        await compilation.compute({"x": x(1)})
        with no_free_descriptor(pid, but=1):
            before = descriptors(pid)
            for number in range(5):
                with aionn.Memory.allocate(16) as memory:
                    memory.array(np.float32, (4,))[...] = number
                    check(await compilation.compute({"x": memory}), number)
            assert descriptors(pid) == before
        assert driver_pids() == [pid]


def descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def test_a_burst_has_at_most_five_descriptors_on_each_side() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",))
        (pid,) = driver_pids()
        async with compilation.burst() as first:  # the lanes of the model begin
            check(await first.compute({"x": x(0)}), 0)
        before = descriptors(), descriptors(pid)
        async with compilation.burst(depth=8) as burst:
            assert (descriptors() - before[0], descriptors(pid) - before[1]) == (5, 4)
            check(await burst.compute({"x": x(1)}), 1)
            await asyncio.gather(*(_computed(burst, number) for number in range(8)))
            assert (descriptors() - before[0], descriptors(pid) - before[1]) == (5, 4)
        assert (descriptors(), descriptors(pid)) == before


async def test_a_burst_that_has_forgotten_its_descriptors_goes_on_with_a_new_driver() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",))
        async with compilation.burst() as burst, aionn.Memory.allocate(16) as memory:
            memory.array(np.float32, (4,))[...] = 7
            check(await burst.compute({"x": x(1)}), 1)
            check(await burst.compute({"x": memory}), 7)
            (pid,) = driver_pids()
            before = descriptors()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aionn.DriverDiedError):
                while True:
                    await burst.compute({"x": x(2)})
            check(await burst.compute({"x": x(3)}), 3)
            check(await burst.compute({"x": memory}), 7)
            (new,) = driver_pids()
            assert new != pid
            assert descriptors() == before


@pytest.mark.parametrize("left", range(7))
async def test_a_burst_that_finds_too_few_descriptors_fails_with_one_sentence_and_leaves_nothing(left: int) -> None:
    """To open takes six for a moment: the memory of two queues, and four eventfds. That of the first frame can wait."""
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",))
        (pid,) = driver_pids()
        async with compilation.burst() as first:
            check(await first.compute({"x": x(0)}), 0)
        before = descriptors(), descriptors(pid)
        with free_descriptors(left):
            burst = compilation.burst()
            if left < 6:
                with pytest.raises(
                    aionn.MemoryAllocationError, match=r"none is left \(RLIMIT_NOFILE is \d+\); close files or raise the limit"
                ):
                    await burst.__aenter__()
            else:
                async with burst:
                    check(await burst.compute({"x": x(1)}), 1)
        assert (descriptors(), descriptors(pid)) == before
        async with compilation.burst() as again:
            check(await again.compute({"x": x(2)}), 2)


@pytest.mark.parametrize("left", range(8))
async def test_a_driver_that_finds_too_few_descriptors_for_a_burst_leaves_nothing_on_either_side(left: int) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",))
        (pid,) = driver_pids()
        async with compilation.burst() as first:
            check(await first.compute({"x": x(0)}), 0)
        before = descriptors(), descriptors(pid)
        with no_free_descriptor(pid, but=left):
            burst = compilation.burst()
            if left < 7:  # with the memory of the first frame
                with pytest.raises(aionn.ExecutionError, match="too many open files") as caught:
                    await burst.__aenter__()
                assert caught.value.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
                del caught
            else:
                async with burst:
                    check(await burst.compute({"x": x(1)}), 1)
        assert (descriptors(), descriptors(pid)) == before
        assert driver_pids() == [pid]


def test_190_bursts_of_two_drivers_work_with_1024_descriptors_and_the_first_one_too_many_says_so() -> None:
    app = """
        import os, resource
        import numpy as np
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        import aionn
        from aionn.testing import identity_model

        async def main():
            model = aionn.Model.from_onnx(identity_model({"x": (4,)}))
            async with aionn.Runtime() as runtime:
                compilations = [await runtime.compile(model, devices=(name,)) for name in ("reference", "onnxruntime")]
                pids = [device.pid for device in runtime.devices if device.pid]
                assert len(pids) == 2
                for compilation in compilations:
                    async with compilation.burst() as burst:
                        await burst.compute({"x": np.zeros(4, np.float32)})
                count = lambda: [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *pids)]
                before = count()
                bursts = []
                try:
                    while True:
                        burst = compilations[len(bursts) % 2].burst()
                        await burst.__aenter__()
                        bursts.append(burst)
                        assert (await burst.compute({"x": np.full(4, len(bursts), np.float32)}))["x_out"][0] == len(bursts)
                except aionn.MemoryAllocationError as error:
                    reason = str(error)
                assert len(bursts) >= 190, (len(bursts), before)
                for number, burst in enumerate(bursts[:190]):
                    assert (await burst.compute({"x": np.full(4, number, np.float32)}))["x_out"][0] == number
                for burst in bursts:
                    await burst.aclose()
                assert count() == before
                assert [device.pid for device in runtime.devices if device.pid] == pids
                print(reason)

        aionn.run(main)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(app)], capture_output=True, text=True, timeout=60)
    assert (ended.stderr, ended.returncode) == ("", 0)
    assert re.fullmatch(
        r"\d+ bytes of shared memory need a descriptor, and none is left \(RLIMIT_NOFILE is 1024\); close files or raise the limit\n",
        ended.stdout,
    )


def test_many_calls_at_once_are_right_with_256_descriptors() -> None:
    app = f"""
        import asyncio, resource
        import numpy as np
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        import aionn
        from aionn.testing import identity_model

        async def main():
            model = aionn.Model.from_onnx(identity_model({{"x": (4,)}}))
            async with aionn.Runtime(start=()) as runtime:
                compilation = await runtime.compile(model, devices=("reference",))
                (pid,) = [device.pid for device in runtime.devices if device.pid]
                async with compilation.burst() as burst:
                    for compute in (compilation.compute, burst.compute):
                        calls = [compute({{"x": np.full(4, number, np.float32)}}) for number in range({MANY})]
                        found = await asyncio.gather(*calls)
                        assert all((outputs["x_out"] == number).all() for number, outputs in enumerate(found))
                        del calls, found
                assert [device.pid for device in runtime.devices if device.pid] == [pid]

        aionn.run(main)
        print("all right")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(app)], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("all right\n", "", 0)


async def at_once(call: Callable[[float], Awaitable[Mapping[str, Any]]]) -> None:
    found = await asyncio.gather(*(call(number) for number in range(MANY)))
    for number, outputs in enumerate(found):
        check(outputs, number)


async def test_many_calls_at_once_queue(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst:

            async def with_frame(number: float) -> Mapping[str, Any]:
                async with burst.frame() as frame:
                    frame["x"][...] = number
                    return {name: array.copy() for name, array in (await burst.compute(frame)).items()}

            await at_once(lambda number: compilation.compute({"x": x(number)}))
            await at_once(lambda number: burst.compute({"x": x(number)}))
            # They did queue. At a moment when all frames are leased and none is with the driver, the burst takes one more page of them.
            pages = (FRAMES, 2 * FRAMES)
            assert burst.statistics()["frames"] in pages
            await at_once(with_frame)
            with aionn.Memory.allocate(16) as memory:
                memory.array(np.float32, (4,))[...] = 7
                for compute in (compilation.compute, burst.compute):
                    for outputs in await asyncio.gather(*(compute({"x": memory}) for _ in range(MANY))):
                        check(outputs, 7)
            del outputs
            statistics = burst.statistics()
            assert statistics["pinned_frames"] == 0
            assert statistics["free_frames"] in pages


async def test_many_calls_whose_outputs_need_more_room_queue() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": ("n",)})), devices=("reference",))
        async with compilation.burst() as burst:
            await at_once(lambda number: compilation.compute({"x": x(number)}))
            await at_once(lambda number: burst.compute({"x": x(number)}))
            assert burst.statistics()["pinned_frames"] == 0


async def test_a_call_that_waits_for_a_frame_keeps_its_deadline_and_can_be_cancelled(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst:
            await burst.compute({"x": x(0)})
            fake.hang()
            async with anyio.create_task_group() as tasks:
                for number in range(FRAMES):
                    tasks.start_soon(_computed, burst, number)
                await anyio.wait_all_tasks_blocked()
                assert burst.statistics()["pinned_frames"] == FRAMES
                with pytest.raises(aionn.DeadlineError):
                    await burst.compute({"x": x(1)}, timeout_s=0.01)
                with anyio.move_on_after(0.01):
                    await burst.compute({"x": x(1)})
                assert burst._executor.frames.waiting == {}
                for number in range(3):
                    tasks.start_soon(_computed, burst, number)
                    await anyio.wait_all_tasks_blocked()
                fake.behave()
            statistics = burst.statistics()
            assert (statistics["pinned_frames"], statistics["computed"]) == (0, 1 + FRAMES + 3)


async def test_a_call_that_is_cancelled_as_its_frame_comes_gives_it_back(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst:
            await _cancelled_as_its_frame_comes(burst)


async def _cancelled_as_its_frame_comes(burst: aionn.Burst) -> None:
    layout, first = await burst._connection.lease(burst._executor.arguments.check_shapes({}))
    pool = burst._executor.frames.pool(layout)
    leased = [first, *(pool.lease() for _ in range(FRAMES - 1))]
    waiting = [asyncio.ensure_future(burst._executor.frames.lease(layout)) for _ in range(2)]
    await anyio.wait_all_tasks_blocked()
    pool.unpin(leased[0])
    waiting[0].cancel()
    assert await waiting[1] is leased[0]  # it goes to the next one
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert pool.pinned_frames == FRAMES
    assert not pool.crowded


async def test_closing_the_burst_ends_those_who_wait_for_a_frame(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        refusals = 0
        async with anyio.create_task_group() as tasks, compilation.burst() as burst:

            async def refused() -> None:
                nonlocal refusals
                with pytest.raises(aionn.CallerError, match=r"burst (was closed|is not open)"):
                    await burst.compute({"x": x(1)})
                refusals += 1

            fake.hang()
            for _ in range(FRAMES + 5):
                tasks.start_soon(refused)
            await anyio.wait_all_tasks_blocked()
            assert sum(map(len, burst._executor.frames.waiting.values())) == 5
            tasks.start_soon(burst.aclose)
            await anyio.wait_all_tasks_blocked()
            fake.behave()
        assert refusals == FRAMES + 5
