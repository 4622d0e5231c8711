"""`PlannedExecution`: one execution of a plan. Its parts are the same whether the steps are sent one after the other or all at once.

    run                      a step's request is sent when the step before has answered
    executing.fenced_plan    all requests are sent at once, and each step waits for the fence of the step before

Invariants
    At most one request of a `run` is in flight.
    `settled` is called once, and boundary memory is given back then: no driver can touch the pools any more. That may be after the
    caller has left. An execution whose caller has left runs no further step.
    A step that had too little room for a boundary tensor has changed nothing but its outputs, so it may run again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aionn import trace
from aionn.hal.options import CallOptions
from aionn.hal.types import NO_TIMING, UNKNOWN_TIME_US, ErrorStatus, OutputShape, Request, Result, Timing
from aionn.memory.region import Region
from aionn.runtime.serving.boundaries import BoundaryLayouts, BoundaryMemory
from aionn.runtime.serving.step_requests import FALSE, Pool, StepRequests
from aionn.runtime.serving.wiring import PlannedStep, Wiring
from aionn.tasks import seconds_until

Settled = Callable[[Result | None], None]
Send = Callable[["PlannedExecution", int, Settled], Awaitable[Result]]
"""Sends the request of a step, and waits for its answer. It calls its last argument as `RemotePreparedModel.execute` says."""


class StepFailure(Result, frozen=True):
    """The answer of a plan one of whose steps has failed.

    Attributes:
        step: its number.
    """

    step: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """What the executions of one plan have in common."""

    wiring: Wiring
    layouts: BoundaryLayouts
    memory: BoundaryMemory


class PlannedExecution:
    """One execution. Made for one `run`.

    Attributes:
        requests: of its steps.
        options: as they were asked for.
    """

    def __init__(
        self,
        planned: Planned,
        request: Request,
        pools: Sequence[Pool],
        options: CallOptions,
        settled: Settled | None,
    ) -> None:
        self.requests = StepRequests(planned.wiring, planned.layouts, request, pools)
        self.options = options
        self._steps: Sequence[PlannedStep] = planned.wiring.steps
        self._memory = planned.memory
        self._settled = settled
        self._leased: list[Region] = []
        self._timings: list[Timing] = []
        self._sent = self._in_flight = False  # a step was; one is
        self._left = self._over = False  # the caller has left; `settled` was called
        self._last: tuple[int, Result | None] = (0, None)

    @property
    def boundary(self) -> Region:
        """The memory of boundary tensors, while the execution runs."""
        return self._leased[0]

    def device(self, number: int) -> str:
        """Return the name of a step's device."""
        return self._steps[number].prepared.device.name

    async def run(self, send: Send, *, check: bool = True) -> Result:
        """Run all steps, unless the request is wrong. `check`: whether it may be wrong. A step sees only its own part of it.

        Raises:
            AionnError: whatever `send` raises.
            MemoryAllocationError: there is no memory for the boundary tensors.
        """
        result: Result | None = None
        try:
            result = self.requests.refusal() if check else None
            if result is not None:
                return result
            self.begin()
            for number in range(len(self._steps)):
                result = await self._run_step(number, send)
                if result is not None:
                    return result
            result = self.whole()
            return result
        finally:
            if self._in_flight:
                self._left = True
            else:
                self.end(result if result is not None else self._outcome())

    async def _run_step(self, number: int, send: Send) -> Result | None:
        """Run one step. Returns the answer of the whole execution if it ends here."""
        while True:
            if number and seconds_until(self.options.deadline_ns) == 0.0:
                return self._failure(number, ErrorStatus.MISSED_DEADLINE_TRANSIENT, "the deadline had passed before the step began")
            self._sent = self._in_flight = True
            with trace.span("plan.step", device=self.device(number), step=number):
                result = await send(self, number, partial(self._step_settled, number))
            if result.status is not ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
                return self.take(number, result)
            outgrown = self.requests.outgrown(number, result)
            if not outgrown:
                return self._insufficient(number, result)
            trace.count("plan.widened", device=self.device(number), tensors=list(outgrown))
            self.requests.widen({name: (self._lease(size_bytes), size_bytes) for name, size_bytes in outgrown.items()})

    def _step_settled(self, number: int, result: Result | None) -> None:
        """Note that no driver can touch the pools now: the step has been answered, or never will be."""
        self._in_flight = False
        self._last = number, result
        if self._left:
            self.end(self._outcome())

    def end(self, result: Result | None) -> None:
        """Give back what the execution held, once."""
        if self._over:
            return
        self._over = True
        number, last = self._last
        # A burst that is closed ends its requests, and the driver may still be busy with one.
        self.give_back(written=last is None and self._sent and self._steps[number].prepared.device.connection.ended_by is None)
        if self._settled is not None:
            self._settled(result)

    def begin(self) -> Region:
        """Lease the memory of boundary tensors, and return it.

        Raises:
            MemoryAllocationError: there is no memory for them.
        """
        self._lease(self.requests.size_bytes)
        return self.boundary

    def give_back(self, *, written: bool) -> None:
        """Give the memory of boundary tensors back. `written`: a driver may still write to it, so it is not used again."""
        leased, self._leased = self._leased, []
        for region in leased:
            if written:
                region.close()
            else:
                self._memory.give_back(region)

    def _lease(self, size_bytes: int) -> int:
        """Lease boundary memory. Returns its number among the pools."""
        region = self._memory.lease(size_bytes)
        self._leased.append(region)
        return self.requests.add_memory(region)

    # --- answers -------------------------------------------------------------------------------------------------------

    def take(self, number: int, result: Result) -> Result | None:
        """Take the answer of a step. Returns the answer of the whole execution if it ends here."""
        if result.status is not ErrorStatus.NONE:
            return self._failure(number, result.status, result.message)
        wrong = self._note(number, result)
        return None if wrong is None else self._failure(number, ErrorStatus.GENERAL_FAILURE, wrong)

    def _note(self, number: int, result: Result) -> str | None:
        if self.options.measure_timing:
            self._timings.append(result.timing)
        return self.requests.note(number, result)

    def _outcome(self) -> Result | None:
        """Return what the last answer makes of an execution whose caller has left, or None if it has not come to its end."""
        number, result = self._last
        if result is None or result.status is not ErrorStatus.NONE or number < len(self._steps) - 1:
            return None
        return self.whole() if self._note(number, result) is None else None

    def whole(self) -> Result:
        """Return the answer of the plan, all of whose steps have run."""
        self.requests.learn()
        shapes = self.requests.output_shapes() if self.requests.answered else ()
        return Result(ErrorStatus.NONE, shapes, _sum_of(self._timings) if self.options.measure_timing else NO_TIMING)

    def _insufficient(self, number: int, result: Result) -> Result:
        """Return the answer where the room that the app gave for an output was too small. Later steps have not run."""
        shapes = self.requests.insufficient(number, result)
        if not shapes:
            return self._failure(number, ErrorStatus.GENERAL_FAILURE, f"{FALSE}: {result.message}")
        return self._failure(number, result.status, result.message, shapes)

    def _failure(self, number: int, status: ErrorStatus, message: str, shapes: tuple[OutputShape, ...] = ()) -> StepFailure:
        """Return the answer of a plan whose step of that number has failed. It names the step and its device."""
        where = f"step {number + 1} of {len(self._steps)}, on device {self.device(number)!r}"
        return StepFailure(status, shapes, message=f"{where}: {message or 'the driver gave no reason'}", step=number)


def _sum_of(timings: Sequence[Timing]) -> Timing:
    """Return the time of all steps together. It is unknown where that of one is."""
    device, driver = [timing.on_device_us for timing in timings], [timing.in_driver_us for timing in timings]
    return Timing(*(UNKNOWN_TIME_US if UNKNOWN_TIME_US in times else sum(times) for times in (device, driver)))
