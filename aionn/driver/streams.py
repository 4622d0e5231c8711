"""`StreamHints`: lets executables know when the first burst of their prepared model opens, and when the last one has ended.

A burst's lifetime is the hint to stay in a high-performance state (HAL 1.2: IBurstContext). Most engines have no such state, so both
methods of an executable are optional: `stream_began()` and `stream_ended()`.

Invariant
    Per executable, `stream_began` and `stream_ended` take turns, beginning with `stream_began`. They are never called at the same time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from aionn.hal.engine import Executable

logger = logging.getLogger("aionn.driver")


class StreamHints:
    """The open bursts of one prepared model.

    Args:
        executables: of the prepared model.
        behind: runs a job in a thread, which no answer waits for.
    """

    def __init__(self, executables: Sequence[Executable], behind: Callable[[Callable[[], None]], None]) -> None:
        self._hinted = [
            executable for executable in executables if hasattr(executable, "stream_began") or hasattr(executable, "stream_ended")
        ]
        self._behind = behind
        self._open = 0
        self._began = False
        self._lock = threading.Lock()

    def opened(self) -> None:
        """Note that a burst is open."""
        self._open += 1
        if self._open == 1 and self._hinted:
            self._behind(self._apply)

    def ended(self) -> None:
        """Note that a burst has ended."""
        self._open -= 1
        if not self._open and self._hinted:
            self._behind(self._apply)

    def _apply(self) -> None:
        with self._lock:  # jobs may change places, so each looks at what holds now
            began = self._open > 0
            if began is self._began:
                return
            self._began = began
            for executable in self._hinted:
                try:
                    getattr(executable, "stream_began" if began else "stream_ended", _nothing)()
                except Exception:  # a hint that fails costs nothing but this line
                    logger.exception("an executable raised an error when a stream %s", "began" if began else "ended")


def _nothing() -> None:
    """Stand for a method that an executable does not have."""
