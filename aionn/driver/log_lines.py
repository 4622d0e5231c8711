"""What a driver process logs, on its way to the app's log.

Lines below WARNING stay here. A text is cut, and so many lines are sent in a second. One more line says how many were left out; it comes
when that second is over, whether or not another line is logged then.

Invariants
    Of each second that begins with a line, at most PER_SECOND lines and the one about the others are sent.
    A line that is left out costs no formatting, so an engine that logs without end takes little time from executions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

MAX_BYTES = 8192
PER_SECOND = 50
SECOND_S = 1.0


class LogLines(logging.Handler):
    """Hands each line to `send` in the loop, whatever thread logs it.

    Args:
        send: gets the level, the logger's name and the text.
    """

    def __init__(self, send: Callable[[int, str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._began = -SECOND_S
        self._lines = 0
        self._left_out = 0
        self._logger = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line, or count it as left out. `logging` calls this with the handler's lock held."""
        now = time.monotonic()
        if now - self._began >= SECOND_S:
            self._flush()
            self._began, self._lines = now, 0
        self._lines += 1
        if self._lines <= PER_SECOND:
            self._post(record.levelno, record.name, _cut(self.format(record)))
            return
        self._left_out += 1
        self._logger = record.name
        if self._left_out == 1:
            with suppress(RuntimeError):  # the loop has been closed, and the process ends
                self._loop.call_soon_threadsafe(self._loop.call_later, self._began + SECOND_S - now, self._second_over, self._began)

    def _second_over(self, began: float) -> None:
        self.acquire()
        try:
            if began == self._began:  # else a line has begun another second, and sent how many were left out of this one
                self._flush()
        finally:
            self.release()

    def _flush(self) -> None:
        left_out, self._left_out = self._left_out, 0
        if left_out:
            self._post(logging.WARNING, self._logger, f"{left_out} more lines in one second were left out")

    def _post(self, level: int, name: str, text: str) -> None:
        with suppress(RuntimeError):  # the loop has been closed, and the process ends
            self._loop.call_soon_threadsafe(self._send, level, name, text)


def _cut(text: str) -> str:
    """Return a text of at most MAX_BYTES. The end of a traceback says most, so a long text loses its middle."""
    if len(text) <= MAX_BYTES // 4:
        return text
    content = text.encode("utf-8", "replace")
    if len(content) <= MAX_BYTES:
        return text
    between = f"\n[{len(content)} bytes in all]\n"
    begin, end = content[: MAX_BYTES // 4], content[-(MAX_BYTES * 3 // 4 - len(between)) :]
    return begin.decode("utf-8", "ignore") + between + end.decode("utf-8", "ignore")
