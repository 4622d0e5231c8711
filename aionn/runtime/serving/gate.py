"""`Gate`: holds executions back for a moment, during a swap or a measured run."""

from __future__ import annotations

from collections import deque

import anyio

from aionn.errors import DeadlineError
from aionn.tasks import seconds_until


class Gate:
    """Holds executions back while it is shut, and lets them pass one after the other, in the order in which they came.

    Attributes:
        shut: whether an execution must call `passed`. It must while the gate is closed, and while executions that waited are still
            passing. Read it first, because the answer is nearly always no.
        closed: whether it holds every execution back. Read it again after an await that followed `passed`.
    """

    __slots__ = ("_came", "_turns", "closed", "shut")

    def __init__(self) -> None:
        self.shut = False
        self.closed = False
        self._turns: deque[_Turn] = deque()
        self._came = anyio.Event()

    def close(self) -> None:
        self.shut = self.closed = True

    def open(self) -> None:
        self.closed = False
        self._next()

    def _next(self) -> None:
        # A caller that comes while others still pass queues behind them.
        if self._turns:
            self._turns[0].come.set()
        else:
            self.shut = False

    async def wait_for_arrival(self) -> None:
        """Return when an execution waits. One task at a time may ask."""
        if not self._turns:
            self._came = anyio.Event()
            await self._came.wait()

    async def passed(self, deadline_ns: int | None) -> None:
        """Wait for it to open, and for those who came before. The next execution passes after the caller's next await.

        Raises:
            DeadlineError: it did not by the deadline.
        """
        turn = _Turn()
        self._turns.append(turn)
        self._came.set()
        if not self.closed:
            self._next()
        try:
            with anyio.move_on_after(seconds_until(deadline_ns)):
                await turn.come.wait()
                while self.closed:  # again, before this turn was taken
                    turn.come = anyio.Event()
                    await turn.come.wait()
                return
        finally:
            self._turns.remove(turn)
            if not self.closed:
                self._next()
        raise DeadlineError("a new stage was being tried or swapped in until past the deadline")


class _Turn:
    __slots__ = ("come",)

    def __init__(self) -> None:
        self.come = anyio.Event()
