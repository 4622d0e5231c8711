"""A real `aionn serve` for tests: its process, its socket, and other apps that use it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aionn.cli.checks.sandbox import files, system_calls
from aionn.service.server import Service
from tests import apps

READY = b"READY=1"

LEVEL = "strict" if all(row.status == "ok" for row in (files(), system_calls())) else "auto"
"""Of the service, so that a system call that its filter denies ends it. Its drivers have the level that their apps ask for."""


def _said(command: str, path: str) -> dict[str, Any]:
    arguments = [sys.executable, "-m", "aionn", command, "--json", "--socket", path]
    printed = apps.run_app(arguments, check=True, stdout=subprocess.PIPE, timeout=60)
    found: dict[str, Any] = json.loads(printed.stdout)
    return found


def evicted(path: str) -> int:
    """How many models `aionn evict` has freed."""
    freed: int = _said("evict", path)["freed"]
    return freed


def alive(pid: int | None) -> bool:
    return os.path.exists(f"/proc/{pid}")


class Served:
    """A service that listens at `path`."""

    def __init__(self, folder: Path, *more: str, state_dir: str | None = None) -> None:
        """Start it, and return once it listens. Its state is in the folder, unless `state_dir` says another one."""
        self.path = str(folder / "service.sock")
        self._log = folder / f"log{len(list(folder.iterdir()))}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified, self._log.open("wb") as log:
            address = str(folder / f"n{len(list(folder.iterdir()))}")
            notified.bind(address)
            notified.settimeout(60)
            arguments = ["serve", "--socket", self.path, "--state-dir", state_dir or str(folder / "state"), *more]
            self.process = apps.App(
                [sys.executable, "-m", "aionn", *arguments],
                env={"AIONN_SANDBOX": LEVEL, **os.environ, "NOTIFY_SOCKET": address},
                stderr=log,
                stdout=log,
            )
            try:
                assert notified.recv(64) == READY
            except BaseException:
                self.end()
                raise AssertionError(self.log) from None

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def facts(self) -> dict[str, Any]:
        """What `aionn ps --json` says."""
        return _said("ps", self.path)

    def guests(self) -> list[dict[str, Any]]:
        return [guest for driver in self.facts()["drivers"] for guest in driver["guests"]]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)
                raise


@contextmanager
def serving() -> Iterator[Path]:
    """A folder for sockets, whose paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="aionn", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Looking(Service):
    """A service in this process, so that its times can be short. It counts how often it has looked for unused drivers."""

    looks = 0

    async def _end_unused(self) -> None:
        await super()._end_unused()
        self.looks += 1


APP = """
import asyncio, sys
import numpy as np
import aionn
from aionn.testing import identity_model

async def main(path):
    async with aionn.Runtime(service=path, start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"input": (1, 16)})), devices=["reference"])
        async with compilation.burst() as burst:
            for number in range(10**9):
                outputs = await burst.compute({"input": np.full((1, 16), number % 1000, np.float32)})
                assert (outputs["input_out"] == number % 1000).all()
                if number == 10:
                    print("streams", flush=True)

asyncio.run(main(sys.argv[1]))
"""


class App:
    """Another process that streams over a driver of the service."""

    def __init__(self, path: str) -> None:
        """Start it, and return once it streams."""
        self.process = apps.App([sys.executable, "-c", APP, path], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"streams\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def parent_of(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


FORKED_APP = """
import asyncio, ctypes, os, sys, time
import aionn
from aionn.testing import identity_model

async def main():
    runtime = aionn.Runtime(service=sys.argv[1], start=())
    await runtime.open()
    await runtime.compile(aionn.Model.from_onnx(identity_model({"input": (1, 16)})), devices=["reference"])
    if ctypes.CDLL(None).fork() == 0:
        time.sleep(120)
    print("forked", flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@contextmanager
def forked_app(path: str) -> Iterator[None]:
    """An app that has attached and has died, and its child, which holds all its sockets."""
    with apps.App([sys.executable, "-c", FORKED_APP, path], stdout=subprocess.PIPE, start_new_session=True) as app:
        try:
            assert app.stdout is not None
            assert app.stdout.readline() == b"forked\n"
            app.wait(30)
            yield
        finally:
            os.killpg(app.pid, signal.SIGKILL)


@contextmanager
def odd_descriptor() -> Iterator[int]:
    """A descriptor that no call takes."""
    fd = os.open("/dev/zero", os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
