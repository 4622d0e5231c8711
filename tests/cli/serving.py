"""A command that serves until a signal, in a process. And a running `aionn serve-http`, reached over TCP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import httpx
import psutil

from tests.apps import App
from tests.leaks import processes_with
from tests.runs import measured

__all__ = ["Server", "Serving", "serve_http", "serving"]

MARK = "AIONN_TEST_MARK"


class Serving:
    """Attributes: process, where it is reached, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        self.process = process
        self.printed: list[str] = []
        self.address = ""
        self._mark = mark

    def until(self, pattern: str) -> str:
        """Read what it prints until a line has the pattern. Return the pattern's first group."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.printed.append(line.rstrip())
            found = re.search(pattern, line.rstrip())
            if found:
                return found[1] if found.groups() else found[0]
        raise AssertionError(f"it ended with {self.process.wait()}: {self.printed}")

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


class Server(Serving):
    """Attributes: address is HOST:PORT. http: a client of it."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        super().__init__(process, mark)
        self.address = self.until(r"listening on http://(\S+)/v2, compiling \d+ models?$")
        self.http = httpx.Client(base_url=f"http://{self.address}", timeout=60)

    def until_ready(self) -> None:
        self.until(r"ready: http://")


S = TypeVar("S", bound=Serving)


@contextmanager
def serving(kind: type[S], *arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[S]:
    """Run a command of aionn for the body. `prefix`: a command that becomes the command behind it."""
    mark = uuid.uuid4().hex
    command = [*prefix, sys.executable, *measured(), "-m", "aionn", *arguments]
    environment = {**os.environ, MARK: mark}
    process = App(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    with process:
        try:
            yield kind(process, mark)
        finally:
            process.kill()


@contextmanager
def serve_http(*arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[Server]:
    """Run the command for the body."""
    with serving(Server, "serve-http", *arguments, "--listen", "127.0.0.1:0", prefix=prefix) as server, server.http:
        yield server
