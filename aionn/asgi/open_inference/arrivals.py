"""`AwaitedBodies`: ends requests whose bodies do not arrive in time, with one timer for all of them.

A cancel scope for each wait would make small requests slower by a twentieth.

Invariants
    All requests run in one event loop.
    The timer is set while a body is waited for, and fires no later than the first of their deadlines.
    A task is cancelled only while it waits in `message`, and at most once per wait. The wait takes that cancellation back.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive


class AwaitedBodies:
    """The requests whose bodies are waited for, with one timer."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Task[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def message(self, receive: Receive, by_s: float) -> Message:
        """Return the next message of a request.

        Args:
            by_s: when the message must have arrived, in seconds of the event loop's clock.

        Raises:
            TimeoutError: the message has not arrived by then.
        """
        task = asyncio.current_task()
        assert task is not None
        others = task.cancelling()
        self._waiting[task] = by_s
        if self._timer is None or by_s < self._timer.when():
            self._set(by_s)
        try:
            return await receive()
        except asyncio.CancelledError:
            # Another part of the program may have cancelled the task, too, and that cancellation goes on.
            if task not in self._waiting and task.uncancel() <= others:
                raise TimeoutError from None
            raise
        finally:
            self._waiting.pop(task, None)

    def _set(self, by_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(by_s, self._end_late)

    def _end_late(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for task in [task for task, by_s in self._waiting.items() if by_s <= now_s]:
            del self._waiting[task]
            task.cancel()
        if self._waiting:
            self._set(min(self._waiting.values()))
