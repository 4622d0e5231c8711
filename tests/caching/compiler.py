"""An app that compiles one entry, or waits for the one who does. Run as `python -m tests.caching.compiler DIRECTORY WAIT_S`.

Tells each of its steps as one line on stdout ("PID compiling", "PID waits", "PID published", "PID hit CONTENT", "PID busy"), which all
processes of a test share. "Compiling" writes half of every file, waits for a line on stdin, and writes the rest.
"""

from __future__ import annotations

import os
import sys

import anyio
import anyio.to_thread

from aionn.caching.store import CacheStore, Hit, Miss
from tests.caching.entries import contents, fill, wanted


def tell(what: str) -> None:
    os.write(1, f"{os.getpid()} {what}\n".encode())


async def main(directory: str, wait_s: float) -> None:
    async with CacheStore(directory, wait_s=wait_s) as store, await store.open(wanted(), waits=lambda: tell("waits")) as found:
        if isinstance(found, Hit):
            tell(f"hit {b''.join(contents(found.handles)).hex()}")
        elif isinstance(found, Miss) and found.publisher is not None:
            fill(found.publisher.handles, b"half")
            tell("compiling")
            await anyio.to_thread.run_sync(sys.stdin.readline)
            fill(found.publisher.handles, b"artifact")
            assert await found.publisher.publish() is None
            tell("published")
        else:
            assert found.outcome.reason is not None
            tell(found.outcome.reason.value)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], float(sys.argv[2]))
