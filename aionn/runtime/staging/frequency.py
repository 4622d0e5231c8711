"""How often a model is executed, and whether that warrants a better stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import anyio

from aionn.runtime.serving.serving import Use

PER_S = 7 * 86400.0
"""The period in which executions count."""

_STEPS = 16
"""The count is read so often in one period. Executions are forgotten up to one step too early, never too late."""

_STEP_S = 0.05
"""The least time between two readings of the count. A short period has fewer steps."""


async def until_frequent(
    use: Use, executions: int, *, since: int = 0, earlier: int = 0, per_s: float = PER_S, clock: Callable[[], float] = time.monotonic
) -> None:
    """Return when there have been so many executions within the last `per_s` seconds, at least one of them in this start.

    Args:
        since: the count when this start began.
        earlier: executions of the starts before this one. They count as if they had just ended.
    """
    if not executions:
        return
    marks = deque([(clock(), since - earlier)])
    await use.wait_for(since + 1)
    while True:
        now_s = clock()
        while marks and marks[0][0] < now_s - per_s:
            marks.popleft()
        if not marks:
            marks.append((now_s, use.executions))
        enough = marks[0][1] + executions
        if use.executions >= enough:
            return
        with anyio.move_on_after(max(per_s / _STEPS, _STEP_S)):
            await use.wait_for(enough)
        marks.append((clock(), use.executions))
