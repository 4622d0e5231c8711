"""A Unix socket that carries control frames and descriptors, driven by the loop's callbacks: no task of its own.

Sending never waits: a frame goes out at once or is kept until the socket takes it, whole frames in order, so a cancelled
caller cannot leave half a frame behind. Descriptors leave with the first byte of their frame. Received ones are owned by
the `Descriptors` handed over with the message: whoever takes one owns it, the rest are closed. Where this process has too
many open files the kernel drops descriptors. Then the message still arrives, and taking one of its descriptors fails.

A peer that breaks the protocol, and a socket that fails, end the channel; so does an error of whoever handles a message:
in a callback of the loop it would be printed and forgotten, and somebody would wait for ever.

Invariants
    The loop watches the socket for reading from construction until the end, for writing only while `_outgoing` holds something.
    `on_end` is called exactly once, and nothing else is called after it.
    One read brings the descriptors of one frame at most, all of them (unix(7): a read ends behind the data they came with). So
    `_received` holds one item per frame that has descriptors and has not been parsed yet, in order.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import resource
import socket
from collections import deque
from collections.abc import Callable, Sequence

from aionn.errors import ExecutionError
from aionn.hal.types import ErrorStatus
from aionn.remote.control import HEADER, MAX_DESCRIPTORS, ControlError, Message, decode, decode_header, encode
from aionn.tasks import leave_in_child

_CHUNK_BYTES = 256 * 1024
_READS_PER_WAKE = 16
"""So many reads in one callback; then the loop's other work has its turn."""

_LAST_READS = 4096
"""So many reads from a peer that is dead: more than any socket holds, so only a stranger who shares its end can go on."""

_ENDED = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN}
"""What sending fails with when the peer has gone; the reading side tells of that end."""


class Descriptors:
    """Descriptors that came with one message, in order. What is not taken is closed.

    Attributes:
        lost: the kernel has dropped them, since this process has too many open files.
    """

    def __init__(self, fds: Sequence[int] = (), *, lost: bool = False) -> None:
        self._fds = deque(fds)
        self.lost = lost

    def __len__(self) -> int:
        return len(self._fds)

    def take(self) -> int:
        """The next one; it is the caller's from now on.

        Raises:
            ControlError: the message speaks of more descriptors than came with it.
            ExecutionError: RESOURCE_EXHAUSTED_TRANSIENT: they were lost for want of room.
        """
        return self.take_many(1)[0]

    def take_many(self, count: int) -> tuple[int, ...]:
        """The next `count`, or none at all."""
        if self.lost and count > 0:
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ExecutionError(
                f"the descriptors of a message were lost: process {os.getpid()} has too many open files (RLIMIT_NOFILE is {files}); "
                "raise the limit (ulimit -n), or have fewer calls in flight",
                status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
            )
        if count < 0 or count > len(self._fds):
            raise ControlError(f"a control message speaks of {count} descriptors, {len(self._fds)} came with it")
        return tuple(self._fds.popleft() for _ in range(count))

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())

    def __del__(self) -> None:
        self.close()


class Channel:
    """One end of the control socket. Takes over `sock`."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Message, Descriptors], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._socket = sock
        self._fd = sock.fileno()
        self._on_message = on_message
        self._on_end = on_end
        self._incoming = bytearray()
        self._received: deque[Descriptors] = deque()
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._closed = False
        self._loop.add_reader(self._fd, self._readable)
        leave_in_child(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def post(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message. The descriptors stay the caller's; they may be closed when this returns.

        Raises:
            CallerError: the message is larger than a frame may be.
            OSError: its descriptors cannot be sent (too many open files, here or on their way). Nothing was sent.
        """
        frame = memoryview(encode(message, len(fds)))
        if self._closed:
            return
        if self._outgoing:
            self._outgoing.append((frame, _duplicates(fds)))
            return
        sent = self._send(frame, fds)
        if sent is None or sent == len(frame):
            return
        # Descriptors have gone with the first byte, if any byte has gone.
        kept = _duplicates(fds) if sent == 0 else ()
        self._outgoing.append((frame[sent:], kept))
        self._loop.add_writer(self._fd, self._writable)

    def _send(self, frame: memoryview, fds: Sequence[int]) -> int | None:
        """Bytes that the socket took; None if it has ended (the reading side will say so).

        Raises:
            OSError: it took none, and not because of its end.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            return self._socket.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if error.errno in _ENDED:
                return None
            raise

    def _writable(self) -> None:
        while self._outgoing:
            frame, fds = self._outgoing[0]
            try:
                sent = self._send(frame, fds)
            except OSError as error:
                self._finish(error)  # the frames behind this one would arrive without it
                return
            if sent == 0:
                return
            for fd in fds:
                os.close(fd)
            if sent is None or sent == len(frame):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (frame[sent:], ())
        self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        self.drain(_READS_PER_WAKE)

    def drain(self, reads: int = _LAST_READS) -> None:
        """Take in what has arrived: all of it, up to the peer's end, for when the peer is known to be dead."""
        while not self._closed and reads > 0:
            try:
                more = self._receive()
            except (BlockingIOError, InterruptedError):
                return
            except (ConnectionResetError, BrokenPipeError):
                self._finish(None)  # the peer died with something of ours unread: an end like any other
                return
            except Exception as error:  # whatever it is: nobody above this callback could do anything about it
                self._finish(error)
                return
            if not more:
                self._finish(None)
                return
            reads -= 1

    def _receive(self) -> bool:
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
        chunk, ancillary, flags, _ = self._socket.recvmsg(_CHUNK_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if flags & socket.MSG_CTRUNC:
            Descriptors(fds).close()
            self._received.append(Descriptors(lost=True))
        elif fds:
            self._received.append(Descriptors(fds))
        if not chunk:
            return False
        self._incoming += chunk
        self._parse()
        # A frame's descriptors come with its first byte, so at most those of one unfinished frame are waiting.
        if len(self._received) > 1:
            raise ControlError("descriptors came twice for one control frame; they come with its first byte")
        return True

    def _parse(self) -> None:
        while not self._closed and len(self._incoming) >= HEADER.size:
            length, descriptors = decode_header(bytes(self._incoming[: HEADER.size]))
            end = HEADER.size + length
            if len(self._incoming) < end:
                return
            message = decode(memoryview(self._incoming)[HEADER.size : end].tobytes())
            del self._incoming[:end]
            fds = self._received.popleft() if descriptors and self._received else Descriptors()
            try:
                if not fds.lost and len(fds) != descriptors:
                    raise ControlError(f"a control frame announces {descriptors} descriptors, {len(fds)} came")
                if not self._incoming and self._received:
                    raise ControlError("descriptors came that no control frame speaks of")
                self._on_message(message, fds)
            except BaseException:
                fds.close()  # the error's traceback would keep them open for as long as it is remembered
                raise

    def _finish(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            self._on_end(error)

    def close(self) -> None:
        """Stop watching, close the socket and every descriptor not yet sent or taken. `on_end` is not called."""
        if self._closed:
            return
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self.leave()

    def leave(self) -> None:
        """As `close`, and all of it that a child of fork may do: the loop still watches the parent's socket."""
        self._closed = True
        self._socket.close()
        for _, fds in self._outgoing:
            for fd in fds:
                os.close(fd)
        self._outgoing.clear()
        for received in self._received:
            received.close()
        self._received.clear()


def _duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    """All of them, or none and the error."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except BaseException:
        for fd in made:
            os.close(fd)
        raise
    return tuple(made)
