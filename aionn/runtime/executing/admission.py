"""`Admission`: how many executions of one compilation may wait, over all of its bursts, calls and starts.

It exists where the app has given a `Batching`. An execution enters before anything is sent, and leaves when its caller has its outcome or
has gone. One that is refused gets its error at once. Nothing that has entered is ever refused later, so a refusal never undoes work.

Use it from any thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from aionn.errors import DeviceBusyError
from aionn.loopless import deadline_of

if TYPE_CHECKING:
    from aionn.hal.batching import Batching
    from aionn.runtime.serving.serving import CompiledModel

T = TypeVar("T")

_LEAST_RUNS = 20
"""So many runs of a size must have been measured before their time counts as an estimate."""
_FRESH_NS = 50_000_000
"""For so long an estimate is not read anew from the driver's page."""


class Admission:
    """The executions of one compilation that wait for their outcome. Their order is that in which they came."""

    def __init__(self, batching: Batching, compiled: CompiledModel) -> None:
        self._most = batching.max_waiting
        self._compiled = compiled
        self._numbers = itertools.count(1)
        self._waiting: dict[int, int] = {}  # when each of them came, by its number
        self._known_until_ns = 0
        self._row_ns = 0.0  # the least time that a row takes, or 0 if that is not known
        self._running = 1  # the most rows that may be in runs now

    async def run(self, call: Callable[[], Awaitable[T]], timeout_s: float | None, refused: Callable[[BaseException], None]) -> T:
        """Return what `call` returns, which bounds itself by `timeout_s`.

        Raises:
            CallerError: `timeout_s` is wrong.
            DeviceBusyError: as `enter`.
            BaseException: what `call` raises.
        """
        place = self.enter(deadline_of(timeout_s), refused)
        try:
            return await call()
        finally:
            self.leave(place)

    def enter(self, deadline_ns: int | None, refused: Callable[[BaseException], None]) -> int:
        """Let one more execution wait. Returns its number, for `leave`.

        Raises:
            DeviceBusyError: too many wait, or those that wait take longer than until the deadline. `refused` has got the error.
        """
        waiting, number = self._waiting, next(self._numbers)
        now_ns = waiting[number] = time.monotonic_ns()  # it is counted first, so that threads that enter at once never become too many
        ahead = len(waiting) - 1
        if ahead < self._most and (deadline_ns is None or not ahead):
            return number
        why = self._why_not(ahead, None if deadline_ns is None else deadline_ns - now_ns)
        if why:
            del waiting[number]
            first_ns = min(list(waiting.values()), default=now_ns)
            error = DeviceBusyError(why, waited_s=max(0, now_ns - first_ns) / 1e9, queue=ahead)
            refused(error)
            raise error
        return number

    def leave(self, number: int) -> None:
        """Note that an execution waits no more."""
        del self._waiting[number]

    def _why_not(self, ahead: int, left_ns: int | None) -> str:
        if ahead >= self._most:
            return (
                f"{ahead} executions of this compilation wait, and Batching(max_waiting={self._most}) allows no more; "
                "call again when some of them are answered, or raise max_waiting"
            )
        if left_ns is None or left_ns <= 0:  # one that is late already gets its own error
            return ""
        self._look()
        needed_ns = (ahead - self._running) * self._row_ns
        if needed_ns <= left_ns:
            return ""
        return (
            f"{ahead} executions of this compilation wait, and take {needed_ns / 1e6:.1f} ms or more, "
            f"but this one has {left_ns / 1e6:.1f} ms; call again later, or give it more time"
        )

    def _look(self) -> None:
        """Read how long a row takes at least. The run that goes on may end at any moment, so its rows take nothing."""
        now_ns = time.monotonic_ns()
        if now_ns < self._known_until_ns:
            return
        self._known_until_ns = now_ns + _FRESH_NS
        serving = self._compiled.serving
        runs = None if serving is None else serving.prepared.joined_runs()
        if serving is None or runs is None:
            self._row_ns = 0.0
            return
        lanes = max(1, serving.prepared.instances)
        known = [row_ns for row_ns, count in zip(runs.size_row_ns, runs.size_runs, strict=True) if row_ns and count >= _LEAST_RUNS]
        self._row_ns, self._running = min(known, default=0) / lanes, lanes * max(1, runs.most)
