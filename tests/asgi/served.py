"""A web app of the tests in a real uvicorn process, reached over TCP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from aionn.testing import FakeDevice
from aionn.testing.fake_engine import VARIABLE
from tests.apps import App
from tests.leaks import processes_with

ROOT = Path(__file__).parent.parent.parent

UVICORNS_OWN = "ASGI callable returned without completing handshake"
"""uvicorn 0.54 logs this after each WebSocket that an app has denied with a response of its own."""


class Served:
    """One running app.

    Attributes:
        http: a client for it. pid: of uvicorn's first process.
        port: where it listens.
    """

    def __init__(self, process: subprocess.Popen[str], http: httpx.Client, port: int) -> None:
        self._process = process
        self.http = http
        self.pid = process.pid
        self.port = port
        self._marked = VARIABLE, os.environ[VARIABLE]

    def status(self, path: str) -> int:
        return self.http.get(path).status_code

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/readyz").json()
        return found

    def detect(self, *values: float) -> httpx.Response:
        return self.http.post("/detect", json=[*values, *[0.0] * (16 - len(values))])

    def until_ready(self) -> float:
        """Ask until it is ready. Return how long that took, in seconds."""
        began = time.monotonic()
        while self.status("/readyz") != 200:
            assert time.monotonic() - began < 60, self.health()
        return time.monotonic() - began

    def processes(self) -> list[str]:
        """The processes of the app: uvicorn's, its workers and their drivers."""
        return processes_with(*self._marked)

    def drivers(self) -> list[int]:
        found = []
        for child in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if "aionn.driver" in child.cmdline():
                    found.append(child.pid)
        return found

    def end(self, signal_number: int = signal.SIGTERM) -> tuple[float, int, str]:
        """Signal it, and wait for its end. Return how long that took in seconds, its exit code, and what it wrote to stderr."""
        began = time.monotonic()
        self._process.send_signal(signal_number)
        _, errors = self._process.communicate(timeout=30)
        lines = [line for line in errors.splitlines() if UVICORNS_OWN not in line]
        return time.monotonic() - began, self._process.returncode, "\n".join(lines)


@contextmanager
def served(app: str, *arguments: str, loop: str = "uvloop") -> Iterator[Served]:
    """Run `tests.asgi.apps:APP` for the body. A `FakeDevice` must be open. The socket listens before the server runs, so clients wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        fd, port = listening.fileno(), listening.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", f"tests.asgi.apps:{app}", "--fd", str(fd), "--loop", loop, "--log-level", "warning"]
        process = App([*command, *arguments], cwd=ROOT, pass_fds=(fd,), stderr=subprocess.PIPE, text=True)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http, process:
        try:
            yield Served(process, http, port)
        finally:
            process.kill()


def begun(fake: FakeDevice, act: str) -> int:
    """Wait, blocking, until the fake has begun that act. Return the driver's process id."""
    import anyio

    return anyio.run(fake.heard, act)
