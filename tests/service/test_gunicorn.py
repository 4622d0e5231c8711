"""The workers of a gunicorn share one driver, and no request is lost while HUP replaces the workers."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from aionn.testing import identity_model
from tests.apps import App
from tests.service.served import Served, serving

WORKERS, CALLERS, RELOADS = 4, 3, 2
CONFIGURATION = Path(__file__).with_name("gunicorn_hooks.py")
ROOT = Path(__file__).parents[2]


def until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


class Gunicorn:
    """A gunicorn that listens at a Unix socket."""

    def __init__(self, folder: Path, service: Served, more: list[str]) -> None:
        model = folder / "model.onnx"
        model.write_bytes(identity_model({"input": (1, 16)}))
        self._path = str(folder / "web.sock")
        self._log = folder / "web.log"
        listening = ["--bind", f"unix:{self._path}", "--workers", str(WORKERS), "--config", str(CONFIGURATION), "--no-control-socket"]
        with self._log.open("wb") as log:
            self.process = App(
                [sys.executable, "-m", "gunicorn", *listening, *more, "tests.service.gunicorn_app:app"],
                cwd=ROOT,
                env={**os.environ, "AIONN_SERVICE": service.path, "AIONN_TEST_MODEL": str(model)},
                stdout=log,
                stderr=log,
            )

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def asked(self, number: int) -> tuple[int, int]:
        """Return which worker has answered, and which process had read the model."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(60)
            caller.connect(self._path)
            caller.sendall(f"GET /?{number} HTTP/1.0\r\n\r\n".encode())
            with caller.makefile("rb") as answer:
                status, _, content = answer.read().partition(b"\r\n")
        assert b" 200 " in status, (status, self.log())
        worker, reader, found = map(int, content.rpartition(b"\r\n")[2].split())
        assert found == number
        return worker, reader


@contextmanager
def running(folder: Path, service: Served, more: list[str]) -> Iterator[Gunicorn]:
    gunicorn = Gunicorn(folder, service, more)
    try:
        yield gunicorn
    finally:
        gunicorn.process.terminate()
        gunicorn.process.wait(60)


def pids(service: Served) -> set[int]:
    return {guest["guest"] for guest in service.guests()}


@pytest.mark.parametrize("preload", [False, True])
def test_workers_share_one_driver_and_a_reload_loses_no_request(preload: bool) -> None:
    ended = threading.Event()
    with ExitStack() as stack:
        folder = stack.enter_context(serving())
        service = Served(folder)
        stack.callback(service.end)
        gunicorn = stack.enter_context(running(folder, service, ["--preload"] if preload else []))
        until(lambda: len(pids(service)) == WORKERS)
        (driver,) = service.facts()["drivers"]

        def call(first: int) -> set[tuple[int, int]]:
            found, number = set(), first
            while not ended.is_set():
                found.add(gunicorn.asked(number))
                number = (number + CALLERS) % 1000
            return found

        callers = stack.enter_context(ThreadPoolExecutor(CALLERS))
        stack.callback(ended.set)  # before the pool waits
        calling: list[Future[set[tuple[int, int]]]] = [callers.submit(call, number) for number in range(CALLERS)]
        seen: set[int] = set()
        for _ in range(RELOADS):
            before = pids(service)
            seen |= before
            gunicorn.process.send_signal(signal.SIGHUP)
            until(lambda before=before: len(found := pids(service)) == WORKERS and not found & before)  # type: ignore[misc]
        gunicorn.asked(7)
        ended.set()
        answered = set().union(*(each.result(60) for each in calling))
        assert {worker for worker, _ in answered} & seen
        assert {worker for worker, _ in answered} - seen
        assert ({reader for _, reader in answered} == {gunicorn.process.pid}) == preload
        assert [each["pid"] for each in service.facts()["drivers"]] == [driver["pid"]]
        assert "Traceback" not in gunicorn.log()
    assert gunicorn.process.returncode == 0
