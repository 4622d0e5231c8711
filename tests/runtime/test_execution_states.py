"""What becomes of an execution in each state, on each channel, when its caller leaves, its deadline passes, its driver dies, its model is
swapped or its compilation is closed. Real driver processes, through the public face.

State       How a test reaches it, and what proves it
"turn"      As many calls as the channel takes are with the driver, and the first of them is held there. Proof: the driver never runs it.
"sent"      It is behind the call that the driver holds. Proof: the driver runs it later, once, with all of its own inputs.
            A call in the queue of a burst is never run if its caller leaves (`QUEUED`).
"running"   The driver runs it, and is held there. Proof: the driver has begun it, and reads its inputs once more at the end.
"unread"    The loop stands still while the driver answers it. Proof: the driver has begun the next call.
"widened"   Its first answer was too large for its place. Proof: the driver runs it for the second time, and is held there.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import select
import signal
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

import aionn
from aionn.runtime.processes.devices import Devices
from aionn.runtime.serving.serving import Gate, Serving
from aionn.testing import FakeDevice
from aionn.testing.fake_engine import SecondFakeEngine
from tests.leaks import leak_check
from tests.runtime.execution_channels import CHANNELS, BurstChannel, Call, Channel, StartChannel, StepChannel
from tests.runtime.gated_engines import LARGE, GatedCpu, GatedEngine, Runs

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings"), pytest.mark.no_cover]

WITHDRAWN = {"turn": False, "sent": True, "running": True, "unread": True}
"""Whether the driver runs a call in that state whose caller leaves."""

QUEUED = tuple(CHANNELS[name] for name in ("compute", "burst", "frame", "step"))
"""In a burst's queue, a sent call whose caller leaves becomes late, and is never run."""

EVENTS = ("cancel", "deadline", "kill", "swap", "aclose")


class Scene:
    """A channel, and the calls of one event in one state.

    Attributes:
        first: the call that the driver holds. victims: the calls in the state. others: calls before and beside them.
    """

    def __init__(self, channel: Channel, state: str, event: str) -> None:
        self.channel, self.state, self.event = channel, state, event
        self.others: list[Call] = []
        self.victims: list[Call] = []
        self.numbers = itertools.count(10 + 200 * EVENTS.index(event))
        self.ends = channel.ends()

    def __repr__(self) -> str:
        return f"{type(self.channel).__name__}: {self.state}, {self.event}"

    async def reach(self, timeout_s: float | None) -> None:
        """Bring calls into the state."""
        channel, runs = self.channel, self.channel.runs
        held = next(self.numbers)
        if self.state == "widened":
            held = LARGE + 2 + EVENTS.index(self.event)
            runs.hold(held, 2)
            self.victims = [channel.begin(held, timeout_s)]
            await runs.begun(held, 2)
            return
        runs.hold(held)
        first = channel.begin(held, timeout_s if self.state in ("unread", "running") else None)
        await runs.begun(held)
        if self.state == "running":
            self.victims = [first]
            return
        if self.state == "unread":
            self.victims = [first]
            self.others = [channel.begin(next(self.numbers))]
            runs.hold(self.others[0].number)
            await anyio.wait_all_tasks_blocked()
            runs.open(held)
            runs.begun_without_loop(self.others[0].number)
            assert not first.task.done(), "the loop has not run"
            return
        self.others = [first]
        if self.state == "turn":
            self.others += [channel.begin(next(self.numbers)) for _ in range(channel.full - 1)]
            await anyio.wait_all_tasks_blocked()
        self.victims = [channel.begin(next(self.numbers), timeout_s) for _ in range(2 if self.state == "turn" else channel.full - 1)]
        await anyio.wait_all_tasks_blocked()

    async def outcomes(self, calls: list[Call]) -> set[str]:
        return {await call.outcome() for call in calls}

    async def check(self, expected: set[str], others: set[str], computed: bool | None) -> None:
        """Look at the outcomes, at what the driver ran, and at the channel afterwards. `computed`: whether the driver ran the victims."""
        channel = self.channel
        assert await self.outcomes(self.victims) == expected, self
        channel.runs.open()
        if self.others:
            assert await self.outcomes(self.others) == others, self
        await channel.again()
        after = [channel.begin(next(self.numbers))]  # the driver has answered all before it, also those whose callers have left
        await self.outcomes(after)
        after += [channel.begin(next(self.numbers)) for _ in range(channel.full)]
        found = await self.outcomes(after)
        assert found == {"newer" if self.event == "swap" else "older"}, f"after {self}"
        given = channel.runs.look()
        assert -1 not in given, f"{self}: a call wrote into the arguments of another one"
        if computed is not None and (self.state, self.channel.home) != ("sent", "plan") and self.channel.waits:
            times = {given.count(call.number) for call in self.victims}
            assert times == ({1} if computed else {0}), f"{self}: not in that state"
        cancelled = sum(call.task.cancelled() for call in self.victims)
        calls = len(self.victims) + len(self.others) + len(after)
        assert channel.ends() - self.ends == calls - cancelled, self
        assert channel.pinned() == 0, self


async def cancel(scene: Scene) -> None:
    """The cancelled call ends at once. Sent, its arguments stay until its answer; not sent or not taken from a queue, it is never run."""
    await scene.reach(None)
    for call in scene.victims:
        call.cancel()
    assert await scene.outcomes(scene.victims) == {"CancelledError"}, scene
    busy = [scene.channel.begin(next(scene.numbers)) for _ in range(2)] if scene.channel.waits else []
    await anyio.wait_all_tasks_blocked()
    scene.others += busy
    withdrawn = scene.state == "sent" and type(scene.channel) in QUEUED
    await scene.check({"CancelledError"}, {"older"}, False if withdrawn else WITHDRAWN.get(scene.state))


async def deadline(scene: Scene) -> None:
    """The late call ends with `DeadlineError`, and no other call does."""
    await scene.reach(0.5)
    expected = {"DeadlineError"}
    if scene.state == "unread":
        select.select([], [], [], 0.5)  # the loop stands still until the deadline has passed, so both have come when it goes on
        scene.channel.runs.open()
        expected = await scene.outcomes(scene.victims)
        assert expected <= {"older", "DeadlineError"}, scene
    await scene.check(expected, {"older"}, False if scene.state == "turn" else None)


async def kill(scene: Scene) -> None:
    """Calls that the driver had end with its death. Those that waited are computed by the next driver."""
    await scene.reach(None)
    died = {scene.channel.died}
    os.kill(scene.channel.pid, signal.SIGKILL)
    scene.channel.runs.open()
    answered = scene.state == "unread" and (scene.channel.queues or await scene.outcomes(scene.victims) == {"older"})
    waited = scene.state == "turn" and not scene.channel.waits_in_burst
    expected = {"older"} if answered or waited else died
    await scene.check(expected, died, None)


async def swap(scene: Scene) -> None:
    """Each call is computed by one of the two models, and every later call by the newer one."""
    await scene.reach(None)
    swapping = asyncio.ensure_future(scene.channel.runtime.swap(scene.channel.compilation, scene.channel.model("newer")))
    await anyio.wait_all_tasks_blocked()
    scene.channel.runs.open()
    with anyio.fail_after(30):
        await swapping
    found = await scene.outcomes(scene.victims)
    assert found <= {"older", "newer"}, scene
    if scene.state != "turn":
        assert found == {"older"}, scene
    await scene.check(found, {"older"}, None)


async def aclose(scene: Scene) -> None:
    """Calls that the driver has are answered. Those that wait end with `CallerError`, as every later one."""
    await scene.reach(None)
    closing = asyncio.ensure_future(scene.channel.compilation.aclose())
    await anyio.wait_all_tasks_blocked()
    scene.channel.runs.open()
    expected = {"CallerError" if scene.state == "turn" else scene.channel.closed}
    if scene.state == "unread":  # of a start, the loop may take the answer or the closing first
        expected = {"newer"} if scene.channel.waits else {"newer", scene.channel.closed}
    found = await scene.outcomes(scene.victims)
    assert found == expected or (scene.state == "unread" and len(found) == 1 and found < expected), scene
    await closing
    await scene.outcomes(scene.others)
    calls = len(scene.victims) + len(scene.others)
    assert scene.channel.ends() - scene.ends == calls, scene
    with pytest.raises(Exception, match=r"closed|not open"):
        await scene.channel.call(1, None).task


ACTS: dict[str, Callable[[Scene], Awaitable[None]]] = {"cancel": cancel, "deadline": deadline, "kill": kill, "swap": swap, "aclose": aclose}
STATES: dict[str, tuple[str, ...]] = {
    "turn": ("compute", "burst", "frame", "step", "values", "plan", "planned_burst"),
    "sent": tuple(CHANNELS),
    "running": tuple(CHANNELS),
    "unread": ("compute", "burst", "frame", "step", "values", "start"),
    "widened": ("compute", "burst", "frame", "plan", "planned_burst", "start", "started_plan"),
}


@pytest.mark.parametrize("case", [f"{state} {name}" for state, names in STATES.items() for name in names])
async def test_an_execution_ends_rightly_in_each_state(case: str) -> None:
    """Covers: a call that waits is withdrawn and passes its turn on, and a sent one keeps its arguments until the answer or a death;
    one deadline for all; each call counts once; cleanup needs no await."""
    state, channel = case.split()
    async with leak_check():
        tasks = asyncio.all_tasks()
        opened = CHANNELS[channel](wide=state == "widened")
        async with opened.open():
            for event, act in ACTS.items():
                await act(Scene(opened, state, event))
        del opened, act
        await anyio.wait_all_tasks_blocked()
        assert asyncio.all_tasks() <= tasks


# --- states that one kind of channel has ---------------------------------------------------------------------------------------


class Fence:
    """A descriptor that started executions wait for."""

    def __enter__(self) -> Fence:
        self.fd = os.eventfd(0)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def open(self) -> None:
        os.eventfd_write(self.fd, 1)


@pytest.mark.parametrize("event", [*EVENTS, "await"])
@pytest.mark.parametrize("channel", ["start", "started_plan"])
async def test_a_started_execution_that_waits_for_a_fence_ends_rightly(channel: str, event: str) -> None:
    """Covers: `start` copies at once, and refuses the 65th; cancelling an `await execution` leaves it running."""
    async with leak_check():
        opened = CHANNELS[channel]()
        async with opened.open():
            assert isinstance(opened, StartChannel)
            await started_behind_a_fence(opened, event)
            del opened


async def started_behind_a_fence(channel: StartChannel, event: str) -> None:
    ends = channel.ends()
    with Fence() as fence:
        x = channel.x(10)
        started = channel.compilation.start({"x": x}, after=(fence.fd,), timeout_s=0.3 if event == "deadline" else None)
        x[:] = 11
        call = Call(10, waiting(started), started.cancel)
        calls = [channel.call(number, None, (fence.fd,)) for number in range(20, 60 if event in ("cancel", "deadline") else 83)]
        if len(calls) == 63:
            with pytest.raises(aionn.CallerError, match="64 started"):
                channel.call(99, None, (fence.fd,))
        await anyio.wait_all_tasks_blocked()
        assert not started.done()
        if event == "await":
            call.task.cancel()
            assert await call.outcome() == "CancelledError"
            call = Call(10, waiting(started))
            expected = "older"
        elif event == "cancel":
            assert started.cancel()
            expected = "CancelledError"
        elif event == "deadline":
            expected = "DeadlineError"
        elif event == "kill":
            os.kill(channel.pid, signal.SIGKILL)
            expected = "DriverDiedError"
        elif event == "aclose":
            await channel.compilation.aclose()
            expected = "CallerError"
        else:
            swapping = asyncio.ensure_future(channel.runtime.swap(channel.compilation, channel.model("newer")))
            await anyio.wait_all_tasks_blocked()
            expected = "older"
        if event in ("cancel", "deadline", "kill", "aclose"):
            assert await call.outcome() == expected
        if event in ("cancel", "deadline"):
            await channel.call(90, None).task  # the driver knows by now that the call has ended
        others = {"kill": "DriverDiedError", "aclose": "CallerError"}.get(event, "older")
        if others != "older":
            assert {await other.outcome() for other in calls} == {others}
        fence.open()
        assert await call.outcome() == expected
        assert {await other.outcome() for other in calls} == {others}
        if event == "swap":
            await swapping
        if event != "aclose":
            assert await channel.begin(100).outcome() == ("newer" if event == "swap" else "older")
        given = channel.runs.look()
        assert given.count(10) == (expected == "older")
        assert (11 in given, 99 in given, -1 in given) == (False, False, False)
        ended = len(calls) + {"cancel": 2, "deadline": 3, "aclose": 1}.get(event, 2)
        assert channel.ends() - ends == ended


async def waiting(started: aionn.Event) -> aionn.Outputs:
    return await started


async def test_a_wait_for_a_fence_is_no_hang() -> None:
    """Covers: waiting for a fence is not executing, when hung is judged. A driver that hangs meanwhile is killed, so the time was over."""
    async with leak_check(), AsyncExitStack() as stack:
        fence = stack.enter_context(Fence())
        devices = [stack.enter_context(FakeDevice(engine)) for engine in (GatedEngine, SecondFakeEngine)]
        runtime = await stack.enter_async_context(aionn.Runtime(hang_s=0.3, start=()))
        channel = StartChannel()
        first, second = [await runtime.compile(channel.model("older"), devices=(device.name,)) for device in devices]
        started = first.start({"x": channel.x(10)}, after=(fence.fd,))
        for _ in range(2):
            devices[1].hang()
            with pytest.raises(aionn.DriverHungError), anyio.fail_after(30):
                await second.compute({"x": channel.x(11)})
            devices[1].behave()
        assert not started.done()
        fence.open()
        assert await Call(10, waiting(started)).outcome() == "older"
        del started, channel


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_an_execution_in_its_fallback_ends_rightly(way: str, event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: the deadline is over the fallback, too; the one compile serves it; a call that falls back counts once as failed."""
    async with leak_check():
        with FakeDevice() as broken, FakeDevice(GatedCpu) as cpu:
            monkeypatch.setattr(Devices, "installed", property(lambda _: [broken.name, cpu.name]))
            channel = (BurstChannel if way == "burst" else Channel)()
            runs = channel.runs = Runs(cpu, GatedCpu)
            try:
                channel.name = f"fallback {way} {event}"
                async with aionn.Runtime(name=channel.name, start=()) as channel.runtime:
                    await in_fallback(channel, broken, cpu, event)
            finally:
                runs.close()
            del channel


async def in_fallback(channel: Channel, broken: FakeDevice, cpu: FakeDevice, event: str) -> None:
    runs, runtime = channel.runs, channel.runtime
    channel.gated = cpu.name
    channel.compilation = compilation = await runtime.compile(channel.model("older"))
    async with AsyncExitStack() as stack:
        await channel.enter(stack)
        assert await channel.begin(1).outcome() == "older"
        assert compilation.device == broken.name
        broken.fail()
        runs.hold(10)
        call = channel.begin(10, 3.0 if event == "deadline" else None)
        await runs.begun(10)
        assert not call.task.done()
        if event == "cancel":
            call.cancel()
            assert await call.outcome() == "CancelledError"
        elif event == "deadline":
            assert await call.outcome() == "DeadlineError"
        elif event == "kill":
            os.kill(channel.pid, signal.SIGKILL)
            assert await call.outcome() == "ExecutionError"  # the first error, with a note
            assert "was tried, too" in call.task.exception().__notes__[0]  # type: ignore[union-attr]
        elif event == "swap":
            broken.behave()
            swapping = asyncio.ensure_future(runtime.swap(compilation, channel.model("newer")))
            await anyio.wait_all_tasks_blocked()
        else:
            closing = asyncio.ensure_future(compilation.aclose())
            await anyio.wait_all_tasks_blocked()
        runs.open()
        if event == "aclose":
            assert await call.outcome() in ("older", "CallerError", "ExecutionError")
            await closing
            return
        if event == "swap":
            assert await call.outcome() == "older"
            await swapping
        else:
            assert await channel.begin(11).outcome() == "older"
            assert compilation.device == cpu.name
        assert -1 not in runs.look()
        if event in ("swap", "kill"):
            assert channel.ends() == channel.begun


@pytest.mark.parametrize("event", ["cancel", "kill", "swap", "aclose"])
@pytest.mark.parametrize("channel", ["burst", "planned_burst"])
async def test_a_stream_with_frames_in_flight_ends_rightly(channel: str, event: str) -> None:
    """Covers: the frames of `map` are executions like others; a consumer that leaves ends the stream, and nothing of it stays."""
    async with leak_check():
        opened = CHANNELS[channel]()
        async with opened.open():
            assert isinstance(opened, BurstChannel)
            await streamed(opened, event)
        del opened


async def streamed(channel: BurstChannel, event: str) -> None:
    runs, taken = channel.runs, []
    frames = [{"x": channel.x(number)} for number in range(10, 20)]
    runs.hold(12)

    async def take() -> None:
        async for result in channel.burst.map(frames, depth=3):
            taken.append((result.seq, float(result.outputs["y"][0, 0])))

    before = asyncio.all_tasks()
    consumer = asyncio.ensure_future(take())
    await runs.begun(12)
    if event == "cancel":
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
    elif event == "kill":
        os.kill(channel.pid, signal.SIGKILL)
        with pytest.raises(aionn.DriverDiedError):
            await consumer
    elif event == "aclose":
        closing = asyncio.ensure_future(channel.compilation.aclose())
        with pytest.raises(aionn.CallerError):
            await consumer
    else:
        swapping = asyncio.ensure_future(channel.runtime.swap(channel.compilation, channel.model("newer")))
        await anyio.wait_all_tasks_blocked()
    runs.open()
    if event == "swap":
        await consumer
        await swapping
        assert [seq for seq, _ in taken] == list(range(10))
        assert [int(value) for _, value in taken] == list(range(10, 20))
        assert sorted(value % 1 for _, value in taken) == [value % 1 for _, value in taken], "older ones before newer ones"
    else:
        assert taken == [(0, 10.0), (1, 11.0)][: len(taken) if event == "cancel" else None]
    if event == "aclose":
        await closing
        return
    assert await channel.begin(30).outcome() == ("newer" if event == "swap" else "older")
    await anyio.wait_all_tasks_blocked()
    new_driver = {task for task in asyncio.all_tasks() if event == "kill" and task.get_name().startswith("watch over")}
    assert event == "swap" or asyncio.all_tasks() - new_driver <= before, "a stream without a consumer went on"
    assert channel.pinned() == 0
    assert -1 not in runs.look()


@pytest.mark.parametrize("channel", CHANNELS)
async def test_a_swap_between_calls_that_come_all_the_time_is_one_moment(channel: str) -> None:
    """Covers: no await between the choice of a channel or a place and the sending, or a swap slips in."""
    async with leak_check():
        opened = CHANNELS[channel]()
        async with opened.open():
            await swapped_under_load(opened)
        del opened


async def swapped_under_load(channel: Channel) -> None:
    numbers, found, begun_late = itertools.cycle(range(10, 900)), [], 0
    over = False

    async def calls() -> None:
        nonlocal begun_late
        while not over or begun_late < 20:
            late = "newer" in found
            begun_late += late
            outcome = await channel.begin(next(numbers)).outcome()
            assert outcome == "newer" or (outcome == "older" and not late), f"{outcome}, begun after the swap: {late}"
            found.append(outcome)

    async with anyio.create_task_group() as tasks:
        for _ in range(min(channel.full, 6)):
            tasks.start_soon(calls)
        await channel.runtime.swap(channel.compilation, channel.model("newer"))
        over = True
    assert {"older", "newer"} == set(found)
    assert channel.pinned() == 0


@pytest.mark.parametrize("held", [False, True], ids=["comes", "was held back"])
@pytest.mark.parametrize("channel", CHANNELS)
async def test_nothing_is_sent_through_a_closed_gate(channel: str, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: no await between the choice of a channel and the sending, or a swap slips in. The gate closes in each turn of the loop."""
    async with leak_check():
        opened = CHANNELS[channel]()
        async with opened.open():
            for turns in range(12):
                assert not await sent_through_a_closed_gate(opened, turns, held, monkeypatch), f"closed after {turns} turns"
        del opened


async def sent_through_a_closed_gate(channel: Channel, turns: int, held: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Begin a call, and close the gate so many turns later. Returns how many requests were sent then."""
    compiled, entered = channel.compilation._parts.compiled, Serving.entered
    gate, sent = compiled.gate, 0

    def watched(serving: Serving, *given: Any, **named: Any) -> Any:
        nonlocal sent
        sent += gate.closed
        return entered(serving, *given, **named)

    with monkeypatch.context() as patch, compiled.watching():
        patch.setattr(Serving, "entered", watched)
        if held:
            gate.close()
        call = channel.begin(10 + turns)
        if held:
            await anyio.wait_all_tasks_blocked()
            gate.open()
        for _ in range(turns):
            await asyncio.sleep(0)
        gate.close()
        await anyio.wait_all_tasks_blocked()
        gate.open()
        assert await call.outcome() == "older"
        return sent


async def test_a_step_that_has_waited_for_its_state_chooses_its_channel_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: nothing is awaited after the choice, also where the call before has left its state with the driver, and a swap came."""
    close, closed = Gate.close, anyio.Event()

    def closing(gate: Gate) -> None:
        close(gate)
        closed.set()

    monkeypatch.setattr(Gate, "close", closing)
    async with leak_check():
        channel = StepChannel()
        async with channel.open():
            channel.runs.hold(10)
            first = channel.begin(10)
            await channel.runs.begun(10)
            first.cancel()
            assert await first.outcome() == "CancelledError"
            channel.free.insert(0, channel.free.pop())  # the state that the driver still advances
            second = channel.begin(11)
            await anyio.wait_all_tasks_blocked()
            swapping = asyncio.ensure_future(channel.runtime.swap(channel.compilation, channel.model("newer")))
            await closed.wait()
            channel.runs.open()
            assert await second.outcome() == "newer"
            await swapping
            assert [number for number in channel.runs.look() if number > 9] == [10, 11]
        del channel, first, second


@pytest.mark.parametrize("way", ["compute", "burst", "frame", "plan", "start"])
async def test_one_deadline_is_over_the_second_try_with_more_room(way: str) -> None:
    """Covers: one absolute deadline. A deadline for each try would end the call later than the timer that the test sets between them.

    If the machine stands still just then, the order of the two proves nothing, and the test tries again with more time.
    """
    async with leak_check():
        channel = CHANNELS[way](wide=True)
        async with channel.open():
            for turn, timeout_s in enumerate((0.6, 3.0, 9.0)):
                if await ends_by_its_own_deadline(channel, LARGE + 3 + turn, timeout_s):
                    break
            else:
                pytest.fail("the call went on after its deadline")
        del channel


async def ends_by_its_own_deadline(channel: Channel, number: int, timeout_s: float) -> bool:
    loop, runs = asyncio.get_running_loop(), channel.runs
    runs.hold(number)
    runs.hold(number, 2)
    between: list[int] = []
    loop.call_later(timeout_s * 0.6, runs.open, number)
    loop.call_later(timeout_s * 0.6, runs.hold, number, 2)
    late = loop.call_later(timeout_s * 1.3, between.append, 1)
    call = channel.begin(number, timeout_s)
    assert await call.outcome() == "DeadlineError"
    late.cancel()
    reached = runs.look().count(number) == 2
    runs.open()
    assert await channel.begin(5).outcome() == "older"
    return reached and not between


async def test_a_dropped_compilation_is_collected_though_calls_were_cancelled_and_late() -> None:
    """Covers: no timer or task keeps a dropped compilation alive."""
    async with leak_check():
        channel = Channel()
        async with channel.open():
            runs = channel.runs
            runs.hold(10)
            calls = [channel.begin(10), channel.begin(11, 60.0), channel.begin(12, 60.0)]
            await runs.begun(10)
            calls[1].cancel()
            assert await calls[1].outcome() == "CancelledError"
            runs.open()
            assert {await calls[0].outcome(), await calls[2].outcome()} == {"older"}
            dropped = weakref.ref(channel.compilation)
            del channel.compilation, calls
            for _ in range(3):
                gc.collect()
                await anyio.wait_all_tasks_blocked()
            assert dropped() is None
