"""`Compilation.start`: events, fences, chains over drivers, and what happens to them when something goes wrong."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import select
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

import aionn
from aionn.remote.fences import outcome_of
from aionn.runtime.compilation import parts_of
from aionn.runtime.streaming.starting import IN_FLIGHT, Started
from aionn.testing import FakeDevice, identity_model
from aionn.testing.fake_engine import SecondFakeEngine
from tests.leaks import leak_check, leaves_nothing
from tests.runtime.partial_engines import LeftFake, RightFake
from tests.runtime.planned_models import LEFT, ORT, REF, RIGHT, chain, compiled, made, node
from tests.scaled_model import scaled_model

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

X = np.arange(16, dtype=np.float32)[None]


def model(shape: tuple[int | str, ...] = (1, 16)) -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": shape}, outputs=["y"]))


@pytest.fixture
async def first(fake: FakeDevice) -> AsyncIterator[aionn.Compilation]:
    async with aionn.Runtime() as runtime:
        yield await runtime.compile(model(), devices=(fake.name,))


@pytest.fixture
def gate() -> Any:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- events ------------------------------------------------------------------------------------------------------------------


async def test_a_start_returns_at_once_and_its_event_gives_the_outputs(first: aionn.Compilation, gate: int) -> None:
    event = first.start({"x": X}, after=(gate,))
    assert (event.done(), event.status, event.cancelled(), event.exception()) == (False, None, False, None)
    assert "pending" in repr(event)
    assert event.name in repr(event)
    with pytest.raises(aionn.CallerError, match="not done"):
        event.result()
    os.eventfd_write(gate, 1)
    outputs = await event
    assert event.done()
    assert event.status == 0
    assert event.result() is outputs is await event
    assert outputs.device == first.device
    np.testing.assert_array_equal(outputs["y"], X)


async def test_any_number_of_tasks_may_await_an_event(first: aionn.Compilation, gate: int) -> None:
    event = first.start({"x": X}, after=(gate,))
    found: list[aionn.Outputs] = []

    async def wait() -> None:
        found.append(await event)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        os.eventfd_write(gate, 1)
    assert len(found) == 5


async def test_a_task_that_awaits_an_event_and_is_cancelled_leaves_the_execution_alone(first: aionn.Compilation, gate: int) -> None:
    event = first.start({"x": X}, after=(gate,))
    waiting = asyncio.ensure_future(event)
    await anyio.lowlevel.checkpoint()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not event.done()
    os.eventfd_write(gate, 1)
    np.testing.assert_array_equal((await event)["y"], X)


async def test_cancel_settles_the_event_and_signals_its_fence_at_once(first: aionn.Compilation, fake: FakeDevice, gate: int) -> None:
    event = first.start({"x": X}, after=(gate,))
    dependent = first.start({"x": X}, after=(event,))
    fence = event.fence()
    assert event.cancel()
    assert not event.cancel()
    assert event.cancelled()
    assert event.status is None
    assert is_readable(fence)
    assert outcome_of(fence) is False
    with pytest.raises(asyncio.CancelledError):
        await event
    with pytest.raises(aionn.ExecutionError, match=event.name):
        await dependent
    os.eventfd_write(gate, 1)
    await first.compute({"x": X})
    assert parts_of(first).compiled.serving.users == 0  # type: ignore[union-attr]


async def test_a_failure_that_no_task_awaits_is_a_log_line_and_no_noise(
    first: aionn.Compilation, fake: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    fake.fail("on purpose")
    event = first.start({"x": X})
    name, fence = event.name, event.fence()
    await anyio.wait_readable(fence)
    while not event.done():
        await anyio.lowlevel.checkpoint()
    with caplog.at_level(logging.WARNING):
        del event
        gc.collect()
    (record,) = (record for record in caplog.records if name in record.getMessage())
    assert record.name == "aionn.runtime"
    assert "on purpose" in record.getMessage()
    assert not any("never retrieved" in record.getMessage() for record in caplog.records)


async def test_the_event_owns_its_fence(first: aionn.Compilation) -> None:
    await first.start({"x": X})
    before = fds()
    event = first.start({"x": X})
    await event
    assert fds() == before, "a fence that the app has not asked for is closed with the answer"
    fence = event.fence()
    assert event.fence() == fence
    assert outcome_of(fence) is True
    kept = os.dup(fence)
    del event
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fence)
    assert is_readable(kept)
    os.close(kept)
    assert fds() == before


async def test_arrays_are_copied_at_the_start(first: aionn.Compilation, gate: int) -> None:
    mine = X.copy()
    event = first.start({"x": mine}, after=(gate,))
    mine[:] = -1
    os.eventfd_write(gate, 1)
    np.testing.assert_array_equal((await event)["y"], X)


async def test_so_many_may_be_pending_and_no_more(first: aionn.Compilation, gate: int) -> None:
    events = [first.start({"x": X}, after=(gate,)) for _ in range(IN_FLIGHT)]
    with pytest.raises(aionn.CallerError, match=f"{IN_FLIGHT} started executions"):
        first.start({"x": X})
    os.eventfd_write(gate, 1)
    for event in events:
        await event
    await first.start({"x": X})


# --- chains ------------------------------------------------------------------------------------------------------------------


@leaves_nothing
async def test_a_chain_runs_from_driver_to_driver_while_the_app_stands_still() -> None:
    """Camera, detector, classifier: no model waits for the app's loop."""
    double = aionn.Model.from_onnx(scaled_model(np.full((1, 16), 2, np.float32)))
    camera = os.eventfd(0)
    async with aionn.Runtime() as runtime:
        stages = [await runtime.compile(double, devices=(name,)) for name in ("onnxruntime", "reference", "onnxruntime")]
        with aionn.Memory.allocate(64) as one, aionn.Memory.allocate(64) as two:
            event = stages[0].start({"x": X}, outputs={"y": one}, after=(camera,))
            event = stages[1].start({"x": one}, outputs={"y": two}, after=(event,))
            event = stages[2].start({"x": two}, after=(event,))
            os.eventfd_write(camera, 1)
            assert select.select([event.fence()], [], [], 10)[0], "the loop has not run"
            assert not event.done()
            np.testing.assert_array_equal((await event)["y"], X * 8)
    os.close(camera)


async def test_an_execution_may_depend_on_one_whose_model_is_not_prepared_yet(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        later = await runtime.compile(model(), devices=(fake.name,), mode="jit")
        ready = await runtime.compile(model(), devices=("reference",))
        with aionn.Memory.allocate(64) as between:
            event = later.start({"x": X}, outputs={"y": between})
            np.testing.assert_array_equal((await ready.start({"x": between}, after=(event,)))["y"], X)
        fake.fail(act="compile")
        broken = await runtime.compile(model((1, 8)), devices=(fake.name,), mode="jit")
        event = broken.start({"x": X[:, :8].copy()})
        with pytest.raises(aionn.ExecutionError, match=event.name):
            await ready.start({"x": X}, after=(event,))
        with pytest.raises(aionn.CompilationError):
            await event


async def test_a_dependency_that_fails_while_the_model_is_prepared_is_respected(fake: FakeDevice, gate: int) -> None:
    async with aionn.Runtime() as runtime:
        ready = await runtime.compile(model(), devices=("reference",))
        later = await runtime.compile(model(), devices=(fake.name,), mode="jit")
        fake.hang("compile")
        bad = ready.start({"x": X}, after=(gate,))
        event = later.start({"x": X}, after=(bad,))
        await fake.heard("compile")
        bad.cancel()
        fake.behave()
        with pytest.raises(aionn.ExecutionError, match=bad.name):
            await event


async def test_a_failed_event_fails_those_that_depend_on_it_before_and_after(first: aionn.Compilation, fake: FakeDevice, gate: int) -> None:
    waiting = first.start({"x": X}, after=(gate,))
    fake.fail("on purpose")
    bad = first.start({"x": X})
    later = first.start({"x": X}, after=(waiting, bad))
    with pytest.raises(aionn.ExecutionError, match="on purpose"):
        await bad
    fake.behave()
    for event in (later, first.start({"x": X}, after=(bad,))):
        with pytest.raises(aionn.ExecutionError, match=f"{bad.name}.*depends") as caught:
            await event
        assert "on purpose" in str(caught.value.__cause__)
    os.eventfd_write(gate, 1)
    await waiting
    await first.start({"x": X}, after=(waiting,))


async def test_a_fence_that_never_comes_ends_with_the_deadline(first: aionn.Compilation, gate: int) -> None:
    event = first.start({"x": X}, after=(gate,), timeout_s=0.05)
    fence = event.fence()
    with pytest.raises(aionn.DeadlineError):
        await event
    assert outcome_of(fence) is False
    await first.compute({"x": X})


async def test_a_cycle_over_a_foreign_fence_ends_with_the_deadline(first: aionn.Compilation, gate: int) -> None:
    """An event exists only after its start, so a cycle needs a fence of the app's, which the app never signals."""
    one = first.start({"x": X}, after=(gate,), timeout_s=0.05)
    two = first.start({"x": X}, after=(one,))

    async def signal_gate_after_two() -> None:
        await two
        os.eventfd_write(gate, 1)

    with pytest.raises(aionn.ExecutionError, match=one.name):
        await signal_gate_after_two()
    with pytest.raises(aionn.DeadlineError):
        await one


# --- wrong arguments ---------------------------------------------------------------------------------------------------------


async def test_dependencies_of_a_wrong_kind_are_refused_at_the_start(first: aionn.Compilation, tmp_path: Any) -> None:
    done = first.start({"x": X})
    await done
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    gc.collect()  # as below: earlier tests leave garbage that holds descriptors
    before = fds()
    with open(tmp_path / "file", "w+") as file:  # noqa: ASYNC230
        wrong: tuple[Any, ...] = (
            done,
            0,
            "fence",
            None,
            (None,),
            (read,),
            (file,),
            (True,),
            (object(),),
            (-1,),
            (done, 2**40),
            (file.fileno(),),
        )
        for after in wrong:
            with pytest.raises(aionn.CallerError, match=r"after|descriptor"):
                first.start({"x": X}, after=after)
    with pytest.raises(aionn.CallerError, match=r"after"):
        first.start({"x": X}, after=(file,))
    gc.collect()
    assert fds() == before
    await first.start({"x": X})


async def test_inputs_that_do_not_fit_are_refused_at_the_start(first: aionn.Compilation) -> None:
    await first.start({"x": X})
    before = fds()
    bad: tuple[Any, ...] = ({}, {"x": X[0]}, {"z": X}, {"x": X.astype(np.float64)}, [X], {"x": None})
    for inputs in bad:
        with pytest.raises(aionn.CallerError):
            first.start(inputs)
    with pytest.raises(aionn.CallerError, match="outputs"):
        first.start({"x": X}, outputs={"nothing": 1})
    with pytest.raises(aionn.CallerError, match="timeout_s"):
        first.start({"x": X}, timeout_s=-1)
    gc.collect()
    assert fds() == before
    await first.start({"x": X})


async def test_an_output_in_memory_needs_its_full_shape(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(("a", "b")), devices=(fake.name,))
        compilation_open = await runtime.compile(aionn.Model.from_onnx(_unknown_output()), devices=("reference",))
        with aionn.Memory.allocate(64) as memory, aionn.Memory.allocate(128) as large:
            await compilation.start({"x": X}, outputs={"y": memory})
            with pytest.raises(aionn.CallerError, match=r"takes 64 bytes.*pass a slice of 64"):
                compilation.start({"x": X}, outputs={"y": large})
            with pytest.raises(aionn.CallerError, match=r"output 'y'.*memory.shaped"):
                compilation_open.start({"x": X}, outputs={"y": memory})
            event = compilation_open.start({"x": X}, outputs={"y": memory.shaped((16, 1))})
            dependent = compilation.start({"x": X}, after=(event,))
            np.testing.assert_array_equal((await event)["y"], X.T)
            await dependent
            wrong = compilation_open.start({"x": X}, outputs={"y": memory.shaped((2, 8))})
            dependent = compilation.start({"x": X}, after=(wrong,))
            with pytest.raises(aionn.ExecutionError, match=r"shape \(16, 1\).*\(2, 8\)"):
                await wrong
            with pytest.raises(aionn.ExecutionError, match=wrong.name):
                await dependent


def _unknown_output(copies: int = 1) -> bytes:
    """A model whose output has axes of unknown names: its input turned, so many times."""
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Transpose", ["x"], ["turned"]), helper.make_node("Concat", ["turned"] * copies, ["y"], axis=0)],
        "turned",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["p", "q"])],
    )
    made: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return made


@leaves_nothing
async def test_memory_that_is_closed_after_the_start_stays_until_the_run_is_over(fake: FakeDevice) -> None:
    gate = os.eventfd(0)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        memory = aionn.Memory.allocate(64)
        memory.array(np.float32, (1, 16))[:] = X
        event = compilation.start({"x": memory}, after=(gate,))
        memory.close()
        with pytest.raises(aionn.CallerError, match="closed"):
            compilation.start({"x": memory})
        os.eventfd_write(gate, 1)
        np.testing.assert_array_equal((await event)["y"], X)
    os.close(gate)


async def test_an_event_of_another_runtime_or_a_closed_compilation_is_a_dependency_like_any_other(fake: FakeDevice, gate: int) -> None:
    async with aionn.Runtime() as one, aionn.Runtime() as two:
        here = await one.compile(model(), devices=(fake.name,))
        there = await two.compile(model(), devices=(fake.name,))
        waiting = there.start({"x": X}, after=(gate,))
        done = there.start({"x": X})
        await done
        dependent = here.start({"x": X}, after=(waiting,))
        await there.aclose()
        with pytest.raises(aionn.CallerError, match="closed"):
            await waiting
        with pytest.raises(aionn.ExecutionError, match=waiting.name):
            await dependent
        np.testing.assert_array_equal((await here.start({"x": X}, after=(done,)))["y"], X)
        with pytest.raises(aionn.CallerError, match="closed"):
            there.start({"x": X})


# --- ends --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "running"])
async def test_the_death_of_a_driver_reaches_those_that_depend_on_it(fake: FakeDevice, gate: int, state: str) -> None:
    async with aionn.Runtime() as runtime:
        dying = await runtime.compile(model(), devices=(fake.name,))
        other = await runtime.compile(model(), devices=("reference",))
        pid = next(device.pid for device in runtime.devices if device.name == fake.name)
        if state == "running":
            fake.hang()
        event = dying.start({"x": X}, after=(gate,) if state == "waiting" else ())
        dependent = other.start({"x": X}, after=(event,))
        fence = event.fence()
        if state == "running":
            await fake.heard("run")
        killed = time.monotonic()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(aionn.DriverDiedError):
            await event
        with pytest.raises(aionn.ExecutionError, match=event.name):
            await dependent
        assert time.monotonic() - killed < 30  # 100 ms on a machine that is not busy
        assert outcome_of(fence) is False
        fake.behave()
        np.testing.assert_array_equal((await dying.start({"x": X}))["y"], X)


@leaves_nothing
async def test_closing_settles_every_event(fake: FakeDevice) -> None:
    for closes in ("compilation", "runtime"):
        gate = os.eventfd(0)
        runtime = aionn.Runtime()
        await runtime.open()
        compilation = await runtime.compile(model(), devices=(fake.name,))
        later = await runtime.compile(model(), devices=(fake.name,), mode="jit")
        events = [compilation.start({"x": X}, after=(gate,)) for _ in range(3)]
        events.append(compilation.start({"x": X}, after=(events[0],)))
        fences = [os.dup(event.fence()) for event in events]
        fake.hang("compile")
        unprepared = later.start({"x": X})
        if closes == "compilation":
            await compilation.aclose()
            await later.aclose()
            fake.behave()
        fake.behave()
        await runtime.aclose()
        for event in events:
            with pytest.raises(aionn.AionnError):
                await event
        if closes == "compilation":
            with pytest.raises(aionn.CallerError, match="closed"):
                await unprepared
        else:
            assert unprepared.done()
            unprepared.exception()
        for fence in fences:
            assert outcome_of(fence) is False
            os.close(fence)
        os.close(gate)


async def test_without_descriptors_a_start_fails_and_later_ones_work(first: aionn.Compilation, gate: int) -> None:
    await first.start({"x": X})
    before = fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 8, hard))
        while True:
            try:
                taken.append(os.dup(gate))
            except OSError:
                break
        with pytest.raises((aionn.MemoryAllocationError, aionn.CallerError)):
            first.start({"x": X}, after=(gate,))
        plain = first.start({"x": X})  # only its fence needs a descriptor
        with pytest.raises(aionn.MemoryAllocationError):
            plain.fence()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    np.testing.assert_array_equal((await plain)["y"], X)
    gc.collect()
    assert fds() == before
    np.testing.assert_array_equal((await first.start({"x": X}))["y"], X)


async def test_without_descriptors_a_started_plan_fails_with_an_error_of_aionn(surroundings: None, gate: int) -> None:
    async with compiled(chain(("ref", "ort")), REF, ORT) as (_, compilation):
        await compilation.start({"input": X})
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        events: list[aionn.Event] = []
        refused = 0
        for left in range(8):
            taken: list[int] = []
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (fds() + 16, hard))
                with pytest.raises(OSError, match="Too many open files"):
                    while True:
                        taken.append(os.dup(gate))
                for _ in range(left):
                    os.close(taken.pop())
                events.append(compilation.start({"input": X}, after=(gate,)))
            except aionn.MemoryAllocationError:
                refused += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for fd in taken:
                    os.close(fd)
        failed = [event for event in events if isinstance(event.exception(), aionn.MemoryAllocationError)]
        assert refused
        assert failed
        assert len(failed) < len(events)
        os.eventfd_write(gate, 1)
        for event in events:
            if event not in failed:
                np.testing.assert_array_equal((await event)["output"], X)


async def test_a_started_execution_waits_for_a_swap_and_counts_as_use(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        compiled = parts_of(compilation).compiled
        touched = compiled.use.touches
        compiled.gate.close()
        event = compilation.start({"x": X})
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert not event.done()
        compiled.gate.open()
        np.testing.assert_array_equal((await event)["y"], X)
        assert compiled.use.touches > touched


async def test_device_memory_lost_with_the_driver_is_named(gate: int) -> None:
    with FakeDevice(SecondFakeEngine) as second:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(model(), devices=(second.name,))
            state = await compilation.allocate(inputs=("x",), outputs=("y",))
            await state.copy_from(X)
            second.hang()
            event = compilation.start({"x": state}, outputs={"y": state})
            pid = await second.heard("run")
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aionn.DeviceMemoryLostError):
                await event


async def test_a_retry_with_more_room_does_not_wait_for_its_dependencies_again(gate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence of the app's that was signalled once may be taken by then."""
    retries: list[int] = []
    send_again = Started._send_again

    def taken_before(started: Started, *arguments: Any) -> None:
        retries.append(os.eventfd_read(gate) if not retries else 0)
        send_again(started, *arguments)

    monkeypatch.setattr(Started, "_send_again", taken_before)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(_unknown_output(copies=8)), devices=("reference",))
        x = np.ones((100, 100), np.float32)
        event = compilation.start({"x": x}, after=(gate,), timeout_s=30)
        dependent = compilation.start({"x": x}, after=(event,))
        os.eventfd_write(gate, 1)
        np.testing.assert_array_equal((await event)["y"], np.concatenate([x] * 8))
        assert retries[0] == 1
        await dependent


async def test_a_hostile_answer_about_dependencies_fails_the_event_alone(
    first: aionn.Compilation, gate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = Started._found

    def lied_to(started: Started, serving: Any, settled: Any, found: Any) -> None:
        answered(started, serving, settled, msgspec.structs.replace(found, failed=12345))

    monkeypatch.setattr(Started, "_found", lied_to)
    os.eventfd_write(gate, 1)
    with pytest.raises(aionn.ExecutionError, match="dependency 12345"):
        await first.start({"x": X}, after=(gate,))
    monkeypatch.undo()
    np.testing.assert_array_equal((await first.start({"x": X}))["y"], X)


async def test_the_death_of_a_driver_under_a_step_of_a_started_plan_is_its_error(surroundings: None) -> None:
    with FakeDevice(LeftFake), FakeDevice(RightFake) as right:
        async with compiled(chain(("left", "right")), LEFT, RIGHT) as (_, compilation):
            right.hang("run")
            event = compilation.start({"input": X})
            dependent = compilation.start({"input": X}, after=(event,))
            os.kill(await right.heard("run"), signal.SIGKILL)
            with pytest.raises(aionn.DriverDiedError) as died:
                await event
            assert died.value.device == RIGHT
            with pytest.raises(aionn.DriverDiedError):  # its own second step was with that driver, too
                await dependent
            right.behave()
            np.testing.assert_array_equal((await compilation.start({"input": X}))["output"], X)


@pytest.mark.parametrize("devices", [("reference",), (REF, ORT)], ids=["whole", "plan"])
async def test_an_input_with_a_default_may_be_left_out_of_a_start(surroundings: None, devices: tuple[str, ...]) -> None:
    """A step may hand such an input through, as an output of the model."""
    weight = X + 1
    content = made(
        [node("ref_add", "Add", ["x", "weight"], ["sum"]), node("ort_mul", "Mul", ["sum", "weight"], ["y"])],
        {"x": [1, 16], "weight": [1, 16]},
        {"y": [1, 16], "weight": [1, 16]},
        [numpy_helper.from_array(weight, "weight")],
    )
    async with compiled(content, *devices) as (_, compilation):
        for given, used in (({}, weight), ({"weight": weight * 2}, weight * 2), ({}, weight)):
            for found in (await compilation.start({"x": X, **given}), await compilation.compute({"x": X, **given})):
                np.testing.assert_array_equal(found["y"], (X + used) * used)
                np.testing.assert_array_equal(found["weight"], used)


@pytest.mark.own_process("forks of test_started.py")
async def test_a_child_of_fork_cannot_cancel_an_event_of_its_parent(first: aionn.Compilation, gate: int) -> None:
    event = first.start({"x": X}, after=(gate,))
    fence = event.fence()
    child = os.fork()
    if not child:
        try:
            event.cancel()
        except aionn.CallerError:
            os._exit(7)
        os._exit(1)
    _, status = await anyio.to_thread.run_sync(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert outcome_of(fence) is None
    os.eventfd_write(gate, 1)
    np.testing.assert_array_equal((await event)["y"], X)


async def test_outputs_that_the_app_holds_keep_their_values_while_other_starts_run(first: aionn.Compilation) -> None:
    for _ in range(3):
        held = [await event for event in [first.start({"x": X + number}) for number in range(IN_FLIGHT // 2)]]
        for number in range(IN_FLIGHT):
            await first.start({"x": X - number - 1})
        for number, outputs in enumerate(held):
            np.testing.assert_array_equal(outputs["y"], X + number)
        del held, outputs


async def test_device_memory_that_cannot_be_made_fails_its_start_and_not_the_runtime(surroundings: None) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> add (float[4] x, float[4] s) => (float[4] y) { y = Add(x, s) }'
    )
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(model.SerializeToString()), devices=("onnxruntime",))
        async with await compilation.allocate(inputs=["s"], outputs=["y"], shape=(4,)) as state:
            await state.copy_from(np.zeros(4, np.float32))
            x, before = np.ones(4, np.float32), resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
            try:
                with pytest.raises(aionn.MemoryAllocationError, match="RLIMIT_FSIZE"):
                    await compilation.start({"x": x, "s": state}, outputs={"y": state})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            await compilation.start({"x": x, "s": state}, outputs={"y": state})
            assert (await state.copy_to()).tolist() == [1, 1, 1, 1]
