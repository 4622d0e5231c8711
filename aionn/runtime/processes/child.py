"""A child process, signalled and waited for through its pidfd, and what it prints.

Invariants
    A child is waited for (`waitid`) once, in `reap`. `exit_code` is set after it, unless the app reaped the child itself
    (SIGCHLD ignored, a stray `os.wait`).
    Signals go through the pidfd. The number of a process may belong to another process by now.
    `_pidfd` is -1 from the moment it is closed.
    What the child has printed was written to the app's stderr when `reap` returns.

A driver process has one pipe as its stdout and stderr, so it holds no descriptor of the app's terminal or log. The app reads the pipe in
its event loop and writes the lines to its own descriptor 2, with control characters as escapes.

The app reads at most TURN_BYTES in one turn of the loop. It never waits for its own stderr. While that is full, the pipe is not read,
and the driver process waits or drops its output (`driver.beginning`). While it is closed, the bytes are dropped.

The driver process counts what it drops in an eventfd. The app reads it before the pipe, so the line that it writes about lost bytes comes
before the output that follows them.

Invariants
    `_fd` and `counter` are -1 from the moment they are closed. The loop then has no reader and no timer of this object.
    Bytes reach stderr in the order in which they came. `_unwritten` holds bytes only while the pipe is not read.

`Runtime.open` spawns a driver before it imports what a runtime needs. So this module imports nothing heavy.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from aionn.caching.private_folder import remove_folder
from aionn.loopless import is_readable, leave_in_child, running_loop

if TYPE_CHECKING:
    import asyncio

    from aionn.escapes import EscapedStream


class Child:
    """A child process of this app.

    Attributes:
        pid: its number.
        exit_code: of the process that has ended, or minus the signal that ended it. None if it is not known.
        is_shared: whether it is a child of another process, which this app cannot end.
        page: the descriptor of its statistics page if that came before its greeting, or -1.
        started_ns: when another process started it, in CLOCK_MONOTONIC, or 0 if this app did.
    """

    is_shared = False
    page = -1
    started_ns = 0

    def __init__(self, pid: int, pidfd: int, output: Output, exited: Callable[[], None], exports: str = "") -> None:
        """Take over the pidfd and the output. `exited` is called when the process has ended, until `reap` or `end` has been called.

        `exports` is the folder for temporary files that the process may have made. It is removed with the process.
        """
        self.pid = pid
        self.exit_code: int | None = None
        self._pidfd = pidfd
        self._exports = exports
        self._loop = running_loop()
        self._loop.add_reader(pidfd, exited)
        self._output = output
        output.forward()
        leave_in_child(self)

    @property
    def last_lines(self) -> str:
        """The last lines that it has printed so far, without control characters. May be empty."""
        return self._output.last_lines

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return  # the process has ended, and the loop will call `exited`

    def reap(self) -> bool:
        """Take the exit code of a process that has ended. Returns False while the process runs, and after the first time."""
        if self._pidfd < 0:
            return False
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if status is None:
                return False
            self.exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        except ChildProcessError:
            pass  # the app has reaped the process: the pidfd still says that the process has ended
        self.end()
        return True

    def pidfd(self) -> int:
        """Return a duplicate of the pidfd, in any thread. Returns -1 if the process has ended."""
        fd = self._pidfd
        try:
            found = os.dup(fd)
        except OSError:
            return -1
        if fd != self._pidfd:  # it was closed meanwhile, and its number may be another descriptor's
            os.close(found)
            return -1
        return found

    def block_until_ended(self, seconds: float) -> None:
        """Wait for the end in this thread. The loop stands still meanwhile."""
        if self._pidfd >= 0:
            is_readable(self._pidfd, seconds)

    def end(self) -> None:
        """Close the pidfd and the output. A process that still runs is left to the system."""
        self._output.end()
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)
            remove_folder(self._exports)

    def leave(self) -> None:
        """Close the pidfd in a child of fork: the process is the parent's. The output leaves by itself."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


PIPE_BYTES = 256 << 10
"""The size of the pipe, if the system allows it. A user may have 64 MiB of pipes before Linux makes all new ones small."""

TURN_BYTES = 64 << 10

RETRY_S = 0.1
"""How soon to try again when the app's stderr is full. The app may use descriptor 2 in its loop, so the loop cannot watch it."""

_LOST = b"\n[aionn: the app did not read what this driver process prints; %d bytes are lost]\n"

_LAST_BYTES = 8 << 10
_LAST_LINES = 40


def output_pipe() -> tuple[Output, int]:
    """Return the app's end of a new pipe, and the descriptor of the end for a driver process. `Output.counter` is for it, too.

    Raises:
        OSError: there is no free descriptor.
    """
    counter = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        ours, theirs = os.pipe2(os.O_CLOEXEC)
    except OSError:
        os.close(counter)
        raise
    os.set_blocking(ours, False)
    with suppress(OSError):  # the user has many pipes, or the system allows smaller ones only
        fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return Output(ours, counter), theirs


class Output:
    """The app's end of the pipe. It is closed by `end`, by the end of all writers, and with this object.

    Attributes:
        counter: an eventfd, in which the driver process counts the bytes that it drops. -1 once it is closed.
    """

    def __init__(self, fd: int, counter: int) -> None:
        self._fd, self.counter = fd, counter
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._unwritten = b""
        self._last = b""
        leave_in_child(self)

    def __del__(self) -> None:
        self.leave()  # the loop was closed before the runtime

    def forward(self) -> None:
        """Write to the app's stderr what comes, from now on, in the running loop."""
        self._loop = running_loop()
        self._loop.add_reader(self._fd, self._turn)

    def end(self) -> None:
        """Write what is left in the pipe, and close it. What a full stderr does not take is dropped."""
        most = 2 * PIPE_BYTES  # a process that the driver has started may go on writing
        self._unwritten = _written_to_stderr(self._unwritten)
        while most > 0 and (data := self._read()):
            most -= len(data)
            self._unwritten = self._unwritten or _written_to_stderr(self._stream.feed(data))
        self._close()

    @property
    def last_lines(self) -> str:
        """The last lines that have come, with control characters shown as escapes. Empty if nothing has come."""
        from aionn.escapes import escaped

        lines = self._last.decode("utf-8", "replace").splitlines()[-_LAST_LINES:]
        return escaped("\n".join(lines)).strip("\n")

    def leave(self) -> None:
        """Close the pipe in a child of fork: the driver process is the parent's."""
        fds, self._fd, self.counter = (self._fd, self.counter), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _turn(self) -> None:
        data = self._read()
        if data == b"":
            self._close()
        elif data:
            self._unwritten = _written_to_stderr(self._stream.feed(data))
            if self._unwritten and self._loop is not None:
                self._loop.remove_reader(self._fd)
                self._retry = self._loop.call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        assert self._loop is not None
        self._retry = None
        self._unwritten = _written_to_stderr(self._unwritten)
        if self._unwritten:
            self._retry = self._loop.call_later(RETRY_S, self._try_again)
        else:
            self._loop.add_reader(self._fd, self._turn)

    def _read(self) -> bytes | None:
        """Return what has come: no bytes after the end of all writers, None while there is nothing."""
        if self._fd < 0:
            return b""
        lost = self._lost()
        try:
            data = lost + os.read(self._fd, TURN_BYTES)
        except BlockingIOError:
            if not lost:
                return None
            data = lost
        self._last = (self._last + data)[-_LAST_BYTES:]
        return data

    def _lost(self) -> bytes:
        """Return a line that says how many bytes the driver process has dropped since the last one, or no bytes."""
        count = bytearray(8)
        try:
            # RWF_NOWAIT, because the driver process shares O_NONBLOCK and could clear it. This loop would wait for it.
            os.preadv(self.counter, [count], -1, os.RWF_NOWAIT)
        except BlockingIOError:
            return b""
        except OSError:  # of a kernel before Linux 5.8, an emulator, or an outer sandbox
            return _LOST % os.eventfd_read(self.counter) if is_readable(self.counter) else b""
        return _LOST % int.from_bytes(count, sys.byteorder)

    @cached_property
    def _stream(self) -> EscapedStream:
        from aionn.escapes import EscapedStream

        return EscapedStream()

    def _close(self) -> None:
        if "_stream" in vars(self):
            self._unwritten = self._unwritten or _written_to_stderr(self._stream.feed(b"", last=True))
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._fd >= 0 and self._loop is not None:
            self._loop.remove_reader(self._fd)
        self.leave()


def _written_to_stderr(data: bytes) -> bytes:
    """Write to descriptor 2 without waiting. Returns what it does not take now. Bytes for a closed stderr are dropped."""
    if not data or not _has_stderr():
        return b""
    # Linux calls a pipe or a socket writable if it takes PIPE_BUF bytes, and a terminal if it takes fewer.
    at_once = 256 if os.isatty(2) else select.PIPE_BUF
    (room := select.poll()).register(2, select.POLLOUT)
    while data:
        events = room.poll(0)
        if not events:
            return data
        if not events[0][1] & select.POLLOUT or events[0][1] & (select.POLLERR | select.POLLNVAL):
            return b""  # its reader has gone; a write could end an app that leaves SIGPIPE to the system
        try:
            data = data[os.write(2, data[:at_once]) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""
    return b""


def _has_stderr() -> bool:
    """Return whether descriptor 2 is the app's stderr. In a daemon it is closed, or another file has got its number."""
    try:
        return os.get_inheritable(2)
    except OSError:
        return False
