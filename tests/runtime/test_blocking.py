"""`BlockingBurst`: a thread without an event loop calls as a task does, with the same results, errors and ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from numpy.typing import NDArray

import aionn
from aionn.remote import attached
from aionn.runtime.processes.devices import Devices
from aionn.runtime.streaming.blocking import BlockingConnection, _Tidying
from aionn.runtime.streaming.blocking_runtime import RuntimeConnection, RuntimeLoop
from aionn.testing import FakeDevice, identity_model
from tests.journeys.silero import Directly, assert_same, still, windows
from tests.leaks import driver_pids, ended, leak_check, wait_for_end
from tests.runtime.operator_engines import CpuWholeEngine, WholeEngine, drivers, three_step_model
from tests.runtime.operator_engines import expected as three_steps
from tests.runtime.partial_engines import LeftFake, RightFake
from tests.runtime.planned_models import LEFT, RIGHT, chain
from tests.runtime.planned_models import compiled as planned

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

T = TypeVar("T")
SHAPE = (1, 16)


def of(number: float) -> dict[str, NDArray[np.float32]]:
    return {"input": np.full(SHAPE, number, np.float32)}


def right(burst: aionn.BlockingBurst, number: float, **how: Any) -> None:
    assert (burst.compute(of(number), **how)["input_out"] == number).all()


async def in_thread(act: Callable[..., T], *arguments: Any) -> T:
    with anyio.fail_after(60):
        return await anyio.to_thread.run_sync(partial(act, *arguments), abandon_on_cancel=True)


def outcome(act: Callable[..., Any], *arguments: Any) -> Any:
    """What the call returns, or the error that it raises."""
    try:
        return act(*arguments)
    except BaseException as error:
        return error


class Caller:
    """A thread that makes one call."""

    def __init__(self, act: Callable[..., Any], *arguments: Any) -> None:
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run, args=(act, arguments))
        self._thread.start()

    def _run(self, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._outcome = outcome(act, *arguments)

    async def outcome(self) -> Any:
        await in_thread(self._thread.join)
        return vars(self).pop("_outcome")  # arrays that are held keep memory


async def opened(compilation: aionn.Compilation, **how: Any) -> aionn.BlockingBurst:
    burst = compilation.blocking(**how)
    return await in_thread(burst.__enter__)


async def compiled(runtime: aionn.Runtime, fake: FakeDevice) -> aionn.Compilation:
    return await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))


async def test_a_thread_gets_what_a_task_gets(silero_path: Path) -> None:
    inputs = {"input": next(windows(1)), "state": still()}
    expected = Directly(silero_path).run(inputs)
    model = aionn.Model.from_onnx(silero_path)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))

        def work() -> dict[str, int]:
            with compilation.blocking(name="door") as burst:
                for _ in range(20):
                    found = burst.compute(inputs)
                    assert_same(found, expected)
                timed = burst.compute(inputs, measure_timing=True)
                assert timed.timing is not None
                assert timed.device == "onnxruntime"
                return burst.statistics()

        counts = await in_thread(work)
        assert (counts["computed"], counts["connections"], counts["failed"], counts["in_flight"]) == (21, 1, 0, 0)


async def test_a_large_input_and_a_model_of_open_shapes_go_the_same_way() -> None:
    model = aionn.Model.from_onnx(identity_model({"x": ("rows", 1024)}))
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))

        def work() -> None:
            with compilation.blocking() as burst:
                for rows in (1, 300, 2, 300, 300, 7):
                    found = burst.compute({"x": np.full((rows, 1024), rows, np.float32)})["x_out"]
                    assert found.shape == (rows, 1024)
                    assert (found == rows).all()

        await in_thread(work)


async def test_outputs_that_do_not_fit_are_made_again_with_more_room() -> None:
    from tests.conformance.decoders import PAST, VOCABULARY, decoder  # its past grows

    model = aionn.Model.from_onnx(decoder())
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        states: dict[str, Any] = {name: np.zeros((1, 2, 0, 8), np.float32) for name in PAST}

        def work() -> list[Any]:
            with compilation.blocking() as burst:
                return [burst.compute({"input_ids": np.full((1, n), 3, np.int64), **states})["logits"].copy() for n in (1, 200, 1, 999)]

        found = await in_thread(work)
        assert [logits.shape for logits in found] == [(1, n, VOCABULARY) for n in (1, 200, 1, 999)]
        async with compilation.burst() as burst:
            for logits, n in zip(found, (1, 200, 1, 999), strict=True):
                expected = (await burst.compute({"input_ids": np.full((1, n), 3, np.int64), **states}))["logits"].copy()
                np.testing.assert_allclose(logits, expected, atol=1e-5)


async def test_a_state_stays_in_the_driver(silero_path: Path) -> None:
    expected = Directly(silero_path).stream(20)
    model = aionn.Model.from_onnx(silero_path)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        async with await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state:
            await state.reset()

            def work() -> None:
                with compilation.blocking() as burst:
                    for window, right in zip(windows(20), expected, strict=True):
                        found = burst.compute({"input": window, "state": state}, outputs={"stateN": state})
                        np.testing.assert_allclose(found["output"], right["output"], atol=1e-6)

            await in_thread(work)
            np.testing.assert_allclose(await state.snapshot(), expected[-1]["stateN"], atol=1e-6)


async def test_a_client_may_not_use_the_buffers_of_a_client_that_it_did_not_bring(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        state = await compilation.allocate(inputs=("input",), outputs=("input_out",))
        await state.reset()
        burst = await opened(compilation)
        state._state.buffers.front.token += 1000
        try:
            found = await in_thread(outcome, burst.compute, {"input": state})
        finally:
            state._state.buffers.front.token -= 1000
        assert isinstance(found, aionn.CallerError)
        assert "names no device buffer of this client" in str(found)
        await in_thread(right, burst, 2)
        burst.close()
        await state.aclose()


async def test_a_driver_that_is_killed_ends_the_call_and_the_next_one_starts_another(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        burst = await opened(compilation)
        await in_thread(right, burst, 1)
        fake.hang()
        call = Caller(burst.compute, of(2))
        pid = await fake.heard("run")
        os.kill(pid, signal.SIGKILL)
        fake.behave()
        error = await call.outcome()
        assert isinstance(error, aionn.DriverDiedError)
        assert (error.device, error.exit_code) == (fake.name, -signal.SIGKILL)
        await in_thread(right, burst, 3)
        assert burst.statistics()["connections"] == 2
        fake.crash()
        assert isinstance(await in_thread(outcome, burst.compute, of(4)), aionn.DriverDiedError)
        fake.crash()
        call = Caller(partial(burst.compute, of(5), retry=1))
        await fake.heard("run")
        fake.behave()
        assert (np.asarray((await call.outcome())["input_out"]) == 5).all()
        burst.close()


@pytest.mark.parametrize("opened_by", ["a thread", "the loop"])
async def test_a_death_that_the_runtime_has_not_seen_yet_ends_no_second_call(opened_by: str, fake: FakeDevice) -> None:
    """The runtime's loop is busy while the driver dies. The thread's call ends after it has run, with its reason."""
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        burst = await opened(compilation) if opened_by == "a thread" else compilation.blocking().open()
        await in_thread(right, burst, 1)
        fake.hang()
        call = Caller(burst.compute, of(2))
        pid = await fake.heard("run")
        os.kill(pid, signal.SIGKILL)
        assert wait_for_end(pid, 20)
        call._thread.join(0.5)  # the loop is not run meanwhile
        assert call._thread.is_alive()
        fake.behave()
        error = await call.outcome()
        assert isinstance(error, aionn.DriverDiedError)
        assert error.exit_code == -signal.SIGKILL
        await in_thread(right, burst, 3)
        burst.close()


@pytest.mark.parametrize("opened_by", ["a thread", "the loop"])
async def test_a_driver_that_died_before_it_was_reached_costs_no_try(
    opened_by: str, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime's loop is busy until the thread asks it for another driver. So the second try reaches for the dead one first."""
    monkeypatch.setattr(attached, "DYING_S", 0.0)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        burst = await opened(compilation) if opened_by == "a thread" else compilation.blocking().open()
        await in_thread(right, burst, 1)
        tried, asked, ask, reach = [], threading.Event(), RuntimeLoop.__call__, RuntimeConnection.reach

        def asks(*call: Any) -> Any:
            asked.set()
            return ask(*call)

        def reaches(*call: Any) -> Any:
            tried.append(1)
            return reach(*call)

        monkeypatch.setattr(RuntimeLoop, "__call__", asks)
        monkeypatch.setattr(RuntimeConnection, "reach", reaches)

        def retried() -> None:
            try:
                right(burst, 2, retry=1)
            finally:
                asked.set()

        (pid,) = driver_pids()
        os.kill(pid, signal.SIGKILL)
        assert wait_for_end(pid, 20)
        call = Caller(retried)
        assert asked.wait(20)  # the loop stands still until then
        assert len(tried) == 1
        assert await call.outcome() is None
        assert len(tried) == 2
        burst.close()


async def test_a_burst_opens_after_its_driver_has_died(fake: FakeDevice) -> None:
    """The loop has not seen the death. In the loop's own thread, the error says that no other driver can be started."""
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        await compilation.compute(of(0))
        (pid,) = driver_pids()
        os.kill(pid, signal.SIGKILL)
        assert wait_for_end(pid, 20)
        with pytest.raises(aionn.CallerError, match="needs the runtime's event loop, to start a driver"):
            compilation.blocking().open()
        burst = await opened(compilation)
        await in_thread(right, burst, 1)
        burst.close()


async def test_a_model_that_ends_its_driver_is_prepared_once_for_a_call(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        burst = await opened(await compiled(runtime, fake))
        await in_thread(right, burst, 1)
        fake.crash("compile")
        (pid,) = driver_pids()
        os.kill(pid, signal.SIGKILL)
        assert await ended(pid, 30)
        (device,) = (device for device in runtime.devices if device.name == fake.name)
        assert isinstance(await in_thread(outcome, burst.compute, of(2)), aionn.DriverDiedError)
        assert device.statistics()["starts"] == 2
        fake.behave()
        await in_thread(right, burst, 3)
        burst.close()


async def test_a_driver_that_dies_at_each_opening_is_started_once_for_a_call(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        burst = await opened(await compiled(runtime, fake))
        await in_thread(right, burst, 1)
        open_driver = BlockingConnection.open_driver

        async def opens_and_kills(*call: Any) -> Any:
            prepared = await open_driver(*call)
            (pid,) = driver_pids()
            os.kill(pid, signal.SIGKILL)
            assert wait_for_end(pid, 20)
            return prepared

        (device,) = (device for device in runtime.devices if device.name == fake.name)
        (pid,) = driver_pids()
        os.kill(pid, signal.SIGKILL)
        assert await ended(pid, 30)
        with monkeypatch.context() as patch:
            patch.setattr(BlockingConnection, "open_driver", opens_and_kills)
            assert isinstance(await in_thread(outcome, burst.compute, of(2)), aionn.DriverDiedError)
        assert device.statistics()["starts"] == 3
        await in_thread(right, burst, 3)
        burst.close()


async def test_a_driver_that_hangs_is_judged_as_for_tasks(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime(hang_s=0.5) as runtime:
        burst = await opened(await compiled(runtime, fake))
        fake.hang(with_gil=True)
        error = await in_thread(outcome, burst.compute, of(1))
        assert isinstance(error, aionn.DriverHungError)
        fake.behave()
        await in_thread(right, burst, 2)
        burst.close()


async def test_a_deadline_ends_one_call_and_the_next_ones_are_right(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        burst = await opened(await compiled(runtime, fake))
        await in_thread(right, burst, 1)
        fake.hang()
        for number in range(6):  # more than may be in flight
            error = await in_thread(partial(outcome, partial(burst.compute, of(number), timeout_s=0.05)))
            assert isinstance(error, aionn.DeadlineError)
        fake.behave()
        for number in range(10, 20):
            await in_thread(right, burst, number)
        assert burst.statistics()["pinned_frames"] == 0
        burst.close()


async def test_closing_from_another_thread_ends_the_call(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        burst = await opened(await compiled(runtime, fake))
        await in_thread(right, burst, 1)
        fake.hang()
        call = Caller(burst.compute, of(2))
        await fake.heard("run")
        burst.close()
        error = await call.outcome()
        assert isinstance(error, aionn.CallerError)
        assert "was closed while this call waited" in str(error)
        assert isinstance(await in_thread(outcome, burst.compute, of(3)), aionn.CallerError)
        fake.behave()


async def test_a_second_thread_is_refused(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        burst = await opened(await compiled(runtime, fake))
        fake.hang()
        call = Caller(burst.compute, of(1))
        await fake.heard("run")
        error = await in_thread(outcome, burst.compute, of(2))
        assert isinstance(error, aionn.CallerError)
        assert "one thread at a time" in str(error)
        fake.behave()
        assert ((await call.outcome())["input_out"] == 1).all()
        burst.close()


async def test_a_call_waits_while_another_thread_changes_its_connection(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the loop's thread does in a swap. Only one thread calls, so it is not refused."""
    changing, waits, changed = threading.Event(), threading.Event(), threading.Event()

    def change() -> None:
        changing.set()
        assert changed.wait(60)

    def seen(tidying: _Tidying, timeout_s: float) -> bool:
        waits.set()
        return threading.Event.wait(tidying, timeout_s)

    monkeypatch.setattr(_Tidying, "wait", seen)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        with compilation.blocking() as burst:
            right(burst, 1)
            changer = Caller(burst._connection.run_later, change)
            assert await in_thread(changing.wait, 60)
            caller = Caller(right, burst, 2)
            seen_waiting = await in_thread(waits.wait, 10)
            changed.set()
            assert await caller.outcome() is None
            assert await changer.outcome() is None
            assert seen_waiting


@pytest.mark.parametrize("what", ["runtime", "compilation"])
async def test_closing_what_it_belongs_to_ends_the_call(what: str, fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        burst = await opened(compilation)
        fake.hang()
        call = Caller(burst.compute, of(1))
        await fake.heard("run")
        await (runtime if what == "runtime" else compilation).aclose()
        error = await call.outcome()
        assert isinstance(error, aionn.CallerError)
        assert "closed" in str(error)
        fake.behave()
        assert isinstance(await in_thread(outcome, burst.compute, of(2)), aionn.CallerError)
        assert isinstance(await in_thread(outcome, compilation.blocking().open), aionn.CallerError)


async def test_a_queue_that_the_driver_closes_when_the_runtime_ends_is_no_error_of_the_driver(fake: FakeDevice) -> None:
    """The driver may free its part before the thread hears of the end."""
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        session = compilation._parts.kept_model.session
        for ending, kind in ((False, aionn.ExecutionError), (True, aionn.CallerError)):
            with compilation.blocking() as burst:
                right(burst, 1)
                link = burst._connection.link
                assert link is not None
                await link._parts[0].context.aclose()
                session._open = not ending
                try:
                    with pytest.raises(kind):
                        for number in range(2, 100):  # the answer to a request that came before may still be there
                            right(burst, number)
                finally:
                    session._open = True


async def test_the_thread_of_the_loop_may_call_as_long_as_the_loop_is_not_needed(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        with compilation.blocking() as burst:
            right(burst, 1)
            right(burst, 2)
            (pid,) = driver_pids()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aionn.DriverDiedError) as caught:
                while True:
                    right(burst, 3)
            assert caught.value.exit_code == -signal.SIGKILL
            assert await ended(pid, 30)
            with pytest.raises(aionn.CallerError, match="needs the runtime's event loop, to start a driver"):
                right(burst, 4)
            await compilation.compute(of(5))
            right(burst, 6)


async def test_the_loop_goes_on_while_threads_wait_and_each_face_gets_its_own_answers(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)

        def work(thread: int) -> None:
            with compilation.blocking() as burst:
                for number in range(40):
                    right(burst, thread * 1000 + number)

        async with anyio.create_task_group() as threads:
            for thread in range(8):
                threads.start_soon(in_thread, work, thread)
            for number in range(40):
                assert ((await compilation.compute(of(number)))["input_out"] == number).all()


async def test_an_engines_error_is_raised(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        burst = await opened(await compiled(runtime, fake))
        fake.fail("no luck")
        error = await in_thread(outcome, burst.compute, of(1))
        assert isinstance(error, aionn.ExecutionError)
        assert "no luck" in str(error)
        fake.behave()
        await in_thread(right, burst, 2)
        error = await in_thread(outcome, burst.compute, {"input": np.zeros((1, 16))})
        assert isinstance(error, aionn.CallerError)
        assert "dtype" in str(error)
        assert burst.statistics()["failed"] == 1
        burst.close()


async def test_a_swap_reaches_an_open_burst() -> None:
    from onnx import TensorProto, helper, numpy_helper

    def times(factor: float) -> aionn.Model:
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in ("input", "input_out"))
        weight = numpy_helper.from_array(np.array(factor, np.float32), "w")
        graph = helper.make_graph([helper.make_node("Mul", ["input", "w"], ["input_out"])], "times", [x], [y], [weight])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        return aionn.Model.from_onnx(made.SerializeToString())

    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(times(2), devices=("onnxruntime",))
        burst = await opened(compilation)
        for factor in (3, 4, 5):
            for number in (1, 7):
                assert ((await in_thread(burst.compute, of(number)))["input_out"] == number * (factor - 1)).all()
            await runtime.swap(compilation, times(factor))
            assert ((await in_thread(burst.compute, of(3)))["input_out"] == 3 * factor).all()
        burst.close()


async def test_a_state_moves_with_a_swap_and_no_step_is_lost(silero_path: Path) -> None:
    expected = Directly(silero_path).stream(60)
    model = aionn.Model.from_onnx(silero_path)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        async with await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state:
            await state.reset()
            done = 0

            def work() -> None:
                nonlocal done
                with compilation.blocking() as burst:
                    for window, right in zip(windows(60), expected, strict=True):
                        found = burst.compute({"input": window, "state": state}, outputs={"stateN": state})
                        np.testing.assert_allclose(found["output"], right["output"], atol=1e-6)
                        done += 1

            async with anyio.create_task_group() as threads:
                threads.start_soon(in_thread, work)
                for _ in range(2):
                    await runtime.swap(compilation, model)
            assert done == 60
            np.testing.assert_allclose(await state.snapshot(), expected[-1]["stateN"], atol=1e-6)


async def test_a_model_that_is_cut_over_two_drivers_is_called_in_the_same_way() -> None:
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right_device:
        async with planned(chain(("left", "right")), LEFT, RIGHT) as (_, compilation):
            inputs = {"input": np.full(SHAPE, 3, np.float32)}
            expected = {name: array.copy() for name, array in (await compilation.compute(inputs)).items()}
            burst = await opened(compilation)
            for _ in range(5):
                found = await in_thread(burst.compute, inputs)
                assert all((found[name] == array).all() for name, array in expected.items())
            right_device.hang()
            error = await in_thread(partial(outcome, partial(burst.compute, inputs, timeout_s=0.05)))
            assert isinstance(error, aionn.DeadlineError)
            right_device.behave()
            left.hang()
            call = Caller(burst.compute, inputs)
            pid = await left.heard("run")
            os.kill(pid, signal.SIGKILL)
            left.behave()
            assert isinstance(await call.outcome(), aionn.DriverDiedError)
            found = await in_thread(burst.compute, inputs)
            assert all((found[name] == array).all() for name, array in expected.items())
            del found
            burst.close()


async def test_a_call_that_fails_is_computed_by_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with drivers(WholeEngine, CpuWholeEngine) as (first, cpu):
        monkeypatch.setattr(Devices, "installed", property(lambda _: [first.name, cpu.name]))
        first.fail("broken", "run")
        x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)
        model = aionn.Model.from_onnx(three_step_model())
        async with leak_check(), aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(model)
            burst = await opened(compilation)
            for turn in range(3):
                found = await in_thread(burst.compute, {"x": x + turn})
                np.testing.assert_allclose(found["y"], three_steps(x + turn), rtol=1e-6)
                assert found.device == cpu.name
            del found
            assert burst.statistics()["fell_back"] == 1
            burst.close()


async def test_memory_is_given_back_while_it_is_not_used_and_the_next_call_loads_again(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        model = aionn.Model.from_onnx(identity_model())
        compilation = await runtime.compile(model, devices=(fake.name,), idle_s=0.05)
        burst = await opened(compilation)
        for number in range(3):
            await in_thread(right, burst, number)
            with anyio.fail_after(30):
                while driver_pids():
                    await anyio.lowlevel.checkpoint()
        burst.close()


async def test_a_burst_that_the_app_drops_is_closed(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await compiled(runtime, fake)
        async with leak_check():
            burst = await opened(compilation)
            # Not a thread of the pool: that one lets go of its arguments when it likes, and then closes what they hold.
            thread = threading.Thread(target=right, args=(burst, 1))
            thread.start()
            await in_thread(thread.join)
            gone = weakref.ref(burst)
            del burst, thread
            gc.collect()
            assert gone() is None


@contextmanager
def in_the_main_thread(fake: FakeDevice) -> Iterator[tuple[BlockingPortal, aionn.Compilation]]:
    """A runtime whose loop runs in another thread."""
    with (
        leak_check(),
        start_blocking_portal("asyncio", {"use_uvloop": True}) as portal,
        portal.wrap_async_context_manager(aionn.Runtime()) as runtime,
    ):
        yield portal, portal.call(compiled, runtime, fake)


def test_ctrl_c_ends_a_call_of_the_main_thread_and_the_burst_stays_usable(fake: FakeDevice) -> None:
    with in_the_main_thread(fake) as (portal, compilation), compilation.blocking() as burst:
        right(burst, 1)
        fake.hang()

        def interrupt() -> None:
            portal.call(fake.heard, "run")
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            burst.compute(of(2))
        thread.join()
        fake.behave()
        right(burst, 3)
        assert burst.statistics()["pinned_frames"] == 0


def test_a_signal_after_any_call_of_a_step_leaves_the_burst_usable(fake: FakeDevice) -> None:
    """Python runs a handler when a call is over. So a signal is raised after the first call of `run`, then after the second, and so on."""
    inside = {act.__code__ for act in (BlockingConnection.run, BlockingConnection._do_left, BlockingConnection._end_all)}

    def interrupted(after: int, act: Callable[[], object]) -> bool:
        calls = 0

        def profile(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            caller = frame if event == "c_return" else frame.f_back if event == "return" else None
            calls += caller is not None and caller.f_code in inside
            if calls == after:
                calls += 1
                signal.raise_signal(signal.SIGINT)

        sys.setprofile(profile)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    with in_the_main_thread(fake) as (_, compilation):
        with compilation.blocking() as burst:
            right(burst, 0)
            after = 1
            while interrupted(after, lambda: burst.compute(of(9))):
                right(burst, after)
                after += 1
            assert after > 3
        after = 1
        while True:
            burst = compilation.blocking().open()
            right(burst, after)
            if not interrupted(after, burst.close):
                break
            with pytest.raises(aionn.CallerError, match="not open"):
                burst.compute(of(1))
            assert not burst._connection._finalizer.alive  # it was closed to the end
            after += 1
        assert after > 2


async def test_a_frame_is_written_in_place_and_sent_without_a_copy(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        burst = await opened(await compiled(runtime, fake))

        def work() -> None:
            right(burst, 1)
            before = burst.statistics()["copied_bytes"]
            with burst.frame() as frame:
                for number in (2, 3):
                    frame["input"][:] = number
                    assert (burst.compute(frame)["input_out"] == number).all()
                view = frame["input"]
                assert burst.statistics()["pinned_frames"] == 1
            assert (burst.statistics()["copied_bytes"], burst.statistics()["pinned_frames"]) == (before, 0)
            with pytest.raises(aionn.CallerError, match="lease has ended"):
                burst.compute(frame)
            with pytest.raises(ValueError, match="read-only"):
                view[:] = 4
            with pytest.raises(aionn.CallerError, match="shapes name"), burst.frame(shapes={"x": (1,)}):
                raise AssertionError
            with pytest.raises(LookupError), burst.frame():
                raise LookupError
            assert burst.statistics()["pinned_frames"] == 0

        await in_thread(work)
        burst.close()


async def test_a_frame_whose_driver_dies_with_a_request_over_it_is_given_up(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        burst = await opened(await compiled(runtime, fake))
        await in_thread(right, burst, 1)
        with burst.frame() as frame:
            frame["input"][:] = 2
            fake.hang()
            call = Caller(burst.compute, frame)
            os.kill(await fake.heard("run"), signal.SIGKILL)
            assert isinstance(await call.outcome(), aionn.DriverDiedError)
            fake.behave()
            await in_thread(right, burst, 3)
            with pytest.raises(aionn.CallerError, match="given up"):
                burst.compute(frame)
            with burst.frame() as other:
                other["input"][:] = 4
                assert (burst.compute(other)["input_out"] == 4).all()
        await in_thread(right, burst, 5)
        assert burst.statistics()["pinned_frames"] == 0
        burst.close()


async def test_a_frame_that_ends_while_another_thread_is_in_a_call_comes_back_after_it(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        burst = await opened(await compiled(runtime, fake))
        await in_thread(right, burst, 1)
        with burst.frame():
            fake.hang()
            call = Caller(burst.compute, of(2))
            await fake.heard("run")
            with pytest.raises(aionn.CallerError, match="another call"), burst.frame():
                raise AssertionError
        assert burst.statistics()["pinned_frames"] == 2
        fake.behave()
        assert (await call.outcome())["input_out"].max() == 2
        assert burst.statistics()["pinned_frames"] == 0
        burst.close()


class Rung(Exception):
    """What the handler of a signal raises."""


@contextmanager
def rung_by_signals(raised: type[BaseException] = Rung) -> Iterator[None]:
    """Let the handler of SIGUSR1 raise that."""

    def ring(*_: object) -> None:
        raise raised

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class RungOnce:
    """Raises a signal in a call of this thread, where the calls of Python functions, their returns and those of C functions are counted."""

    def __init__(self, raised: type[BaseException]) -> None:
        self._raised = raised
        self._events = self._at = 0
        self._rung = ""

    def _profile(self, frame: FrameType | None, event: str, _: object) -> None:
        self._events += 1
        if self._rung or self._events < self._at or event not in ("call", "return", "c_return"):
            return
        place = f"{event} in {frame.f_code.co_qualname}" if frame is not None else event
        while frame is not None:
            if frame.f_code.co_name in ("__del__", "_remove"):  # Python drops what the end of an object raises
                return
            frame = frame.f_back
        self._rung = place
        signal.raise_signal(signal.SIGUSR1)

    def rings(self, at: int, act: Callable[[], object]) -> bool:
        """Return whether `act` was long enough to be rung. It must raise what the handler has raised then."""
        self._events, self._at, self._rung = 0, at, ""
        sys.setprofile(self._profile)
        try:
            act()
        except self._raised:
            return True
        finally:
            sys.setprofile(None)
        assert not self._rung, f"the exception was lost: {self._rung}"
        return False


@pytest.mark.own_process  # a signal between the making of a descriptor and the next statement leaves it open
@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("raised", [KeyboardInterrupt, Rung])
def test_what_a_signals_handler_raises_reaches_the_caller_wherever_it_comes(raised: type[BaseException], fake: FakeDevice) -> None:
    once = RungOnce(raised)
    with (
        rung_by_signals(raised),
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(aionn.Runtime()) as runtime,
        portal.call(compiled, runtime, fake).blocking() as burst,
    ):
        connection = burst._connection
        connecting = 3 * (raised is Rung)  # so the two cases have each place between them
        while once.rings(connecting, lambda: burst.compute(of(9))):
            right(burst, connecting % 97)
            connection.run_later(connection._disconnect)
            connecting += 6
        assert connecting > 600
        steady = 1
        right(burst, 1)
        while once.rings(steady, lambda: burst.compute(of(9))):
            right(burst, steady)
            right(burst, steady)
            steady += 1
        assert steady > 10
        assert burst.statistics()["pinned_frames"] == 0


def test_a_signal_that_another_thread_gets_ends_a_call(fake: FakeDevice) -> None:
    """Its handler runs in the main thread, whose sleep the kernel does not end. A signal just before the sleep is like it."""
    with rung_by_signals(), in_the_main_thread(fake) as (portal, compilation), compilation.blocking() as burst:
        right(burst, 1)
        fake.hang()
        ended, in_time = threading.Event(), []

        def interrupt() -> None:
            portal.call(fake.heard, "run")
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            in_time.append(ended.wait(5))  # after 10 s, the call asks the driver for its request, and would see the signal

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(Rung):
            burst.compute(of(2))
        ended.set()
        thread.join()
        assert in_time == [True]
        fake.behave()
        right(burst, 3)


def test_a_handler_of_a_signal_runs_while_a_call_waits_and_may_close_the_burst(fake: FakeDevice) -> None:
    with in_the_main_thread(fake) as (portal, compilation):
        burst = compilation.blocking().open()
        fake.hang()
        refused: list[Any] = []

        def handle(*_: object) -> None:
            refused.append(outcome(burst.compute, of(9)))
            burst.close()

        def interrupt() -> None:
            portal.call(fake.heard, "run")
            os.kill(os.getpid(), signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(aionn.CallerError, match="was closed while this call waited"):
                burst.compute(of(2))
            thread.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert isinstance(refused[0], aionn.CallerError)
        fake.behave()


@pytest.mark.own_process
def test_a_child_of_fork_is_refused_and_its_parent_goes_on(fake: FakeDevice) -> None:
    with in_the_main_thread(fake) as (_, compilation), compilation.blocking() as burst:
        right(burst, 1)
        pid = os.fork()
        if not pid:
            error = outcome(burst.compute, of(2))
            burst.close()
            os._exit(0 if isinstance(error, aionn.CallerError) and "belongs to the process that opened it" in str(error) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        right(burst, 3)
