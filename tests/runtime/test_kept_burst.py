"""`Compilation.compute` goes over a burst that the compilation keeps: it queues, follows drivers and stages, and closes when it is idle."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

import aionn
from aionn import trace
from aionn.burst import packets
from aionn.pages.app_layout import CONNECTIONS
from aionn.runtime.executing.link import Link
from aionn.runtime.streaming import kept_burst
from aionn.runtime.streaming.connection import BurstConnection
from aionn.runtime.streaming.kept_burst import DEPTH, KeptBurst
from aionn.testing import FakeDevice, identity_model
from tests.leaks import Inventory, driver_pids, ended, leak_check

pytestmark = pytest.mark.anyio

MANY = 100
MODEL = aionn.Model.from_onnx(identity_model({"x": (4,)}))


def x(number: float) -> NDArray[np.float32]:
    return np.full(4, number, np.float32)


@asynccontextmanager
async def compiled(fake: FakeDevice) -> AsyncIterator[aionn.Compilation]:
    """Compile the model on the fake device, for a body that leaves nothing behind."""
    async with leak_check(), aionn.Runtime() as runtime:
        yield await runtime.compile(MODEL, devices=(fake.name,))


def kept_of(compilation: aionn.Compilation) -> KeptBurst:
    return compilation._parts.kept


def connection_of(compilation: aionn.Compilation) -> BurstConnection:
    connection = kept_of(compilation).connection
    assert connection is not None
    return connection


def in_flight(compilation: aionn.Compilation) -> int:
    link = connection_of(compilation).link
    return 0 if link is None else link.in_flight


def at_rest(compilation: aionn.Compilation) -> bool:
    kept = kept_of(compilation)
    return kept._places == DEPTH and not kept._turns


async def until(condition: Callable[[], bool]) -> None:
    """Return when a condition holds that another process brings about."""
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110  (another process changes it)
            await anyio.sleep(0.001)


class Calls:
    """Many calls at once, each in a task, with what has become of them in the order in which they ended."""

    def __init__(self, compilation: aionn.Compilation, count: int, **arguments: Any) -> None:
        self.ended: list[int] = []
        self.outcomes: dict[int, str] = {}
        self.errors: list[Exception] = []
        self.tasks = [asyncio.ensure_future(self._call(compilation, number, arguments)) for number in range(count)]

    async def _call(self, compilation: aionn.Compilation, number: int, arguments: Mapping[str, Any]) -> None:
        try:
            outputs = await compilation.compute({"x": x(number)}, **arguments)
        except aionn.AionnError as error:
            self.outcomes[number] = type(error).__name__
            self.errors.append(error)
            assert "burst" not in str(error), error
        except asyncio.CancelledError:
            self.outcomes[number] = "cancelled"
            raise
        else:
            np.testing.assert_array_equal(outputs["x_out"], x(number))
            self.outcomes[number] = "right"
            self.ended.append(number)

    async def all_ended(self) -> list[str]:
        """Return the outcomes in the order of the calls. Their tracebacks are dropped, which hold the frames of the calls."""
        with anyio.fail_after(60):
            await asyncio.wait(self.tasks)
        for task in self.tasks:
            if not task.cancelled():
                await task
        count = len(self.tasks)
        self.errors.clear()
        self.tasks.clear()
        return [self.outcomes.get(number, "never begun") for number in range(count)]


# --- one call after the other -----------------------------------------------------------------------------------------


async def test_a_compilation_that_never_computes_opens_nothing_and_the_first_call_opens_a_burst(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        first = await runtime.compile(MODEL, devices=(fake.name,))
        (pid,) = driver_pids()
        before = Inventory.take()
        second = await runtime.compile(MODEL, devices=(fake.name,))
        theirs = psutil.Process(pid).num_fds()
        async with second.burst() as burst:
            await burst.compute({"x": x(1)})
        await until(lambda: psutil.Process(pid).num_fds() == theirs)
        assert Inventory.take().since(before) == []
        assert kept_of(first).connection is kept_of(second).connection is None
        await first.compute({"x": x(1)})
        assert kept_of(first).connection is not None
        assert kept_of(second).connection is None
        assert len(Inventory.take().since(before)) > 0
        assert psutil.Process(pid).num_fds() > theirs


async def test_outputs_belong_to_the_caller_and_frames_are_used_again(fake: FakeDevice) -> None:
    async with compiled(fake) as compilation:
        results = [await compilation.compute({"x": x(number)}) for number in range(300)]  # more than a burst has frames
        for number, outputs in enumerate(results):
            assert outputs["x_out"].flags.owndata
            assert outputs["x_out"].flags.writeable
            np.testing.assert_array_equal(outputs["x_out"], x(number))
        count = connection_of(compilation).executor.frames.count()
        assert count["pinned_frames"] == 0
        assert count["frames"] == count["free_frames"] <= 4  # of one region
        assert connection_of(compilation).executor.counts.get(CONNECTIONS) == 1


async def test_an_output_in_an_apps_memory_is_written_there_and_not_copied(fake: FakeDevice) -> None:
    async with compiled(fake) as compilation:
        with aionn.Memory.allocate(16) as memory:
            outputs = await compilation.compute({"x": x(5)}, outputs={"x_out": memory})
            memory.array(np.float32, (4,))[...] = 6
            np.testing.assert_array_equal(outputs["x_out"], x(6))
            del outputs


@pytest.mark.parametrize("wrong", [None, [], "x", 5])
async def test_inputs_that_are_no_mapping_are_refused_before_anything_is_opened(fake: FakeDevice, wrong: Any) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        with pytest.raises(aionn.CallerError, match="expected inputs as a mapping"):
            await compilation.compute(wrong)
        assert kept_of(compilation).connection is None
        assert at_rest(compilation)


async def test_any_mapping_is_accepted_also_a_frame_of_the_apps_own_burst(fake: FakeDevice) -> None:
    class Lazy(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            return {"x": x(3)}[name]

        def __iter__(self) -> Iterator[str]:
            return iter(["x"])

        def __len__(self) -> int:
            return 1

    async with compiled(fake) as compilation, compilation.burst() as burst, burst.frame() as frame:
        frame["x"] = x(3)
        for inputs in (Lazy(), frame):
            np.testing.assert_array_equal((await compilation.compute(inputs))["x_out"], x(3))


async def test_requests_that_packets_cannot_carry_go_over_the_control_socket(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory of more than 4 GiB, where an offset has more than 32 bits."""
    async with compiled(fake) as compilation:
        with aionn.Memory.allocate(4096) as memory:
            memory.array(np.float32, (1024,))[512:516] = 7
            part = memory[2048:2064]
            monkeypatch.setattr(packets, "_U32_MAX", 2000)
            with trace.record() as recording:
                found = await compilation.compute({"x": part})
            np.testing.assert_array_equal(found["x_out"], x(7))
            assert found["x_out"].flags.owndata
            assert "Execute" in [counter.attributes.get("call") for counter in recording.counters]
            part.close()
        assert at_rest(compilation)


async def test_a_model_with_hundreds_of_inputs_fits_into_the_queues() -> None:
    shapes = {f"x{number}": (1, 1, 1, 2) for number in range(300)}
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model(shapes)), devices=("reference",))
        inputs = {name: np.full(shape, number, np.float32) for number, (name, shape) in enumerate(shapes.items())}
        for _ in range(2):
            outputs = await compilation.compute(inputs)
            assert all((outputs[f"{name}_out"] == array).all() for name, array in inputs.items())


async def test_a_low_power_compilation_never_stays_awake(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        for preference, allowed in (("low_power", False), ("sustained_speed", (os.cpu_count() or 1) > 1)):
            compilation = await runtime.compile(MODEL, devices=(fake.name,), preference=preference)  # type: ignore[arg-type]
            await compilation.compute({"x": x(1)})
            link = connection_of(compilation).link
            assert isinstance(link, Link)
            assert link.controller.caller.brisk is allowed


# --- many calls at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "count"), [("onnxruntime", 1000), ("reference", 3000)])
async def test_thousands_of_calls_at_once_queue_in_order_and_take_few_frames(
    device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    compute = aionn.Burst.compute

    async def begin(burst: aionn.Burst, inputs: Any, **arguments: Any) -> Any:
        begun.append(int(inputs["x"][0]))
        return await compute(burst, inputs, **arguments)

    monkeypatch.setattr(aionn.Burst, "compute", begin)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(MODEL, devices=(device,))
        calls = Calls(compilation, count)
        await anyio.lowlevel.checkpoint()
        assert len(kept_of(compilation)._turns) == count - DEPTH
        assert await calls.all_ended() == ["right"] * count
        assert begun == list(range(count))  # of those that are with the driver together, any may end first
        assert sorted(calls.ended) == begun
        assert connection_of(compilation).executor.frames.count()["frames"] <= DEPTH + 1
        assert at_rest(compilation)


async def test_a_thousand_calls_at_once_on_a_real_model_are_all_right(orientation_path: Path) -> None:
    model = aionn.Model.from_onnx(orientation_path)
    pictures = [np.random.default_rng(seed).random((1, 3, 224, 224)).astype(np.float32) for seed in range(4)]
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        expected = [next(iter((await compilation.compute({"x": picture})).values())) for picture in pictures]
        calls = [asyncio.ensure_future(compilation.compute({"x": pictures[number % 4]})) for number in range(1000)]
        await anyio.lowlevel.checkpoint()
        assert len(kept_of(compilation)._turns) == 1000 - DEPTH
        for number, outputs in enumerate(await asyncio.gather(*calls)):
            np.testing.assert_array_equal(next(iter(outputs.values())), expected[number % 4])
        count = connection_of(compilation).executor.frames.count()
        assert count["frames"] <= DEPTH + 1
        del calls, outputs


async def test_a_first_call_that_prepares_lets_all_others_wait_and_prepares_once(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,), mode="jit")
        with trace.record() as recording:
            assert await Calls(compilation, MANY).all_ended() == ["right"] * MANY
        assert [span.name for span in recording.spans].count("compilation.prepare") == 1
        assert [span.name for span in recording.spans].count("burst.connect") == 1


async def test_calls_that_fail_keep_no_frame_in_use_while_the_app_keeps_their_errors(fake: FakeDevice) -> None:
    """An error has a traceback, which holds the frames of the functions that it passed."""
    async with compiled(fake) as compilation, compilation.burst() as burst:
        for compute in (compilation.compute, burst.compute):
            await compute({"x": x(0)})  # from now on the usual frame
            fake.fail()
            failed = await asyncio.gather(*(compute({"x": x(number)}) for number in range(600)), return_exceptions=True)
            assert [type(error) for error in failed] == [aionn.ExecutionError] * 600
            fake.behave()
            np.testing.assert_array_equal((await compute({"x": x(9)}))["x_out"], x(9))
            del failed


# --- cancelled, late, killed, closed ----------------------------------------------------------------------------------


async def test_calls_that_are_cancelled_in_the_queue_or_with_the_driver_hold_up_no_other(fake: FakeDevice) -> None:
    async with compiled(fake) as compilation:
        await compilation.compute({"x": x(0)})
        fake.hang()
        calls = Calls(compilation, MANY)
        await fake.heard("run")
        assert in_flight(compilation) == DEPTH
        assert len(kept_of(compilation)._turns) == MANY - DEPTH
        cancelled = [*range(0, DEPTH, 2), *range(DEPTH, MANY, 3)]
        for number in cancelled:
            calls.tasks[number].cancel()
        await anyio.lowlevel.checkpoint()
        fake.behave()
        outcomes = await calls.all_ended()
        assert [number for number, outcome in enumerate(outcomes) if outcome == "cancelled"] == cancelled
        assert outcomes.count("right") == MANY - len(cancelled)
        assert at_rest(compilation)
        assert connection_of(compilation).executor.frames.count()["frames"] <= 2 * DEPTH  # a page has room for 32 of these


async def test_a_storm_of_cancelled_calls_grows_nothing(fake: FakeDevice) -> None:
    async with compiled(fake) as compilation:
        await compilation.compute({"x": x(0)})
        fake.hang()
        for _ in range(20):
            calls = Calls(compilation, MANY)
            await anyio.wait_all_tasks_blocked()
            for task in calls.tasks:
                task.cancel()
            assert await calls.all_ended() == ["cancelled"] * MANY
            assert at_rest(compilation)
        assert DEPTH < in_flight(compilation) <= 2 * DEPTH  # withdrawn requests have left their places to others
        count = connection_of(compilation).executor.frames.count()
        assert 0 < count["pinned_frames"] <= count["frames"] <= 2 * DEPTH
        fake.behave()
        np.testing.assert_array_equal((await compilation.compute({"x": x(9)}))["x_out"], x(9))


async def test_a_call_that_is_cancelled_as_its_place_comes_passes_the_place_on(fake: FakeDevice) -> None:
    async with compiled(fake) as compilation:
        await compilation.compute({"x": x(0)})
        fake.hang()
        calls = Calls(compilation, DEPTH + 2)
        await fake.heard("run")
        turn = next(iter(kept_of(compilation)._turns))
        came = anyio.Event()

        def cancel(_: object) -> None:
            assert not turn.cancelled()  # the place has come, and its call has not resumed yet
            calls.tasks[DEPTH].cancel()
            came.set()

        turn.add_done_callback(cancel)
        fake.behave()
        outcomes = await calls.all_ended()
        assert came.is_set()
        assert outcomes[DEPTH + 1] == "right"
        assert outcomes[DEPTH] in ("cancelled", "right")
        assert at_rest(compilation)


async def test_calls_whose_deadline_passes_in_the_queue_are_late_and_the_others_are_right(fake: FakeDevice) -> None:
    async with compiled(fake) as compilation:
        await compilation.compute({"x": x(0)})
        fake.hang()
        patient = Calls(compilation, MANY)
        await fake.heard("run")
        hasty = Calls(compilation, MANY, timeout_s=0.01)
        assert await hasty.all_ended() == ["DeadlineError"] * MANY
        assert len(kept_of(compilation)._turns) == MANY - DEPTH
        fake.behave()
        assert await patient.all_ended() == ["right"] * MANY
        timed = Calls(compilation, MANY, timeout_s=60)
        assert await timed.all_ended() == ["right"] * MANY
        assert at_rest(compilation)


async def test_a_call_that_has_waited_for_its_place_has_so_much_less_time_left(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []
    compute = aionn.Burst.compute

    async def noting(burst: aionn.Burst, inputs: Any, *, timeout_s: float | None = None, **arguments: Any) -> aionn.Outputs:
        given.append(timeout_s)
        return await compute(burst, inputs, timeout_s=timeout_s, **arguments)

    async with compiled(fake) as compilation:
        await compilation.compute({"x": x(0)})
        monkeypatch.setattr(aionn.Burst, "compute", noting)
        fake.hang()
        calls = Calls(compilation, DEPTH + 1, timeout_s=1000.0)
        await fake.heard("run")
        assert len(kept_of(compilation)._turns) == 1
        before = time.monotonic()
        await anyio.sleep(0.02)
        waited_s = time.monotonic() - before
        fake.behave()
        assert await calls.all_ended() == ["right"] * (DEPTH + 1)
    assert given[:DEPTH] == [1000.0] * DEPTH
    (left_s,) = given[DEPTH:]
    assert left_s is not None
    assert left_s <= 1000 - waited_s


async def test_a_driver_that_dies_ends_the_calls_that_it_had_and_a_new_one_answers_those_that_waited(fake: FakeDevice) -> None:
    async with compiled(fake) as compilation:
        await compilation.compute({"x": x(0)})
        for _ in range(3):
            fake.hang()
            calls = Calls(compilation, MANY)
            await fake.heard("run")
            (pid,) = driver_pids()
            os.kill(pid, signal.SIGKILL)
            fake.behave()
            assert await calls.all_ended() == ["DriverDiedError"] * DEPTH + ["right"] * (MANY - DEPTH)
            assert await ended(pid, 30)
            assert at_rest(compilation)
        assert connection_of(compilation).executor.counts.get(CONNECTIONS) == 4


async def test_closing_a_compilation_answers_what_the_driver_has_and_refuses_what_waits(fake: FakeDevice) -> None:
    async with compiled(fake) as compilation:
        await compilation.compute({"x": x(0)})
        fake.hang()
        calls = Calls(compilation, MANY)
        await fake.heard("run")
        closing = asyncio.ensure_future(compilation.aclose())
        with anyio.fail_after(20):
            await asyncio.wait(calls.tasks[DEPTH:])  # at once, while the driver hangs
        assert not any(task.done() for task in calls.tasks[:DEPTH])
        assert [str(error) for error in calls.errors] == [kept_burst.CLOSED] * (MANY - DEPTH)
        fake.behave()
        assert await calls.all_ended() == ["right"] * DEPTH + ["CallerError"] * (MANY - DEPTH)
        await closing
        with pytest.raises(aionn.CallerError, match="this compilation has been closed"):
            await compilation.compute({"x": x(0)})
        assert kept_of(compilation).connection is None


async def test_closing_a_compilation_whose_driver_stays_busy_ends_all_calls_with_one_sentence(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_burst, "CLOSE_S", 0.01)
    async with compiled(fake) as compilation:
        await compilation.compute({"x": x(0)})
        fake.hang()
        calls = Calls(compilation, MANY)
        await fake.heard("run")
        closing = asyncio.ensure_future(compilation.aclose())
        with anyio.fail_after(20):
            await asyncio.wait(calls.tasks)
        assert {str(error) for error in calls.errors} == {kept_burst.CLOSED}
        assert await calls.all_ended() == ["CallerError"] * MANY
        fake.behave()
        await closing


async def test_closing_the_runtime_ends_all_calls(fake: FakeDevice) -> None:
    async with leak_check():
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(MODEL, devices=(fake.name,))
            await compilation.compute({"x": x(0)})
            fake.hang()
            calls = Calls(compilation, MANY)
            await fake.heard("run")
        assert set(await calls.all_ended()) <= {"CallerError", "DriverDiedError"}
        assert at_rest(compilation)
        assert kept_of(compilation)._timer is None


async def test_a_compilation_that_is_dropped_is_collected_with_its_burst(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        await (await runtime.compile(MODEL, devices=(fake.name,))).aclose()
        before = Inventory.take()
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        await compilation.compute({"x": x(1)})
        assert len(Inventory.take().since(before)) > 0
        del compilation
        gc.collect()
        await until(lambda: Inventory.take().since(before) == [])


# --- stages and new models --------------------------------------------------------------------------------------------


async def test_a_swap_under_load_loses_no_call_and_the_queue_follows(fake: FakeDevice) -> None:
    other = aionn.Model.from_onnx(identity_model({"x": (4,)}))
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        await compilation.compute({"x": x(0)})
        connection = connection_of(compilation)
        first, swapped, queued = connection.link, anyio.Event(), 0

        async def load() -> None:
            nonlocal queued
            while not swapped.is_set():
                calls = Calls(compilation, MANY)
                await anyio.lowlevel.checkpoint()
                queued = max(queued, len(kept_of(compilation)._turns))
                assert await calls.all_ended() == ["right"] * MANY
                await anyio.sleep(0.02)  # the new model is compiled by a process that only gets what CPU time is left

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await runtime.swap(compilation, other)
            swapped.set()
        assert queued > 0
        assert connection_of(compilation) is connection
        assert connection.link is not first
        assert compilation.model is other
        assert await Calls(compilation, MANY).all_ended() == ["right"] * MANY


async def test_a_new_model_is_tried_on_the_last_inputs_also_after_the_burst_was_closed_for_idleness() -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(MODEL, devices=("reference",))
        assert compilation._parts._last_inputs() == []
        for number in range(3):
            await compilation.compute({"x": x(number)})
        for idle in (False, True):
            if idle:
                kept_of(compilation).close_if_idle()
                kept_of(compilation).close_if_idle()
                assert kept_of(compilation).connection is None
            (inputs,) = compilation._parts._last_inputs()
            np.testing.assert_array_equal(inputs["x"], x(2))


# --- idle --------------------------------------------------------------------------------------------------------------


async def test_an_idle_burst_is_closed_by_its_timer_on_both_sides_and_the_next_call_opens_another(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_burst, "IDLE_S", 0.01)
    async with compiled(fake) as compilation:
        (pid,) = driver_pids()

        def theirs() -> tuple[int, int]:
            return psutil.Process(pid).num_fds(), Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").count("memfd:aionn ")

        before, before_there = Inventory.take(), theirs()
        idle = anyio.Event()

        def listener(event: trace.Span | trace.Counter) -> None:
            if event.name == "compute.idle":
                idle.set()

        for _ in range(3):
            idle = anyio.Event()
            with trace.listen(listener):
                np.testing.assert_array_equal((await compilation.compute({"x": x(1)}))["x_out"], x(1))
                assert kept_of(compilation)._timer is not None
                with anyio.fail_after(20):
                    await idle.wait()
            assert kept_of(compilation).connection is None
            assert kept_of(compilation)._timer is None
            assert Inventory.take().since(before) == []
            await until(lambda: theirs() == before_there)
        assert list(compilation._parts.compiled.members) == []


async def test_a_burst_is_not_idle_while_a_call_waits_or_the_driver_is_busy_for_one_that_has_left(fake: FakeDevice) -> None:
    async with compiled(fake) as compilation:
        kept = kept_of(compilation)
        kept.close_if_idle()  # nothing is open
        await compilation.compute({"x": x(0)})
        fake.hang()
        calls = Calls(compilation, DEPTH + 1)
        await fake.heard("run")
        for _ in range(3):
            kept.close_if_idle()
        connection = connection_of(compilation)
        for task in calls.tasks:
            task.cancel()
        assert await calls.all_ended() == ["cancelled"] * (DEPTH + 1)
        assert in_flight(compilation) == DEPTH
        for _ in range(3):
            kept.close_if_idle()
        assert connection_of(compilation) is connection
        fake.behave()
        await until(lambda: in_flight(compilation) == 0)
        kept.close_if_idle()
        assert kept.connection is None


async def test_a_burst_that_is_closed_for_idleness_between_any_two_calls_loses_none(fake: FakeDevice) -> None:
    """A close at every turn of the loop, beside tasks that compute one after the other."""
    closed = 0
    async with compiled(fake) as compilation:
        over = anyio.Event()
        kept = kept_of(compilation)

        async def closer() -> None:
            nonlocal closed
            while not over.is_set():
                was_open = kept.connection is not None
                kept.close_if_idle()
                kept.close_if_idle()
                closed += was_open and kept.connection is None
                await anyio.lowlevel.checkpoint()

        async def caller(number: int) -> None:
            for turn in range(20):
                outputs = await compilation.compute({"x": x(number + turn)})
                np.testing.assert_array_equal(outputs["x_out"], x(number + turn))
                for _ in range(turn % 5):
                    await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(closer)
            async with anyio.create_task_group() as callers:
                for number in range(3):
                    callers.start_soon(caller, number)
            over.set()
        assert closed > 0
        assert at_rest(compilation)


async def test_a_burst_that_is_closed_for_idleness_while_a_swap_is_prepared_leaves_nothing(fake: FakeDevice) -> None:
    other = aionn.Model.from_onnx(identity_model({"x": (4,)}))
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        await compilation.compute({"x": x(0)})
        kept, closed = kept_of(compilation), 0
        change_of = BurstConnection.prepare

        async def prepare(connection: BurstConnection, better: Any) -> Any:
            nonlocal closed
            change = await change_of(connection, better)
            kept.close_if_idle()
            kept.close_if_idle()
            closed += kept.connection is None
            return change

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BurstConnection, "prepare", prepare)
            await runtime.swap(compilation, other)
        assert closed == 1
        np.testing.assert_array_equal((await compilation.compute({"x": x(1)}))["x_out"], x(1))
