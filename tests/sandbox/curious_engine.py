"""Engines that make a system call which no driver may make, in the thread that compiles."""

from __future__ import annotations

import signal
import socket
from typing import Any

from aionn.engines.reference import ReferenceEngine


class Curious(ReferenceEngine):
    """Opens a socket."""

    def compile(self, *arguments: Any) -> Any:
        with socket.socket():
            return super().compile(*arguments)


class Quiet(Curious):
    """Opens a socket in a thread that blocks all signals."""

    def compile(self, *arguments: Any) -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        return super().compile(*arguments)
