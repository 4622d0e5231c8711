"""When a driver that has died is started again: at once at first, and ever later if it dies again and again.

An engine that crashes at every start, or a model that crashes its driver at every run, would use up a CPU otherwise.
"""

from __future__ import annotations

import logging
import time

import anyio

logger = logging.getLogger("aionn.driver")

BACKOFF_S = (0.0, 0.1, 1.0, 10.0)
"""The pause before a start after one death, two in a row, three, and more."""

STEADY_S = 10.0
"""A driver that has lived for so long, or has finished an execution, does not continue such a row."""


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

    def died(self, exit_code: int | None, started_ns: int, ended_ns: int, worked: bool) -> None:
        """Note that a driver has died. `worked`: it had finished an execution."""
        self.last_exit_code, self._died_ns = exit_code, ended_ns
        self._deaths = 1 if worked or (ended_ns - started_ns) / 1e9 >= STEADY_S else self._deaths + 1

    def forgive(self) -> None:
        """End a pause, and start without one."""
        self._deaths = 0
        self._hurry.set()

    async def pause(self) -> None:
        """Wait until a driver may be started, and log it if one has died."""
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
            )
