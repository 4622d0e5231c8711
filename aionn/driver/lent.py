"""Duplicates of a client's descriptors for one blocking act in a thread.

A call that was cancelled or is late is abandoned while its thread still runs, and the client's descriptors are closed then. Their numbers
may already name other files when the thread uses them. So the thread gets duplicates.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from aionn.errors import CallerError

T = TypeVar("T")


class LentDescriptors:
    """Duplicates of descriptors. The end of the act closes them, or `give_up` if the act has not begun."""

    def __init__(self, fds: Iterable[int]) -> None:
        """Duplicate the descriptors. One that is not open is -1 for the act, so that its use fails."""
        self._lock = threading.Lock()
        self._taken = False
        self._fds = tuple(map(_duplicate, fds))

    def _take(self) -> bool:
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken

    def during(self, act: Callable[[Sequence[int]], T]) -> T:
        """Run `act` with the duplicates, in the order of the originals.

        Raises:
            CallerError: the duplicates have been given up.
        """
        if not self._take():
            raise CallerError("the preparation was given up before it touched its files")
        try:
            return act(self._fds)
        finally:
            self._close()

    def give_up(self) -> None:
        """Prevent the act from beginning. An act that has begun goes on, and its end closes the duplicates."""
        if self._take():
            self._close()

    def _close(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)


def _duplicate(fd: int) -> int:
    with suppress(OSError, OverflowError):
        return os.dup(fd)
    return -1
