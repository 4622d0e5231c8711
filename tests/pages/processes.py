"""What the tests of pages share that need other processes: programs, started and ended, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def program(source: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run Python source in a process, which has said a line when the body begins, and which is gone when it has ended."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


def memfds() -> set[str]:
    """Every memory of a page or a ring that some process of this user has open or mapped."""
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        for folder in ("fd", "map_files"):
            try:
                links = os.listdir(f"/proc/{name}/{folder}")
            except OSError:
                continue
            for link in links:
                try:
                    target = os.readlink(f"/proc/{name}/{folder}/{link}")
                    if target.startswith("/memfd:aionn-"):
                        found.add(f"{os.stat(f'/proc/{name}/{folder}/{link}').st_ino} {target}")
                except OSError:
                    continue
    return found
