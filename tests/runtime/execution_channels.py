"""The ways on which an app sends an execution to a driver, as one kind of object: `begin` a call, and see what has become of it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

import aionn
from aionn.pages.app_layout import Kind
from aionn.pages.finding import find_page
from aionn.testing import FakeDevice
from aionn.testing.fake_engine import FakeEngine
from tests.runtime.gated_engines import NEWER, GatedEngine, GatedLeft, GatedRight, Runs, rows_of
from tests.runtime.planned_models import made, node
from tests.runtime.values_models import model_of

ENDS = ("computed", "failed", "died", "hung", "late", "refused")
_names = itertools.count()


def model(name: str, home: str, wide: bool) -> bytes:
    """Return y = x. `name` is "older" or "newer", and `home` begins the names of its nodes. `wide`: the rows are open."""
    shape: list[int | str] = ["rows", 16] if wide else [1, 16]
    out: list[int | str] = ["more", 16] if wide else [1, 16]
    if home == "plan":
        nodes = [node("left_0", "Identity", ["x"], ["t"]), node(f"right_{name}", "Identity", ["t"], ["y"])]
    else:
        nodes = [node(f"{name}_0", "Identity", ["x"], ["y"])]
    ends: tuple[dict[str, Any], dict[str, Any]] = {"x": shape}, {"y": out}
    if home == "step":
        nodes.append(node(f"{name}_1", "Identity", ["state"], ["stateN"]))
        ends = {"x": shape, "state": [4]}, {"y": out, "stateN": [4]}
    return made(nodes, *ends)


class Call:
    """A call that has begun.

    Attributes:
        number: its name; see `gated_engines`.
        task: gives the outputs.
        cancel: what an app does to leave it.
    """

    def __init__(self, number: int, call: Awaitable[Any], cancel: Callable[[], Any] | None = None) -> None:
        self.number = number
        self.task = asyncio.ensure_future(call)
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # the test may have failed before it looks
        self.cancel = cancel or self.task.cancel

    async def outcome(self) -> str:
        """Return "older" or "newer", for the right outputs of that model, or the name of the error's class."""
        with anyio.fail_after(30):
            await asyncio.wait([self.task])
        if self.task.cancelled():
            return "CancelledError"
        error = self.task.exception()
        if error is not None:
            return type(error).__name__
        y = np.asarray(self.task.result()["y"])
        values = y.astype(np.float64)
        assert values.shape == ((1,) if y.dtype == object else (rows_of(self.number), 16))
        assert (values == values.flat[0]).all()
        return {float(self.number): "older", self.number + NEWER: "newer"}.get(values.flat[0], f"wrong: {values.flat[0]}")


class Channel:
    """Calls of `Compilation.compute`. The others are below.

    Attributes:
        full: so many calls are with the driver at once. The next one waits for its turn.
        waits: whether a further call waits, and is not refused. waits_in_burst: whether it does so in the burst that the driver serves.
        queues: whether requests go over a burst's queues. Over the control socket, an answer may be on its way when the next run begins.
        died: the error of calls that a dead driver had. closed: what becomes of calls that a driver has when the compilation is closed.
        compilation, runtime, runs: while it is open.
        begun: how many calls have been begun.
    """

    full = 16
    waits = True
    queues = True
    waits_in_burst = False
    home = "one"
    engines: Sequence[type[FakeEngine]] = (GatedEngine,)
    died = "DriverDiedError"
    closed = "newer"
    runtime: aionn.Runtime
    compilation: aionn.Compilation
    runs: Runs

    def __init__(self, wide: bool = False) -> None:
        self.wide = wide
        self.begun = 0

    def model(self, name: str) -> aionn.Model:
        return aionn.Model.from_onnx(model(name, self.home, self.wide))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Compile the model, and make two calls."""
        self.name = f"states {next(_names)}"
        async with AsyncExitStack() as stack:
            devices = [stack.enter_context(FakeDevice(engine)) for engine in self.engines]
            self.gated = devices[-1].name
            self.runs = Runs(devices[-1], self.engines[-1])
            stack.callback(self.runs.close)
            self.runtime = await stack.enter_async_context(aionn.Runtime(name=self.name, start=()))
            await self.compile([device.name for device in devices])
            await self.enter(stack)
            for number in (1, 2):
                assert await self.begin(number).outcome() == "older"
            yield

    async def compile(self, devices: Sequence[str]) -> None:
        self.compilation = await self.runtime.compile(self.model("older"), devices=devices)

    async def enter(self, stack: AsyncExitStack) -> None:
        """Open what calls need beside the compilation."""

    async def again(self) -> None:
        """Make good what was lost with a driver."""

    @property
    def pid(self) -> int:
        """Of the driver that holds runs back."""
        (pid,) = (device.pid for device in self.runtime.devices if device.name == self.gated)
        assert pid is not None
        return pid

    def x(self, number: int) -> NDArray[np.float32]:
        return np.full((1, 16), number, np.float32)

    def begin(self, number: int, timeout_s: float | None = None) -> Call:
        self.begun += 1
        return self.call(number, timeout_s)

    def call(self, number: int, timeout_s: float | None) -> Call:
        return Call(number, self.compilation.compute({"x": self.x(number)}, timeout_s=timeout_s))

    def pinned(self) -> int:
        """Return how many frames calls, or requests without an answer, still hold."""
        return 0

    def ends(self) -> int:
        """Return how many ends of calls the statistics page shows. A call that was cancelled has none."""
        found = find_page(os.getpid())
        assert found is not None
        with found:
            view = found.read()
        assert view is not None
        kinds = (Kind.BURST, Kind.SINGLE, Kind.PAST_BURSTS, Kind.PAST_SINGLES)
        slots = [slot for slot in view.slots if slot.kind in kinds and slot.runtime == self.name]
        return sum(slot.counters[end] for slot in slots for end in ENDS)


class BurstChannel(Channel):
    """Calls of `Burst.compute`."""

    full = 4
    waits_in_burst = True
    closed = "CallerError"

    async def enter(self, stack: AsyncExitStack) -> None:
        self.burst = await stack.enter_async_context(self.compilation.burst(depth=self.full))

    def call(self, number: int, timeout_s: float | None) -> Call:
        return Call(number, self.burst.compute({"x": self.x(number)}, timeout_s=timeout_s))

    def pinned(self) -> int:
        found = self.burst.statistics()
        return found["pinned_frames"] + found["in_flight"]


class FrameChannel(BurstChannel):
    """Calls of `Burst.compute` with a frame of the app's own."""

    def call(self, number: int, timeout_s: float | None) -> Call:
        async def compute() -> aionn.Outputs:
            async with self.burst.frame({"x": (1, 16)} if self.wide else None) as frame:
                frame["x"][:] = number
                return await self.burst.compute(frame, timeout_s=timeout_s)

        return Call(number, compute())


class StepChannel(BurstChannel):
    """Steps whose states stay in the driver. Calls beside each other have a state each."""

    home = "step"
    died = "DeviceMemoryLostError"

    async def enter(self, stack: AsyncExitStack) -> None:
        await super().enter(stack)
        self.states: list[aionn.DeviceMemory] = []
        stack.push_async_callback(self.leave)
        await self.again()

    async def again(self) -> None:
        await self.leave()
        for _ in range(2 * self.full):
            self.states.append(await self.compilation.allocate(inputs=("state",), outputs=("stateN",)))
            await self.states[-1].reset()
        self.free = list(self.states)

    async def leave(self) -> None:
        while self.states:
            await self.states.pop().aclose()

    def call(self, number: int, timeout_s: float | None) -> Call:
        state = self.free.pop(0)
        call = Call(number, self.burst.compute({"x": self.x(number), "state": state}, outputs={"stateN": state}, timeout_s=timeout_s))
        call.task.add_done_callback(lambda _: self.free.append(state) if state in self.states else None)
        return call


class ValuesChannel(Channel):
    """Calls with texts, which take no frame."""

    queues = False

    def model(self, name: str) -> aionn.Model:
        end = (TensorProto.STRING, [None])
        return model_of([helper.make_node("Identity", ["x"], ["y"], name=name)], {"x": end}, {"y": end})

    def x(self, number: int) -> NDArray[Any]:
        return np.array([str(number)], object)


class PlanChannel(Channel):
    """Calls of a plan over two devices, the second of which holds runs back."""

    home = "plan"
    engines = (GatedLeft, GatedRight)


class PlannedBurstChannel(BurstChannel):
    """Calls of a burst over a plan."""

    home = "plan"
    engines = (GatedLeft, GatedRight)


class StartChannel(Channel):
    """Executions that were started. A further one is refused, and waits for no turn."""

    full = 64
    waits = False
    queues = False
    closed = "CallerError"

    def call(self, number: int, timeout_s: float | None, after: Sequence[Any] = ()) -> Call:
        started = self.compilation.start({"x": self.x(number)}, timeout_s=timeout_s, after=after)

        async def outputs() -> Any:
            return await started

        return Call(number, outputs(), started.cancel)


class StartedPlanChannel(StartChannel):
    home = "plan"
    engines = (GatedLeft, GatedRight)


CHANNELS: dict[str, type[Channel]] = {
    "compute": Channel,
    "burst": BurstChannel,
    "frame": FrameChannel,
    "step": StepChannel,
    "values": ValuesChannel,
    "plan": PlanChannel,
    "planned_burst": PlannedBurstChannel,
    "start": StartChannel,
    "started_plan": StartedPlanChannel,
}
