"""What the tests of pages share that need other processes: programs, started and ended, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.apps import App


@contextmanager
def program(source: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run Python source in a process, which has said a line when the body begins, and which is gone when it has ended."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    process = App(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready"), line
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def memfds(*pids: int) -> set[str]:
    """The memory of pages and rings that these processes have open or mapped, or else all processes that this user may see."""
    found = set()
    for name in map(str, pids) if pids else filter(str.isdigit, os.listdir("/proc")):
        for folder in ("fd", "map_files"):
            with suppress(OSError), os.scandir(f"/proc/{name}/{folder}") as links:
                for link in links:
                    with suppress(OSError):
                        if os.readlink(link.path).startswith("/memfd:aionn-"):
                            found.add(f"{os.stat(link.path).st_ino} {os.readlink(link.path)}")
    return found
