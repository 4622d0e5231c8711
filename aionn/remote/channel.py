"""A Unix socket that carries control frames and descriptors. The loop's callbacks drive it, so it needs no task.

Sending never waits. A frame goes out at once, or is kept until the socket takes it. Frames stay whole and in order, so a cancelled
caller cannot leave half a frame behind. Descriptors leave with the first byte of their frame. Received descriptors belong to the
`Descriptors` that come with the message: a taken descriptor belongs to its taker, the rest are closed. The kernel drops descriptors
where this process has too many open files. Then the message still arrives, and taking one of its descriptors fails.

Three things end the channel: a peer that breaks the protocol, a socket that fails, and an error of the code that handles a message.
In a callback of the loop such an error would be printed and forgotten, and a caller would wait without end.

Invariants
    The loop watches the socket for reading from construction until the end, and for writing only while `_outgoing` holds something.
    `on_end` is called exactly once, and nothing else is called after it.
    One read brings the descriptors of one frame at most, and all of them, because a read ends behind the data that the descriptors
    came with (unix(7)). So `_received` holds one item per frame that has descriptors and has not been parsed yet, in order.
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

from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import ErrorStatus
from aionn.memory.descriptors import check_description, check_reserved
from aionn.memory.region import Access, MappingError, Region
from aionn.remote.calls import Fd, LentMemory
from aionn.remote.control import HEADER, MAX_DESCRIPTORS, ControlError, Message, decode, decode_header, encode, no_fd
from aionn.tasks import leave_in_child

_CHUNK_BYTES = 256 * 1024
_READS_PER_WAKE = 16
"""Reads in one callback. After them, the loop's other work has its turn."""

_LAST_READS = 4096
"""Reads from a peer that is dead. No socket holds more, so only another process that shares the peer's end could go on."""

_ENDED = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN}
"""Errors of sending when the peer has gone. The reading side reports that end."""


class Descriptors:
    """Descriptors that came with one message, which names them in order. Those that are not taken are closed.

    Attributes:
        lost: the kernel has dropped the descriptors, because this process has too many open files.
    """

    def __init__(self, fds: Sequence[int] = (), *, lost: bool = False) -> None:
        self._open = set(fds)
        self._unnamed = iter(fds)
        self.lost = lost

    def __len__(self) -> int:
        return len(self._open)

    def next_fd(self) -> Fd:
        """Return the descriptor for the next field of the message; see `control.decode`."""
        for fd in self._unnamed:
            return Fd(fd)
        return Fd(-1) if self.lost else no_fd()

    def take(self, fd: Fd) -> int:
        """Return a descriptor of the message, which the caller owns from now on. The errors are those of `check_arrived`."""
        self.check_arrived()
        self._open.remove(fd)
        return int(fd)

    def check_arrived(self) -> None:
        """Return if the kernel has delivered the descriptors.

        Raises:
            ExecutionError: the kernel has dropped them (RESOURCE_EXHAUSTED_TRANSIENT).
        """
        if self.lost:
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ExecutionError(
                f"a message lost its descriptors, because process {os.getpid()} has too many open files (RLIMIT_NOFILE is {files}); "
                "raise the limit (ulimit -n), or have fewer calls in flight",
                status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
            )

    def attach(self, lent: LentMemory, access: Access | None = None, *, reserved: bool = False) -> Region:
        """Map a memory of the message, read-only where its description says so.

        Args:
            reserved: refuse memory that its sender has not reserved. So a driver cannot make its app pay for memory.

        Raises:
            CallerError: the description can never be right (INVALID_ARGUMENT), or the memory is not reserved.
            MappingError: the descriptor does not fit the description, or cannot be mapped (GENERAL_FAILURE).
            MemoryAllocationError: as `Region.attach`.
        """
        description = lent.description
        if access is None:
            access = Access.WRITE if description.writable else Access.READ
        check_description(description)
        if reserved:
            check_reserved(lent.fd, description)
        try:
            return Region.attach(self.take(lent.fd), description, access)
        except CallerError as error:
            raise MappingError(str(error)) from error

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def __del__(self) -> None:
        self.close()


NO_DESCRIPTORS = Descriptors()
"""Of all messages that come without any."""


class ControlSocket:
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

    def post(self, message: Message) -> None:
        """Send one message. The caller keeps owning its descriptors, and may close them when this returns.

        Raises:
            CallerError: the message is larger than a frame may be.
            OSError: the descriptors cannot be sent (too many open files, here or on their way). Nothing was sent.
        """
        body, fds = encode(message)
        if self._closed:
            return
        frame = memoryview(body)
        if self._outgoing:
            self._outgoing.append((frame, duplicates(fds)))
            return
        sent = self._send(frame, fds)
        if sent is None or sent == len(frame):
            return
        # The descriptors have left with the first byte, if any byte has left.
        kept = duplicates(fds) if sent == 0 else ()
        self._outgoing.append((frame[sent:], kept))
        self._loop.add_writer(self._fd, self._writable)

    def _send(self, frame: memoryview, fds: Sequence[int]) -> int | None:
        """Return how many bytes the socket took, or None if the peer has gone (the reading side reports that).

        Raises:
            OSError: the socket took no byte for another reason.
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
        """Take in everything that has arrived, up to the peer's end. Call it without `reads` only when the peer is dead."""
        while not self._closed and reads > 0:
            try:
                more = self._receive()
            except (BlockingIOError, InterruptedError):
                return
            except (ConnectionResetError, BrokenPipeError):
                self._finish(None)  # the peer died and left a message of ours unread, which is an end like any other
                return
            except Exception as error:  # the loop, which called this callback, could do nothing about any of them
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
            raise ControlError("the peer sent descriptors twice for one frame; they come with the frame's first byte")
        return True

    def _parse(self) -> None:
        while not self._closed and len(self._incoming) >= HEADER.size:
            length, descriptors = decode_header(bytes(self._incoming[: HEADER.size]))
            end = HEADER.size + length
            if len(self._incoming) < end:
                return
            body = memoryview(self._incoming)[HEADER.size : end].tobytes()
            del self._incoming[:end]
            fds = self._received.popleft() if descriptors and self._received else NO_DESCRIPTORS
            try:
                if descriptors and not fds.lost and len(fds) != descriptors:
                    raise ControlError(f"the peer's frame announces {descriptors} descriptors, but {len(fds)} came")
                if not self._incoming and self._received:
                    raise ControlError("the peer sent descriptors that its frames do not announce")
                self._on_message(decode(body, fds.next_fd), fds)
            except BaseException:
                fds.close()  # the error's traceback would keep them open as long as the error lives
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
        """Close what a child of fork may close. The loop still watches the parent's socket, so the child must not unregister it."""
        self._closed = True
        self._socket.close()
        for _, fds in self._outgoing:
            for fd in fds:
                os.close(fd)
        self._outgoing.clear()
        for received in self._received:
            received.close()
        self._received.clear()


def duplicates(fds: Sequence[int]) -> tuple[int, ...]:
    """Duplicate all descriptors. If one cannot be duplicated, close the duplicates and raise."""
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except BaseException:
        for fd in made:
            os.close(fd)
        raise
    return tuple(made)
