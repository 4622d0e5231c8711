"""A running `aionn serve-http`, reached over TCP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil

from tests.leaks import processes_with

__all__ = ["Server", "serve_http"]

MARK = "AIONN_TEST_MARK"


class Server:
    """Attributes: process, where it is reached (HOST:PORT), a client of it, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        self.process = process
        self.printed: list[str] = []
        self._mark = mark
        self.address = self.until(r"listening on http://(\S+)/v2, compiling \d+ models?$")
        self.http = httpx.Client(base_url=f"http://{self.address}", timeout=60)

    def until(self, pattern: str) -> str:
        """Read what it prints until a line has the pattern. Return the pattern's first group."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.printed.append(line.rstrip())
            found = re.search(pattern, line.rstrip())
            if found:
                return found[1] if found.groups() else found[0]
        raise AssertionError(f"it ended with {self.process.wait()}: {self.printed}")

    def until_ready(self) -> None:
        self.until(r"ready: http://")

    def drivers(self) -> list[int]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if "aionn.driver" in child.cmdline():
                    found.append(child.pid)
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end. Return its exit code. Nothing that it started may be left."""
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=40)
        self.printed += rest.splitlines()
        assert processes_with(MARK, self._mark) == []
        return self.process.returncode


@contextmanager
def serve_http(*arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[Server]:
    """Run the command for the body. `prefix`: a command that becomes the command behind it."""
    mark = uuid.uuid4().hex
    command = [*prefix, sys.executable, "-m", "aionn", "serve-http", *arguments, "--listen", "127.0.0.1:0"]
    environment = {**os.environ, MARK: mark}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    with process:
        try:
            server = Server(process, mark)
            with server.http:
                yield server
        finally:
            process.kill()
