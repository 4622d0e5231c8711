"""Worker processes of `aionn bench`: one that returns what it gets, and fresh ones that run a model once.

Invariants
    A worker ends when its socket ends. It is killed and waited for when its `with` block ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio

from aionn.cli.printing import NotDoneError

_HEAD = struct.Struct("=Q")


@contextmanager
def worker(*arguments: str) -> Iterator[socket.socket]:
    """Run `python -m aionn.cli.bench_worker ARGUMENTS` during the body. Returns this end of its socket, which does not block.

    Raises:
        OSError: the process cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours:
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = [sys.executable, "-P", "-m", "aionn.cli.bench_worker", str(theirs.fileno()), *arguments]
            actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
            # Ctrl-C goes to the whole process group, and this process ends its workers itself.
            pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions, setsigmask=[signal.SIGINT])
        try:
            ours.setblocking(False)
            yield ours
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it has not been waited for, so the number is still its
            os.waitpid(pid, 0)


class Echo:
    """The other end of a worker that returns each message, as `multiprocessing.Pipe` would carry it: bytes through a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def trip(self, content: memoryview, into: memoryview) -> None:
        """Send bytes and receive them.

        Raises:
            NotDoneError: the worker has ended.
        """
        with suppress(ConnectionError):
            for left in (memoryview(_HEAD.pack(content.nbytes)), content):
                while len(left):  # uvloop's own sock_sendall logs an InvalidStateError when Ctrl-C cancels it
                    try:
                        left = left[self._sock.send(left) :]
                    except BlockingIOError:
                        await anyio.wait_writable(self._sock)
            room = into
            while received := await self._loop.sock_recv_into(self._sock, room):
                room = room[received:]
                if not len(room):
                    return
        raise NotDoneError("the worker process of the rival 'pipe' has ended; run aionn bench again")


async def first_answer_ns(*arguments: str) -> int:
    """Return the nanoseconds from the start of a fresh worker process to its word that it has an answer.

    Raises:
        NotDoneError: the process ended without an answer. Its stderr says why.
    """
    loop = asyncio.get_running_loop()
    began_ns = time.perf_counter_ns()
    with worker(*arguments) as sock:
        said = await loop.sock_recv(sock, 1)
        ended_ns = time.perf_counter_ns()
        if not said:
            raise NotDoneError(f"the fresh process for {arguments[0]!r} ended without an answer; its messages are above")
        while await loop.sock_recv(sock, 1):  # until it has closed its runtime, so that nothing of it runs beside the next one
            pass
    return ended_ns - began_ns
