"""Fresh processes for `tests.bench.starts`: start one, take the time of its first result, read its memory and its driver's.

Memory is PSS, of the app and its drivers at the same moment. Nameless shared memory counts in full and once, as long as a process holds
it, because PSS leaves out what no process maps at that moment.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

WORKER = Path(__file__).with_name("starts_worker.py")
PATIENCE_S = 300.0


class WorkerError(Exception):
    """A process of the bench ended without its answer, or with another one than it must give."""


class Worker:
    """One fresh process. Leave its `with` to end it; it ends its drivers."""

    def __init__(self, given: Mapping[str, Any], script: Path = WORKER) -> None:
        self._kind = given["kind"]
        self._killed = False
        # -P: the folder of the script has files with names of common packages.
        command = [sys.executable, "-P", str(script), json.dumps(given)]
        self.began_ns = time.monotonic_ns()
        # An app keeps its bytecode. Without it, each process would compile the sources of aionn anew.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.pid = self._process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if kind is None and not self._killed:
                self._process.stdin.close()
                if self._process.wait(PATIENCE_S) != 0:
                    raise WorkerError(f"the process of kind {self._kind!r} ended with code {self._process.returncode}")
        finally:
            with ended(self.drivers()):
                self._process.kill()
                self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()

    def answer(self) -> dict[str, Any]:
        """Return the next line of the process, with the milliseconds since its start as "ms"."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        now_ns = time.monotonic_ns()
        if not line:
            raise WorkerError(f"the process of kind {self._kind!r} ended without an answer; its error stands above")
        return {**json.loads(line), "ms": (now_ns - self.began_ns) / 1e6}

    def answer_watched(self, every_s: float, act: Callable[[], None]) -> dict[str, Any]:
        """Return the next line, and call `act` at that rhythm until it comes."""
        assert self._process.stdout is not None
        while not select.select([self._process.stdout], [], [], every_s)[0]:
            act()
        return self.answer()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """End it as the kernel does when memory is short."""
        self._killed = True
        self._process.kill()
        self._process.wait()

    def drivers(self) -> list[int]:
        """Return the processes that it, or a child of it, has started and that still run."""
        return descendants(self.pid)

    def memory_bytes(self) -> int:
        return group_bytes([self.pid, *self.drivers()])


@contextmanager
def ended(pids: list[int]) -> Iterator[None]:
    """Wait until processes have ended whose parent is killed inside, because they write to folders that go next."""
    watched = []
    for pid in pids:
        with suppress(ProcessLookupError):
            watched.append(os.pidfd_open(pid))
    try:
        yield
        for pidfd in watched:
            if not select.select([pidfd], [], [], PATIENCE_S)[0]:
                raise WorkerError("a driver process did not end after its app")
    finally:
        for pidfd in watched:
            os.close(pidfd)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for thread in _names(f"/proc/{pid}/task"):
        for child in map(int, _text(f"/proc/{pid}/task/{thread}/children").split()):
            found += [child, *descendants(child)]
    return found


def group_bytes(pids: list[int]) -> int:
    """Return the memory of processes together. A process that ends meanwhile counts nothing."""
    pss, shmem = 0, 0
    held: dict[int, int] = {}
    for pid in pids:
        fields = _rollup(pid)
        pss += fields.get("Pss", 0)
        shmem += fields.get("Pss_Shmem", 0)
        for number in _names(f"/proc/{pid}/fd"):
            entry = f"/proc/{pid}/fd/{number}"
            try:
                if os.readlink(entry).startswith("/memfd:"):
                    status = os.stat(entry)
                    held[status.st_ino] = status.st_blocks * 512
            except OSError:  # closed meanwhile
                continue
    return pss - shmem + max(shmem, sum(held.values()))


def peak_rss_bytes(pid: int) -> int:
    """Return the most memory that the process had mapped and present at once, shared pages counted in full."""
    for line in _text(f"/proc/{pid}/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise WorkerError(f"process {pid} has ended, so its peak cannot be read")


def _rollup(pid: int) -> dict[str, int]:
    lines = _text(f"/proc/{pid}/smaps_rollup").splitlines()[1:]
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, ProcessLookupError):
        return []
