"""What a driver process logs, on its way to the app's log.

Lines below ERROR stay here. A text is cut, and so many lines are sent in a second; one more line says how many were left out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["LogLines"]

MAX_CHARACTERS = 8192
PER_SECOND = 50


class LogLines(logging.Handler):
    """Hands each line to `send` in the loop, whatever thread logs it.

    Args:
        send: gets the level, the logger's name and the text.
    """

    def __init__(self, send: Callable[[int, str, str], None]) -> None:
        super().__init__(logging.ERROR)  # what is milder, the app finds in its outcomes
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._second, self._lines = 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        second = int(time.monotonic())
        if second != self._second:
            left_out, self._second, self._lines = max(0, self._lines - PER_SECOND), second, 0
            if left_out:
                self._post(logging.WARNING, record.name, f"{left_out} more lines in one second were left out")
        self._lines += 1
        if self._lines <= PER_SECOND:
            text = self.format(record)
            if len(text) > MAX_CHARACTERS:  # the end of a traceback says most
                text = f"{text[: MAX_CHARACTERS // 4]}\n[{len(text)} characters in all]\n{text[-MAX_CHARACTERS // 2 :]}"
            self._post(record.levelno, record.name, text)

    def _post(self, level: int, name: str, text: str) -> None:
        with suppress(RuntimeError):  # the loop has been closed, and the process ends
            self._loop.call_soon_threadsafe(self._send, level, name, text)
