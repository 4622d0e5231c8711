"""`FencedPlan`: a started execution of a plan. No task waits for its steps.

A step is sent as soon as the shapes of its inputs are known, and waits in its driver for the fence of the step before. The model declares
these shapes, or an execution with the same input shapes has shown them. So mostly all steps are sent at once, and the app's loop has no
part between them. A step that reads a tensor of unknown shape is sent when the step before it has answered.

A later step may have been sent for a shape that its tensor does not have. The plan runs again then, and each step waits for the answer of
the one before.

Invariants
    The fence of the last step is the event's. The fences in between belong to the chain. Each is signalled by its driver, or the waits
    of all steps behind it are ended.
    `answered` is called once, when every step that was sent has been answered, or its driver has ended.
    After `end` no step is sent, so the fence of the event is not used any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from aionn.errors import CallerError
from aionn.hal.types import Dependency, ErrorStatus, FencedResult, Request, Timing
from aionn.remote.device import Fenced, Found, RemoteBuffer
from aionn.remote.fences import as_asked
from aionn.runtime.executing.event import new_fence
from aionn.runtime.serving.planned_execution import PlannedExecution, sum_of


class FencedPlan:
    """The steps of one started execution."""

    def __init__(self, planned: PlannedExecution, fenced: Fenced, answered: Callable[[Found], None], *, expects: bool) -> None:
        """
        Args:
            fenced: the whole request.
            expects: whether a step is sent for the shapes that the step before is asked for. With device memory none is, because its
                driver looks at what the memory holds when the request comes.
        """
        self._planned = planned
        self._fenced = fenced
        self._answered = answered
        self._expects = expects and not any(isinstance(pool, RemoteBuffer) for pool in fenced.pools)
        self._asked: list[Request] = []
        self._found: dict[int, Found] = {}
        self._fences: list[int] = []
        self._stops: list[Callable[[], None]] = []
        self._stopped = False
        self._taken = 0
        self._launched: list[Timing] = []  # of the steps after which the app sent the next one, and of the last
        self._outcome: Found | None = None

    def send(self) -> Callable[[], None]:
        """Send the first step, and those after it that can be sent. An error after the first one is the answer, which comes later.

        Returns what ends the waits of all steps that have not begun.

        Raises:
            AionnError: nothing was sent.
        """
        try:
            self._send()
        except BaseException:
            self._close()
            raise
        self._go_on()
        return self.end

    def _send(self) -> None:
        """Send the next step."""
        planned, number = self._planned, len(self._stops)
        request, pools = planned.request(number)
        after = self._fenced.after if not number else ()
        if number > self._taken:
            after = (Dependency(self._fences[-1], is_event=True),)
        fence = self._fenced.fence
        if number < planned.steps - 1:
            fence = new_fence()
            self._fences.append(fence)
        self._asked.append(request)
        start = planned.prepared(number).start_fenced
        self._stops.append(start(Fenced(request, pools, after, fence), planned.options, partial(self._settle_step, number)))
        if self._expects:
            planned.expect(number)

    def _go_on(self) -> None:
        """Send the steps that can be sent now."""
        try:
            while self._outcome is None and self._next_is_ready():
                if self._stopped:
                    raise CallerError("the execution was ended before all its steps were sent")
                self._send()
        except Exception as error:  # steps before have been sent, so this is the answer
            self._outcome = error
            self.end()

    def _next_is_ready(self) -> bool:
        """Return whether the next step can be sent. In a run without expectations it waits for the answers of all steps before."""
        number = len(self._stops)
        return number < self._planned.steps and (self._expects or number == self._taken) and self._planned.is_ready(number)

    def end(self) -> None:
        """End the waits of all steps that have not begun, and send no further one."""
        self._stopped = True
        for stop in self._stops:
            stop()

    def _settle_step(self, number: int, found: Found) -> None:
        """Note the answer of a step. Where no driver signals its fence, the waits of its successors are ended.

        Their drivers leave the event's fence alone then, so that what depends on it waits for a second run.
        """
        self._found[number] = found
        if not isinstance(found, FencedResult):
            self._outcome = self._outcome or found
            self.end()  # the plan has failed, and a step before may wait for a fence that never comes
        elif number < len(self._fences) and not self._signalled(number, found):
            for stop in self._stops[number + 1 :]:
                stop()
        while self._outcome is None and isinstance(taken := self._found.get(self._taken), FencedResult):
            self._outcome = self._take(taken)
            self._taken += 1
        self._go_on()
        if self._outcome is not None and len(self._found) == len(self._stops):
            self._close()
            self._answered(self._outcome)

    def _signalled(self, number: int, found: FencedResult) -> bool:
        """Return whether a step's driver has signalled its fence."""
        if found.result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            return False
        return found.result.status is not ErrorStatus.NONE or as_asked(self._asked[number], found.result)

    def _take(self, answer: FencedResult) -> FencedResult | None:
        """Take the answer of the first step whose answer was not taken. Returns that of the whole plan if it ends here."""
        number, result = self._taken, answer.result
        if answer.failed is not None:  # of the first step: a dependency of the app's
            return answer
        is_last_sent = number + 1 == len(self._stops)
        if not is_last_sent and self._planned.surprises(number, result):
            return FencedResult(self._planned.run_again())
        if is_last_sent:
            self._launched.append(answer.since_launch)
        ended = self._planned.take(number, result)
        return None if ended is None else FencedResult(ended, None, sum_of(self._launched))

    def _close(self) -> None:
        for fence in self._fences:
            os.close(fence)
