"""`Turns`: inside a driver, no other execution begins while one of high priority runs.

Executions of all models share the CPUs of one process, and a running one cannot be interrupted. So a lane asks for its turn before each
execution. One of high priority begins at once. Any other waits while an execution of high priority runs, for `MAX_WAIT_S` at most. That
bound is the ageing: a model of high priority that never pauses slows the others down and never stops them.

A compilation of low priority lives in another process under SCHED_IDLE, where the kernel decides. Engines do not look at the priority.

Use it from any thread. Each `begin` of high priority needs its `end`. While no execution of high priority runs, a turn of another priority
costs one comparison.

Invariants
    `urgent` counts the turns of high priority that have begun and not ended. It changes under `_lock`.
    A thread waits only while `urgent` is above 0. The turn that makes it 0 wakes all that wait.
"""

from __future__ import annotations

import threading
import time

from aionn.hal.types import Priority

MAX_WAIT_S = 0.1
"""How long an execution waits for those of high priority. Ten executions a second are what a model keeps beside one that never pauses."""

_HIGH = Priority.HIGH  # each look at the enumeration itself costs as much as the rest of a turn


class Turns:
    """The turns of one driver process.

    Attributes:
        urgent: how many executions of high priority run now. While it is 0, a turn of another priority needs no `begin`.
    """

    __slots__ = ("_changed", "_lock", "_max_wait_s", "urgent")

    def __init__(self, max_wait_s: float = MAX_WAIT_S) -> None:
        self._max_wait_s = max_wait_s
        self.urgent = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def begin(self, priority: Priority) -> None:
        """Begin a turn: at once with high priority, else after the turns of high priority or `MAX_WAIT_S`. Blocks the thread.

        A lane begins a turn for each execution. It keeps the GIL from the end of one turn to the next request that is there already. So
        the threads that wait see no gap between two executions of high priority.
        """
        if priority is _HIGH:
            with self._lock:
                self.urgent += 1
        elif self.urgent:  # read without the lock: a turn of high priority that begins just now comes a moment too late
            self._wait()

    def end(self, priority: Priority) -> None:
        """End a turn."""
        if priority is _HIGH:
            with self._lock:
                self.urgent -= 1
                if not self.urgent:
                    self._changed.notify_all()

    def _wait(self) -> None:
        give_up_s = time.monotonic() + self._max_wait_s
        with self._changed:
            while self.urgent and (left_s := give_up_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
