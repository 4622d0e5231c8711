"""`FencedPlan`: a started execution of a plan. All its steps are sent at once, and each waits for the fence of the step before.

So the app's loop has no part between the steps. That needs the shape of every tensor between them beforehand: the model declares them, or
an execution with the same input shapes has shown them. A step whose tensors come out in other shapes ends the chain. The plan then runs
once more, step by step in the app's loop, which learns the shapes (`PlannedExecution`). The steps of a chain leave nothing behind but
their outputs, because a chain takes no device memory.

Invariants
    The fence of the last step is the event's. The fences in between belong to the chain. Each is signalled by its driver, or here where
    its driver will not do it.
    A step may have run on a tensor whose shape was not as expected. Then the whole answer is thrown away.
    The boundary memory is given back when every step has been answered, or its driver has ended.
    `answered` is called once, after that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from aionn.hal.options import CallOptions
from aionn.hal.types import Dependency, ErrorStatus, FencedResult, Request
from aionn.remote.device import Fenced, Found, RemoteBuffer
from aionn.remote.fences import as_asked, signal_fence
from aionn.runtime.executing.event import new_fence
from aionn.runtime.serving.planned_execution import PlannedExecution
from aionn.runtime.serving.planned_model import PlannedModel

Answered = Callable[[Found], None]


def start_plan(
    plan: Any, fenced: Fenced, options: CallOptions, answered: Answered, in_app: Callable[[], None]
) -> Callable[[], None] | None:
    """Send all steps of an execution. Returns what ends their waits, or None if the plan must run in the app's loop.

    Args:
        plan: what is prepared. Only a `PlannedModel` has steps to send.
        fenced: the whole request. Its descriptors are lent for this call only.
        in_app: runs the execution step by step, without its dependencies, and calls `answered`.

    Raises:
        MemoryAllocationError: there is no memory for the boundary tensors, or no descriptor. Nothing was sent.
    """
    if not isinstance(plan, PlannedModel) or any(isinstance(pool, RemoteBuffer) for pool in fenced.pools):
        return None
    execution = plan.execution(fenced.request, fenced.pools, options, None)  # type: ignore[arg-type]
    if not execution.requests.expect() or execution.requests.refusal() is not None:
        return None
    chain = FencedPlan(plan, execution, answered, in_app)
    chain.send(fenced)
    return chain.stop


class FencedPlan:
    """The steps of one started execution."""

    def __init__(self, plan: PlannedModel, execution: PlannedExecution, answered: Answered, in_app: Callable[[], None]) -> None:
        self._steps = plan.steps
        self._execution = execution
        self._answered = answered
        self._in_app = in_app
        self._asked: list[Request] = []
        self._found: dict[int, Found] = {}
        self._fences: list[int] = []
        self._stops: list[Callable[[], None]] = []
        self._sent = 0

    def send(self, fenced: Fenced) -> None:
        """Send every step. An error after the first one was sent is its answer. Answers come later, in the loop."""
        steps, execution = self._steps, self._execution
        execution.begin()
        try:
            for _ in steps[:-1]:
                self._fences.append(new_fence())
            for number, step in enumerate(steps):
                request, pools = execution.requests.split(number)
                self._asked.append(request)
                after = fenced.after if not number else [Dependency(self._fences[number - 1], is_event=True)]
                fence = fenced.fence if number == len(steps) - 1 else self._fences[number]
                own = Fenced(request, pools, after, fence)
                stop = step.prepared.start_fenced(own, execution.options, partial(self._settled, number))
                self._stops.append(stop)
                self._sent = number + 1
        except BaseException as error:
            if not self._sent or not isinstance(error, Exception):
                self._end()
                raise
            for number in range(self._sent, len(steps)):
                self._found[number] = error
            self.stop()

    def stop(self) -> None:
        """End the waits of all steps that have not begun."""
        stops, self._stops = self._stops, []
        for stop in stops:
            stop()

    def _settled(self, number: int, found: Found) -> None:
        """Note the answer of a step. Its successor learns of a failure that no driver signals."""
        self._found[number] = found
        if not isinstance(found, FencedResult):
            self.stop()  # the plan has failed, and a step before may wait for a fence that never comes
        if number < len(self._fences) and not self._signalled(number, found):
            signal_fence(self._fences[number], succeeded=False)
        self._conclude_when_over()

    def _signalled(self, number: int, found: Found) -> bool:
        """Return whether a step's driver has signalled its fence."""
        if not isinstance(found, FencedResult):
            return False
        if found.result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            return False
        return found.result.status is not ErrorStatus.NONE or as_asked(self._asked[number], found.result)

    def _conclude_when_over(self) -> None:
        if len(self._found) < len(self._steps):
            return
        outcome = self._outcome()
        self._end()
        if outcome is None:
            self._in_app()
        else:
            self._answered(outcome)

    def _outcome(self) -> Found | None:
        """Return the answer of the whole plan. None: a tensor came out in another shape than expected."""
        answers: list[FencedResult] = []
        for _, found in sorted(self._found.items()):
            if not isinstance(found, FencedResult):
                return found
            answers.append(found)
        for number, answer in enumerate(answers):
            if answer.failed is not None:  # of the first step: a dependency of the app's
                return answer
            result = answer.result
            surprise = answer is not answers[-1] and self._execution.requests.surprises(number, result)
            if surprise or result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
                return None
            ended = self._execution.take(number, result)
            if ended is not None:
                return FencedResult(ended)
        return FencedResult(self._execution.whole(), None, answers[-1].since_launch)

    def _end(self) -> None:
        """Give back the boundary memory and the fences. A driver whose connection has ended may still write for a moment."""
        self._execution.give_back(written=not all(isinstance(found, FencedResult) for found in self._found.values()))
        fences, self._fences = self._fences, []
        for fence in fences:
            os.close(fence)
