"""Started executions of a plan: all steps are sent at once, and each waits in its driver for the fence of the step before."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aionn
from aionn.remote.device import RemotePreparedModel
from aionn.remote.fences import outcome_of
from aionn.runtime.executing import fenced_plan
from aionn.runtime.serving.planned_execution import PlannedExecution
from aionn.testing import FakeDevice
from tests.leaks import leak_check
from tests.runtime.partial_engines import LeftFake, RightFake
from tests.runtime.planned_models import (
    LEFT,
    ORT,
    REF,
    RIGHT,
    chain,
    compiled,
    filtering,
    made,
    node,
    numbers,
    plan_of,
    woven,
    woven_outputs,
)

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops, pytest.mark.usefixtures("surroundings")]


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number per chain of steps that was sent. The chains themselves would keep their events alive."""
    sent: list[int] = []
    send = fenced_plan.FencedPlan.send

    def noted(chain: fenced_plan.FencedPlan) -> Callable[[], None]:
        sent.append(len(sent))
        return send(chain)

    monkeypatch.setattr(fenced_plan.FencedPlan, "send", noted)
    return sent


@pytest.fixture
def gate() -> Iterator[int]:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


async def test_all_steps_run_while_the_apps_loop_stands_still(chains: list[int]) -> None:
    async with leak_check(), compiled(woven((2, 3)), REF, ORT) as (_, compilation):
        x, y = numbers((2, 3)), numbers((2, 3), 1)
        for _ in range(3):
            event = compilation.start({"x": x, "y": y})
            fence = event.fence()
            poll = select.poll()
            poll.register(fence, select.POLLIN)
            assert poll.poll(10_000), "the loop did not run, so nothing but the drivers can have signalled it"
            assert outcome_of(fence) is True
            assert not event.done()
            outputs = await event
            for name, expected in woven_outputs(x, y).items():
                np.testing.assert_allclose(outputs[name], expected, rtol=1e-6)
            assert outputs.device == compilation.device
            del event, outputs
        assert len(chains) == 3
        assert len(plan_of(compilation).steps) == 4


async def test_an_apps_memory_and_another_compilation_are_part_of_the_chain(chains: list[int], gate: int) -> None:
    async with leak_check(), compiled(chain(("left", "right", "left")), LEFT, RIGHT) as (runtime, compilation):
        after = await runtime.compile(aionn.Model.from_onnx(chain(("left",))), devices=(LEFT,))
        x = numbers((1, 16))
        with aionn.Memory.allocate(64) as memory:
            first = compilation.start({"input": x}, after=(gate,), outputs={"output": memory.shaped((1, 16))})
            second = after.start({"input": memory.shaped((1, 16))}, after=(first,))
            fence = second.fence()
            os.eventfd_write(gate, 1)
            assert select.select([fence], [], [], 10)[0]
            np.testing.assert_array_equal((await second)["output"], x)
            np.testing.assert_array_equal((await first)["output"], x)
            del first, second
        assert len(chains) == 1


async def test_a_tensor_of_unknown_shape_lets_its_reader_wait_for_the_answer(chains: list[int]) -> None:
    async with leak_check(), compiled(filtering(), REF, ORT) as (_, compilation):
        for seed in range(3):
            x = numbers((20 + seed,), seed)
            outputs = await compilation.start({"x": x})
            np.testing.assert_array_equal(outputs["end"], -2 * x[x > 0])
            del outputs
    assert len(chains) >= 3


async def test_a_plan_with_a_tensor_of_unknown_shape_waits_in_its_drivers_and_signals_its_event(gate: int) -> None:
    x = numbers((20,), 1)
    async with leak_check(), compiled(filtering(), REF, ORT) as (_, compilation):
        event = compilation.start({"x": x}, after=(gate,))
        dependent = compilation.start({"x": x}, after=(event,))
        cancelled = compilation.start({"x": x}, after=(gate,))
        cancelled.cancel()
        os.eventfd_write(gate, 1)
        np.testing.assert_array_equal((await dependent)["end"], -2 * x[x > 0])
        np.testing.assert_array_equal((await event)["end"], -2 * x[x > 0])
        timed = compilation.start({"x": x}, measure_timing=True)
        timing = (await timed).timing
        assert timing is not None
        assert timed.since_launch is not None
        assert timing.in_driver_us <= timed.since_launch.in_driver_us < 10_000_000
        del event, dependent, cancelled, timed


async def test_the_time_is_the_sum_of_the_steps(chains: list[int]) -> None:
    async with compiled(chain(("left", "right", "left")), LEFT, RIGHT) as (_, compilation):
        event = compilation.start({"input": numbers((1, 16))}, measure_timing=True)
        timing = (await event).timing
        assert timing is not None
        assert timing.in_driver_us < 10_000_000
        assert event.since_launch is not None
        assert event.since_launch.in_driver_us >= 0
        assert len(chains) == 1


@pytest.mark.parametrize("device", ["left", "right"])
async def test_a_step_that_fails_is_named_and_dependents_fail(device: str, chains: list[int]) -> None:
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right:
        async with leak_check(), compiled(chain(("left", "right", "left")), LEFT, RIGHT) as (_, compilation):
            x = numbers((1, 16))
            fake = right if device == "right" else left
            fake.fail("on purpose")
            event = compilation.start({"input": x})
            dependent = compilation.start({"input": x}, after=(event,))
            fence = os.dup(event.fence())
            step = 1 if device == "left" else 2
            with pytest.raises(aionn.ExecutionError, match=f"step {step} of 3, on device .*on purpose"):
                await event
            assert outcome_of(fence) is False
            os.close(fence)
            with pytest.raises(aionn.ExecutionError, match=event.name):
                await dependent
            fake.behave()
            np.testing.assert_array_equal((await compilation.start({"input": x}))["output"], x)
            del event, dependent
    assert len(chains) == 3


@pytest.mark.parametrize("device", ["left", "right"])
async def test_a_driver_that_dies_ends_the_event_and_signals_its_fence(device: str, chains: list[int]) -> None:
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right:
        async with leak_check(), compiled(chain(("left", "right", "left")), LEFT, RIGHT) as (_, compilation):
            x = numbers((1, 16))
            await compilation.compute({"input": x})
            fake = left if device == "left" else right
            fake.hang()
            event = compilation.start({"input": x})
            dependent = compilation.start({"input": x}, after=(event,))
            fence = os.dup(event.fence())
            pid = await fake.heard("run")
            os.kill(pid, signal.SIGKILL)
            fake.behave()
            with anyio.fail_after(30), pytest.raises((aionn.DriverDiedError, aionn.ExecutionError)):
                await event
            assert outcome_of(fence) is False
            os.close(fence)
            with anyio.fail_after(30), pytest.raises((aionn.DriverDiedError, aionn.ExecutionError)):
                await dependent
            del event, dependent
            np.testing.assert_array_equal((await compilation.start({"input": x}))["output"], x)
    assert chains


async def test_a_cancelled_start_and_a_closed_compilation_leave_nothing(chains: list[int], gate: int) -> None:
    async with leak_check(), compiled(chain(("left", "right", "left")), LEFT, RIGHT) as (_, compilation):
        x = numbers((1, 16))
        events = [compilation.start({"input": x}, after=(gate,)) for _ in range(10)]
        events[0].cancel()
        assert outcome_of(events[0].fence()) is False
        late = compilation.start({"input": x}, after=(gate,), timeout_s=0.05)
        with pytest.raises(aionn.DeadlineError):
            await late
        await compilation.aclose()
        for event in events[1:]:
            with pytest.raises(aionn.CallerError, match="closed"):
                await event
        assert len(chains) == 11
        del events, event, late


@pytest.mark.parametrize("end", ["cancelled", "dead"])
async def test_the_frame_of_a_chain_stays_until_no_driver_can_touch_it(end: str, chains: list[int], gate: int) -> None:
    """The tensors between the steps lie in it. Its last step may still run when the event is over."""
    x = numbers((1, 16))
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right:
        async with compiled(chain(("left", "right")), LEFT, RIGHT) as (_, compilation):
            np.testing.assert_array_equal((await compilation.start({"input": x}))["output"], x)
            frames = compilation._parts.starts.executor.frames
            assert frames.count()["pinned_frames"] == 0
            right.hang("run")
            event = compilation.start({"input": x})
            await right.heard("run")
            if end == "cancelled":
                event.cancel()
            else:
                left.crash("run")
                with pytest.raises(aionn.DriverDiedError):
                    await compilation.start({"input": x})
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert frames.count()["pinned_frames"] == 1
            right.behave()
            with anyio.fail_after(30):
                while frames.count()["pinned_frames"]:
                    await anyio.lowlevel.checkpoint()
            assert len(chains) == 2 + (end == "dead")


async def test_no_step_is_sent_once_the_event_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step is left to be sent with the answer of the first, which comes last."""
    x, sent = numbers((1, 16)), []
    start = RemotePreparedModel.start_fenced

    def noted(prepared: RemotePreparedModel, *arguments: Any) -> Any:
        sent.append(prepared.device.name)
        return start(prepared, *arguments)

    monkeypatch.setattr(PlannedExecution, "expect", lambda planned, number: None)
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake):
        async with leak_check(), compiled(chain(("left", "right")), LEFT, RIGHT) as (_, compilation):
            monkeypatch.setattr(RemotePreparedModel, "start_fenced", noted)
            np.testing.assert_array_equal((await compilation.start({"input": x}))["output"], x)
            left.hang("run")
            event = compilation.start({"input": x})
            await left.heard("run")
            event.cancel()
            left.behave()
            frames = compilation._parts.starts.executor.frames
            with anyio.fail_after(30):
                while frames.count()["pinned_frames"]:
                    await anyio.lowlevel.checkpoint()
            assert sent == [LEFT, RIGHT, LEFT]
            del event


async def test_a_start_before_it_is_known_that_a_plan_runs_moves_to_a_frame_with_room(chains: list[int]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(woven((2, 3))), devices=(REF, ORT), mode="jit")
        y, given = numbers((2, 3), 1), np.empty((2, 3), np.float32)
        events = []
        for number in range(8):  # without the room, what lies between the steps of one is written over the inputs of the next
            given[:] = numbers((2, 3), number)  # copied at once
            events.append(compilation.start({"x": given, "y": y}))
        for number, event in enumerate(events):
            outputs = await event
            for name, expected in woven_outputs(numbers((2, 3), number), y).items():
                np.testing.assert_allclose(outputs[name], expected, rtol=1e-6)
            del outputs
        assert len(plan_of(compilation).steps) == 4
        del event, events
    assert len(chains) == 8


async def test_many_starts_share_the_memory_of_few(chains: list[int]) -> None:
    async with leak_check(), compiled(chain(("left", "right", "left", "right")), LEFT, RIGHT) as (_, compilation):
        for round_number in range(5):
            started = [compilation.start({"input": numbers((1, 16), number)}) for number in range(20)]
            for number, event in enumerate(started):
                np.testing.assert_array_equal((await event)["output"], numbers((1, 16), number), err_msg=str(round_number))
            del started, event
        assert len(chains) == 100


async def test_a_shape_that_no_declaration_told_runs_again(chains: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain is made to believe a shape that the boundary tensor does not have."""
    asked, expect = PlannedExecution._asked_shape, PlannedExecution.expect

    def believing(planned: PlannedExecution, number: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(PlannedExecution, "_asked_shape", lambda planned, name: asked(planned, name) or (3,))
            expect(planned, number)

    monkeypatch.setattr(PlannedExecution, "expect", believing)
    async with leak_check(), compiled(filtering(), REF, ORT) as (_, compilation):
        outputs = await compilation.start({"x": np.array([1, -1, 2, -2], np.float32)})
        np.testing.assert_array_equal(outputs["end"], [-2, -4])
        del outputs
    assert len(chains) == 2


async def test_what_depends_on_a_plan_that_runs_again_waits_for_the_second_run() -> None:
    """The first run ends with a step that never begins. Its driver must not tell the dependents that the plan has failed."""
    nodes = [*ABOVE_ZERO, node("ref_keep", "Compress", ["x", "above"], ["kept"], axis=0), node("ort_neg", "Neg", ["kept"], ["end"])]
    async with leak_check(), compiled(made(nodes, {"x": [4]}, {"end": ["M"], "kept": [4]}), REF, ORT) as (_, compilation):
        first = compilation.start({"x": MIXED})
        second = compilation.start({"x": 2 * MIXED}, after=(first,), timeout_s=20)
        found = await second
        assert (found["end"].tolist(), first.result()["end"].tolist()) == ([-2.0, -4.0], [-1.0, -2.0])
        del found, first, second


MIXED = np.array([1, -1, 2, -2], np.float32)

ABOVE_ZERO = (node("ref_zero", "Sub", ["x", "x"], ["zero"]), node("ref_above", "Greater", ["x", "zero"], ["above"]))


async def started_and_computed(compilation: aionn.Compilation) -> list[dict[str, list[float]]]:
    """Return the outputs of a start, a call and a start."""
    found = []
    for way in (compilation.start, compilation.compute, compilation.start):
        found.append({name: output.tolist() for name, output in (await way({"x": MIXED})).items()})
    return found


async def test_a_false_shape_of_an_output_that_no_step_reads_runs_again() -> None:
    model = made(
        [
            *ABOVE_ZERO,
            node("ref_keep", "Compress", ["x", "above"], ["kept"], axis=0),
            node("ort_double", "Add", ["zero", "x"], ["twice"]),
            node("ref_neg", "Neg", ["twice"], ["end"]),
        ],
        {"x": [4]},
        {"kept": [4], "end": [4]},
    )
    async with leak_check(), compiled(model, REF, ORT) as (_, compilation):
        assert len(plan_of(compilation).steps) == 3
        right = {"kept": [1.0, 2.0], "end": [-1.0, 1.0, -2.0, 2.0]}
        assert await started_and_computed(compilation) == [right] * 3


async def test_the_second_run_waits_for_each_answer_before_it_sends_the_next_step() -> None:
    """The third step reads what the first one makes, so it could be sent before the second one's shape is known to be false."""
    model = made(
        [
            node("ort_double", "Add", ["x", "x"], ["twice"]),
            node("ref_zero", "Sub", ["twice", "twice"], ["zero"]),
            node("ref_above", "Greater", ["twice", "zero"], ["above"]),
            node("ref_keep", "Compress", ["twice", "above"], ["kept"], axis=0),
            node("left_same", "Identity", ["twice"], ["same"]),
            node("ort_neg", "Neg", ["kept"], ["end"]),
            node("ort_other", "Neg", ["same"], ["other"]),
        ],
        {"x": [4]},
        {"end": ["M"], "other": [4], "kept": [4]},
    )
    with FakeDevice(LeftFake):
        async with leak_check(), compiled(model, REF, LEFT, ORT) as (_, compilation):
            assert len(plan_of(compilation).steps) == 4
            right = {"end": [-2.0, -4.0], "other": [-2.0, 2.0, -4.0, 4.0], "kept": [2.0, 4.0]}
            assert await started_and_computed(compilation) == [right] * 3


async def test_as_many_starts_as_may_be_pending_run_again_in_their_frames() -> None:
    nodes = [*ABOVE_ZERO, node("ref_keep", "Compress", ["x", "above"], ["kept"], axis=0), node("ort_neg", "Neg", ["kept"], ["end"])]
    async with leak_check(), compiled(made(nodes, {"x": [4]}, {"end": ["M"], "kept": [4]}), REF, ORT) as (_, compilation):
        await compilation.compute({"x": MIXED})
        events = [compilation.start({"x": MIXED}) for _ in range(64)]
        for event in events:
            assert (await event)["end"].tolist() == [-1.0, -2.0]
        del events, event
