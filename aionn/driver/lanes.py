"""Lanes: the threads that run one executable. Each waits natively for the requests of the bursts that are lent to it.

A lane runs two kinds of work. One are the known requests of bursts (`lend`), which pass no loop. The other are jobs (`run`): everything
that the loop submits. A lane takes both in turn. Each lane has one executable, so lanes may run beside each other over one copy of the
weights. fmq/lanes_object.h has the native half, with its invariants.

Invariants
    An executable is run by its lane only.
    A lane that waits holds nothing of the work it did last.
    Every job that was submitted is run, also if it waits when `aclose` is called. Later ones are refused.

Inside a driver, no other execution begins while one of high priority runs (`Turns`). Executions of all models share the CPUs of one
process, and a running one cannot be interrupted. So a lane asks for its turn before each execution. One of high priority begins at once.
Any other waits while an execution of high priority runs, for `MAX_WAIT_S` at most. That bound is the ageing: a model of high priority that
never pauses slows the others down and never stops them.

A compilation of low priority lives in another process under SCHED_IDLE, where the kernel decides. Engines do not look at the priority.

Use it from any thread. Each `begin` of high priority needs its `end`. While no execution of high priority runs, a turn of another priority
costs one comparison.

Invariants
    `urgent` counts the turns of high priority that have begun and not ended. It changes under `_lock`.
    A thread waits only while `urgent` is above 0. The turn that makes it 0 wakes all that wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.burst.executors import Bound
from aionn.burst.server import CLOSE_S
from aionn.driver.threads import Job
from aionn.errors import CallerError, ExecutionError
from aionn.fmq import Lane as NativeLane
from aionn.fmq import Lanes as NativeLanes
from aionn.hal.engine import Executable
from aionn.hal.types import ErrorStatus, Priority
from aionn.loopless import Answer
from aionn.pages.page import Slot

T = TypeVar("T")

logger = logging.getLogger("aionn.driver")


class Lane(msgspec.Struct, frozen=True):
    """What a run needs of its lane: an executable that no other thread runs, and the slot that shows its executions.

    `scratch` has the memory of warm runs, of one request at most. `batches` has the arrays of joined runs, which lie in `rooms`.
    """

    executable: Executable
    slot: Slot
    scratch: dict[tuple[str, str], NDArray[Any]] = msgspec.field(default_factory=dict)
    batches: dict[object, Any] = msgspec.field(default_factory=dict)
    rooms: dict[object, NDArray[np.uint8]] = msgspec.field(default_factory=dict)

    def scratch_for(self, kind: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return arrays of the lane's own that are like these. They are the same each time while shapes do not change."""
        made = {}
        for name, array in arrays.items():
            own = self.scratch.get((kind, name))
            if own is None or own.shape != array.shape or own.dtype != array.dtype:
                own = self.scratch[kind, name] = np.zeros(array.shape, array.dtype)
            made[name] = own
        return made


class Joins(Protocol):
    """Runs a request together with those that wait behind it; see `joining.joined_runs`."""

    def run(self, lane: Lane, native: NativeLane, first: Bound) -> bytes | list[bytes]: ...


class Lanes:
    """The lanes of one prepared model. Satisfies `burst.ILanes`. Use it from the loop.

    Two threads wait from the beginning. A further one starts when the last free one takes work, so a driver of many models with few callers
    has few threads.

    Args:
        name: of the threads.
        lanes: one for each thread, the most that there can be.
        turns, priority: what decides when a run of this model may begin beside runs of other models.
        joining: joins requests of bursts, or None.
    """

    def __init__(
        self,
        name: str,
        lanes: Sequence[Lane],
        turns: Turns | None = None,
        priority: Priority = Priority.MEDIUM,
        joining: Joins | None = None,
    ) -> None:
        """Start the threads.

        Raises:
            ExecutionError: RESOURCE_EXHAUSTED_TRANSIENT, because the system refused a thread or a descriptor.
        """
        self._jobs: deque[Job[Any]] = deque()
        self._name = name
        self._rest = deque(lanes)  # those without a thread
        self._threads = self._busy = 0  # those that live, and those of them that work; the latter only while others may start
        self._turns = turns or Turns()
        self._priority = priority
        self._joining = joining
        self._closed: Job[None] | None = None
        native: NativeLanes | None = None
        try:
            native = self._native = NativeLanes()
            for _ in lanes[:2]:  # one that works and one that waits, so that a single caller waits for the start of none
                self._start_one()
        except (OSError, RuntimeError) as error:
            if native is not None:
                native.stop()
            raise ExecutionError(
                f"the driver cannot start the threads of a model: {error}; raise its limits of processes, memory or files",
                status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
            ) from error
        self.lend = native.lend
        self.recall = native.recall

    async def run(self, job: Callable[[Lane], T]) -> T:
        """Run `job` on a free lane and return its result, or raise its error. A cancelled caller leaves, and the job runs on.

        Raises:
            CallerError: the lanes have been closed.
        """
        if self._closed is not None:
            raise CallerError("the request names a prepared model that has been released; prepare the model again")

        def shown(lane: Lane) -> T:
            began_ns = lane.slot.begin()
            try:
                return job(lane)
            finally:
                lane.slot.end(began_ns)

        answer: Answer[T] = Answer(asyncio.get_running_loop())
        self._jobs.append(Job(shown, answer))
        self._native.announce()
        return await answer.wait()

    async def aclose(self) -> None:
        """End the threads, once they have done what was submitted. Wait at most `CLOSE_S` for that; they end later then."""
        ended: Answer[None] = Answer(asyncio.get_running_loop())
        if self._closed is None and self._threads:
            self._closed = Job(_nothing, ended)
            self._native.stop()
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), CLOSE_S)

    def _start_one(self) -> None:
        work = threading.Thread(target=self._serve, args=(self._rest.popleft(),), name=f"{self._name} {self._threads}", daemon=True)
        self._threads += 1
        try:
            work.start()
        except BaseException:
            self._threads -= 1
            raise

    def _start_another(self) -> None:
        """Start the thread of a further lane, because no lane is free. If the system refuses it, those that there are serve all."""
        try:
            self._start_one()
        except (MemoryError, RuntimeError) as error:  # this lane has work, which must go on
            self._rest.clear()
            logger.warning("a model is served by %d threads, because the system refused another one: %s", self._threads, error)
        except IndexError:
            return  # two lanes asked for the last one

    def _serve(self, lane: Lane) -> None:
        try:
            self._work(lane)
        except BaseException:  # a fault of aionn, because what an execution raises is its answer
            sys.excepthook(*sys.exc_info())
            os.abort()  # what this lane has taken is never answered, and its callers learn that at once
        finally:
            self._threads -= 1
            if not self._threads and self._closed is not None:
                self._closed.do()

    def _work(self, lane: Lane) -> None:
        native, jobs, turns, priority = NativeLane(self._native, lane.slot), self._jobs, self._turns, self._priority
        high, joining, rest = priority is Priority.HIGH, self._joining, self._rest
        answer: bytes | list[bytes] | None = None
        while True:
            work = native.next(answer)
            job = None
            if work is None:
                answer = None
                try:
                    job = jobs.popleft()
                except IndexError:
                    if self._native.stopped:
                        return
                    continue
            if counted := bool(rest):
                self._busy += 1
                if self._busy == self._threads:
                    self._start_another()
            if high or turns.urgent:
                turns.begin(priority)
            if job is not None:
                job.do(lane)
            elif joining is None or not isinstance(work, Bound):
                answer = work(lane)
            else:
                answer = joining.run(lane, native, work)
            if counted:
                self._busy -= 1
            del work, job  # before the next wait, so that a closed memory is not kept mapped
            if high:
                turns.end(priority)


def _nothing() -> None:
    """The call of the job that reports the end."""


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
