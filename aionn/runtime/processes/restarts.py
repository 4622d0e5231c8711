"""When to start a driver again that has died: at once at first, and later each time if it dies again and again.

Without these pauses, an engine that crashes at every start, or a model that crashes its driver at every run, would use up a CPU.
"""

from __future__ import annotations

import logging
import time

import anyio
import msgspec

from aionn.runtime.processes.liveness import Hang
from aionn.runtime.record import DriverRecord, about

logger = logging.getLogger("aionn.driver")

BACKOFF_S = (0.0, 0.1, 1.0, 10.0)
"""The pauses before a start: after one death, after two in a row, after three, and after more."""

STEADY_S = 10.0
"""A driver that has lived for so long, or has finished an execution, begins a new row of deaths."""


class Life(msgspec.Struct):
    """The life of one driver process.

    Attributes:
        started_ns, ended_ns: by CLOCK_MONOTONIC. `ended_ns` is 0 while the process runs.
        worked: whether the driver had finished an execution.
        exit_code: of the process, or minus the signal that ended it. None while it is not known.
        cause: why it ended, as of `aionn.events.DriverEnded`. It counts once the process has ended.
        record: what shows the process.
        hang: why the driver counts as hung now, or None.
    """

    started_ns: int
    record: DriverRecord
    ended_ns: int = 0
    worked: bool = False
    exit_code: int | None = None
    cause: str = "closed"
    hang: Hang | None = None


class Restarts:
    """The deaths of one device's drivers, and the pauses after them.

    Attributes:
        last_exit_code: of the last driver that ended, or None.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._deaths = 0
        self._died_ns = 0
        self._hurry = anyio.Event()
        self.last_exit_code: int | None = None

    @property
    def deaths(self) -> int:
        """How many drivers have died in a row."""
        return self._deaths

    def died(self, life: Life) -> None:
        """Note that a driver has died."""
        self.last_exit_code, self._died_ns = life.exit_code, life.ended_ns
        self._deaths = 1 if life.worked or (life.ended_ns - life.started_ns) / 1e9 >= STEADY_S else self._deaths + 1

    def forgive(self) -> None:
        """End a pause, and start without one."""
        self._deaths = 0
        self._hurry.set()

    async def pause(self) -> None:
        """Wait until a driver may be started. Log the start if a driver has died before."""
        if not self._deaths:
            return
        pause_s = BACKOFF_S[min(self._deaths, len(BACKOFF_S)) - 1]
        left_s = pause_s - (time.monotonic_ns() - self._died_ns) / 1e9
        if left_s > 0:
            self._hurry = anyio.Event()
            with anyio.move_on_after(left_s):
                await self._hurry.wait()
        if self._deaths:
            logger.warning(
                "the driver process of device %r is started again, after %d deaths in a row (the last one with exit code %s)%s",
                self._device,
                self._deaths,
                self.last_exit_code,
                f" and a pause of {pause_s:g} s" if left_s > 0 else "",
                extra=about(device=self._device),
            )
