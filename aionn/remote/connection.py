"""Calls over a Unix socket, both ways. Each call ends with its answer or with the connection.

Invariants
    An id is in `_calls` from just before its frame is posted until the peer answers or the connection ends. That holds also when the
    caller has been cancelled or is late. `settled` runs then, and only then, so memory that the peer may still touch stays pinned.
    After `end` no caller waits. Every call has its error, and each has a separate copy of it.
    An answer has the type that was asked for, or the peer has broken the protocol.

A `Channel` carries control frames and descriptors over the socket. The loop's callbacks drive it, so it needs no task.

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
import errno
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from aionn import trace
from aionn.errors import AionnError, CallerError, DeadlineError, ExecutionError, again
from aionn.fmq.thread_waits import Loop, ThreadWaits
from aionn.hal.types import ErrorStatus
from aionn.loopless import Answer, leave_in_child, running_loop
from aionn.memory.descriptors import check_description, check_reserved, check_sealed
from aionn.memory.region import Access, MappingError, Region
from aionn.remote.calls import Fd, HalCall, LentMemory
from aionn.remote.control import (
    HEADER,
    MAX_BODY_BYTES,
    MAX_DESCRIPTORS,
    Attach,
    CallMessage,
    Cancel,
    ControlError,
    Failed,
    Message,
    Ready,
    Refused,
    Reply,
    ServiceReady,
    decode,
    decode_header,
    encode,
    error_of,
    failure_of,
    no_fd,
)

_CHUNK_BYTES = 256 * 1024
_READS_PER_WAKE = 16
"""Reads in one callback. After them, the loop's other work has its turn."""

_MOST_UNREAD = 256
"""So many frames wait for a peer that is one of many. While it does not read them, nothing more of it is taken in."""

_LAST_READS = 4096
"""Reads from a peer that is dead. No socket holds more, so only another process that shares the peer's end could go on."""

_ENDED = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN}
"""Errors of sending when the peer has gone. The reading side reports that end."""


class Descriptors:
    """Descriptors that came with one message, which names them in order. Those that are not taken are closed.

    Attributes:
        lost: the kernel has dropped the descriptors, because this process has too many open files.
        sealed: memory among them must be sealed, because the peer is one of many.
    """

    def __init__(self, fds: Sequence[int] = (), *, lost: bool = False, sealed: bool = False) -> None:
        self.sealed = sealed
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

    def take_socket(self, fd: Fd) -> socket.socket:
        """As `take`, for a Unix stream socket. Raises ControlError if it is something else."""
        self.check_arrived()
        try:
            taken = socket.socket(fileno=fd)
        except OSError as error:
            raise ControlError(f"the peer sent no socket ({error.strerror}) where a Unix stream socket was expected") from error
        self._open.remove(fd)
        if (taken.family, taken.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
            taken.close()
            raise ControlError("the peer sent a socket of another kind where a Unix stream socket was expected")
        return taken

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
        if self.sealed:
            self.check_arrived()
            check_sealed(lent.fd, description)
        try:
            return Region.attach(self.take(lent.fd), description, access)
        except CallerError as error:
            raise MappingError(str(error)) from error

    def close(self) -> None:
        while self._open:
            with suppress(OSError):  # the peer's file system may have failed; the descriptor is closed all the same
                os.close(self._open.pop())

    def __del__(self) -> None:
        self.close()


NO_DESCRIPTORS = Descriptors()
"""Of all messages that come without any."""


class PeerLimits(NamedTuple):
    """What a peer may send that is one of many, and must not harm the others. So its memory must be sealed, too.

    Attributes:
        messages_per_second: so many are taken in within a second. Further ones wait in the socket. 0: it is the only peer.
        message_bytes: of its largest message.
        sent_bytes: of the largest message that this end sends, because the peer takes in no larger one.
    """

    messages_per_second: int = 0
    message_bytes: int = MAX_BODY_BYTES
    sent_bytes: int = MAX_BODY_BYTES


ONLY_PEER = PeerLimits()


class ControlSocket:
    """One end of the control socket. Takes over `sock`."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Message, Descriptors], None],
        on_end: Callable[[Exception | None], None],
        loop: Loop | None = None,
        limits: PeerLimits = ONLY_PEER,
    ) -> None:
        self._limits, self._second, self._taken_in, self._held_back = limits, 0.0, 0, False
        self._loop = loop or running_loop()
        sock.setblocking(False)
        self._socket = sock
        self._fd = sock.fileno()
        self._on_message = on_message
        self._on_end = on_end
        self._incoming = bytearray()
        self._received: deque[Descriptors] = deque()
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._closed = False
        self._sending = threading.RLock()
        self._posting = False
        self._loop.add_reader(self._fd, self._readable)
        leave_in_child(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def post(self, message: Message) -> None:
        """Send one message, from any thread. The caller keeps owning its descriptors, and may close them when this returns.

        Raises:
            CallerError: the message is larger than a frame may be.
            OSError: the descriptors cannot be sent (too many open files, here or on their way). Nothing was sent.
        """
        body, fds = encode(message, self._limits.sent_bytes)
        frame = memoryview(body)
        with self._sending:
            # The handler of a signal may post while its thread is in here. Its frame waits, or it would cut this one in two.
            nested, self._posting = self._posting, True
            try:
                if self._closed:
                    return
                if self._outgoing or nested:
                    self._outgoing.append((frame, duplicates(fds)))
                    return
                sent = self._send(frame, fds)
                if sent is not None and sent < len(frame):
                    # The descriptors have left with the first byte, if any byte has left.
                    self._outgoing.appendleft((frame[sent:], () if sent else duplicates(fds)))
            finally:
                self._posting = nested
            if not self._outgoing:
                return
        self._loop.call_soon_threadsafe(self._watch_writable)

    def _send(self, frame: memoryview, fds: Sequence[int]) -> int | None:
        """Return how many bytes the socket took, or None if the peer has gone (the reading side reports that).

        Raises:
            OSError: the socket took no byte for another reason.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            return self._socket.sendmsg([frame], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if error.errno in _ENDED or self._closed:  # a signal's handler may have closed it
                return None
            raise

    def _watch_writable(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        with self._sending:
            error = self._send_outgoing()
        if error is not None:
            self._ended_by_peer(error)  # the frames behind this one would arrive without it
        elif not self._outgoing:
            self._loop.remove_writer(self._fd)

    def _send_outgoing(self) -> OSError | None:
        while self._outgoing:
            frame, fds = self._outgoing[0]
            try:
                sent = self._send(frame, fds)
            except OSError as error:
                return error
            if sent == 0:
                return None
            for fd in fds:
                os.close(fd)
            if sent is None or sent == len(frame):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (frame[sent:], ())
        return None

    def _readable(self) -> None:
        self.drain(_READS_PER_WAKE)

    def drain(self, reads: int = _LAST_READS) -> None:
        """Take in everything that has arrived, up to the peer's end. Call it without `reads` only when the peer is dead."""
        while not self._closed and not self._held_back and reads > 0:
            try:
                more = self._receive()
            except (BlockingIOError, InterruptedError):
                return
            except (ConnectionResetError, BrokenPipeError):
                self._ended_by_peer(None)  # the peer died and left a message of ours unread, which is an end like any other
                return
            except Exception as error:
                if isinstance(self._loop, ThreadWaits) and not isinstance(error, AionnError) and getattr(error, "errno", None) is None:
                    raise  # the handler of a signal has raised it, so the thread's call must get it
                self._ended_by_peer(error)  # a loop, which called this callback, could do nothing about it
                return
            if not more:
                self._ended_by_peer(None)
                return
            reads -= 1

    def _receive(self) -> bool:
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
        # Another process may have the socket, too, and let its reads wait.
        chunk, ancillary, flags, _ = self._socket.recvmsg(_CHUNK_BYTES, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if flags & socket.MSG_CTRUNC:
            Descriptors(fds).close()
            self._received.append(Descriptors(lost=True))
        elif fds:
            self._received.append(Descriptors(fds, sealed=self._limits.messages_per_second > 0))
        if not chunk:
            return False
        self._incoming += chunk
        self._parse()
        # A frame's descriptors come with its first byte, so at most those of one unfinished frame are waiting.
        if len(self._received) > 1:
            raise ControlError("the peer sent descriptors twice for one frame; they come with the frame's first byte")
        return True

    def _parse(self) -> None:
        while not self._closed and not self._held_back and len(self._incoming) >= HEADER.size:
            length, descriptors = decode_header(bytes(self._incoming[: HEADER.size]), self._limits.message_bytes)
            end = HEADER.size + length
            if len(self._incoming) < end:
                return
            body = memoryview(self._incoming)[HEADER.size : end].tobytes()
            del self._incoming[:end]
            if self._limits.messages_per_second:
                self._count()
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

    def _count(self) -> None:
        """Count a message, and read no more in this second after the last one that is allowed in it, or while the peer reads nothing."""
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._second, self._taken_in = now, 0
        self._taken_in += 1
        if self._taken_in == self._limits.messages_per_second or len(self._outgoing) >= _MOST_UNREAD:
            self._held_back = True
            self._loop.remove_reader(self._fd)
            self._loop.call_later(self._second + 1.0 - now, self._read_again)

    def _read_again(self) -> None:
        if self._closed:
            return
        if len(self._outgoing) >= _MOST_UNREAD:
            self._loop.call_later(1.0, self._read_again)
            return
        self._held_back = False
        self._loop.add_reader(self._fd, self._readable)
        try:
            self._parse()
        except Exception as error:  # as in `drain`
            self._ended_by_peer(error)

    def _ended_by_peer(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            self._on_end(error)

    def close(self) -> None:
        """Stop watching, close the socket and every descriptor not yet sent or taken. `on_end` is not called."""
        if self._closed:
            return
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        with self._sending:
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


A = TypeVar("A")
CallHandler = Callable[[int, HalCall[Any], Descriptors], None]
Settled = Callable[[A | BaseException], None]
"""Called once with the answer to a call, or with the error that came in its place."""


class _Calling(msgspec.Struct, Generic[A]):
    """A call that the peer has not answered yet. The fields are as for `Connection.call`."""

    kind: type[HalCall[A]]
    answer: Answer[tuple[A, Descriptors]]
    settled: Settled[A] | None = None
    unwanted: Callable[[A], None] | None = None


class Connection:
    """One end of a conversation between app and driver. Takes over `sock`.

    Args:
        on_call: called with each call of the peer. It answers by `reply`, now or later, and owns the descriptors.
        on_end: called when the socket has ended, with the error if the peer broke the protocol. The owner then calls `end`.
        on_greeting: called with `Ready`, `Refused` or `ServiceReady`. It owns the descriptors.
        on_cancel: called with the id of a call for which the peer has stopped waiting.
        on_attach: called with a message that brings one more client. It owns the descriptors.
        loop: what it waits by, if that is not the running loop: a thread's waits.
        limits: what the peer may send.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_call: CallHandler,
        on_end: Callable[[Exception | None], None],
        on_greeting: Callable[[Ready | Refused | ServiceReady, Descriptors], None] | None = None,
        on_cancel: Callable[[int], None] | None = None,
        on_attach: Callable[[Attach, Descriptors], None] | None = None,
        loop: Loop | None = None,
        limits: PeerLimits = ONLY_PEER,
    ) -> None:
        self._loop = loop or running_loop()
        self._calls: dict[int, _Calling[Any]] = {}
        self._last_id = self._last_heard = 0
        self._ended_by: BaseException | None = None
        self._when_ended: dict[object, Callable[[BaseException], None]] = {}
        self._on_call = on_call
        self._on_greeting = on_greeting
        self._on_cancel = on_cancel
        self._on_attach = on_attach
        self._channel = ControlSocket(sock, self._message, on_end, self._loop, limits)
        leave_in_child(self)

    @property
    def ended_by(self) -> BaseException | None:
        """Why the conversation is over, or None while it goes on."""
        return self._ended_by

    @property
    def calls_in_flight(self) -> int:
        """How many calls wait for the peer's answer."""
        return len(self._calls)

    async def call(
        self,
        body: HalCall[A],
        settled: Settled[A] | None = None,
        unwanted: Callable[[A], None] | None = None,
        deadline_ns: int | None = None,
    ) -> tuple[A, Descriptors]:
        """Ask the peer and wait for its answer. Returns the answer and its descriptors.

        Args:
            settled: called once, when the peer can no longer touch the memory that the call lent it. It gets the answer, or the error
                that the peer answered with, or the reason why none comes. A caller that leaves earlier changes nothing in that.
            unwanted: called with an answer that comes after its caller has left, to give back what the answer brings.
            deadline_ns: when this wait ends, in CLOCK_MONOTONIC. The peer is asked to stop then, and lent memory stays lent.

        Raises:
            DeadlineError: the answer did not come by the deadline.
            AionnError: the error that the peer answered with, or the reason why the connection ended.
        """
        calling = _Calling(type(body), Answer(self._loop), settled, unwanted)
        call_id = self._begin(calling, body)
        late = None
        if deadline_ns is not None:
            late = self._loop.call_later(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9), self._late, call_id)
        try:
            return await calling.answer.wait()
        except BaseException:  # the caller was cancelled, is late, or was interrupted by a signal
            if call_id in self._calls:
                calling.answer.cancel()
                self._channel.post(Cancel(call_id))
            elif (answered := calling.answer.result) is not None:
                _close_unwanted(calling, *answered)  # cancelled between the answer and the resumption
            raise
        finally:
            del calling  # as in `Answer.wait`
            if late is not None:
                late.cancel()

    def begin(self, body: HalCall[A], settled: Settled[A]) -> Callable[[], None]:
        """Ask the peer without waiting. Returns what asks the peer to stop. `settled` is as for `call`, and must not raise.

        Raises:
            AionnError: nothing was sent, and `settled` has been called with the error.
        """
        calling = _Calling(type(body), Answer(self._loop), settled)
        calling.answer.cancel()
        call_id = self._begin(calling, body)

        def ask_to_stop() -> None:
            if call_id in self._calls:
                self._channel.post(Cancel(call_id))

        return ask_to_stop

    def _begin(self, calling: _Calling[A], body: HalCall[A]) -> int:
        """Send a call. Returns its number."""
        if self._ended_by is not None:
            error = again(self._ended_by)
            if calling.settled is not None:
                calling.settled(error)
            raise error
        if trace.active:
            trace.count("control.call", call=type(body).__name__)
        call_id = self._last_id = self._last_id + 1
        self._calls[call_id] = calling
        try:
            self._channel.post(CallMessage(call_id, body))
        except OSError as error:
            failure = ExecutionError(
                f"the descriptors of a call cannot be sent ({error.strerror}); raise the limit of open files (ulimit -n)",
                status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
            )
            self._settle(call_id, failure)
            raise failure from error
        except BaseException as error:
            self._settle(call_id, error)
            raise
        return call_id

    def _late(self, call_id: int) -> None:
        """End the wait for a call at its deadline. A later answer goes to `settled` and `unwanted`."""
        calling = self._calls.get(call_id)
        if calling is not None:
            calling.answer.fail(DeadlineError("the driver's answer did not come by the deadline; the driver may still be busy with it"))

    def post(self, body: HalCall[Any]) -> None:
        """Ask the peer without waiting, to give something back. The answer is dropped when it comes."""
        if self._ended_by is None:
            self._last_id += 1
            self._calls[self._last_id] = calling = _Calling(type(body), Answer(self._loop))
            calling.answer.cancel()
            self._channel.post(CallMessage(self._last_id, body))

    def reply(self, call_id: int, answer: object) -> None:
        """Answer a call of the peer, with what the table says. The caller keeps owning the descriptors.

        Raises:
            CallerError, OSError: the answer cannot be sent, and nothing was sent. `reply_failure` can always be sent.
        """
        self._channel.post(Reply(call_id, answer))

    def reply_failure(self, call_id: int, error: BaseException) -> None:
        """Answer a call of the peer with an error."""
        self._channel.post(Failed(call_id, failure_of(error)))

    def greet(self, greeting: Ready | Refused | ServiceReady) -> None:
        """Send the first frame of a driver or a service. The caller keeps owning the descriptors."""
        self._channel.post(greeting)

    def attach(self, prepared: int, guest: int = 0) -> socket.socket:
        """Give the driver one more client, from any thread. Returns the client's socket, over which the driver greets it.

        The driver closes the socket if it does not have the prepared model of that number any more. The arguments are as for `Attach`.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._channel.post(Attach(Fd(theirs.fileno()), prepared, guest))
        except BaseException:
            ours.close()
            raise
        return ours

    def when_ended(self, key: object, callback: Callable[[BaseException], None]) -> None:
        """Call `callback` at `end`, or now if the connection has ended. `cancel_when_ended(key)` cancels that."""
        if self._ended_by is not None:
            callback(self._ended_by)
        else:
            self._when_ended[key] = callback

    def cancel_when_ended(self, key: object) -> None:
        """Cancel `when_ended` for `key`. Does nothing for an unknown key."""
        self._when_ended.pop(key, None)

    def drain(self) -> None:
        """Take in everything that the peer sent before it died."""
        self._channel.drain()

    def end(self, error: BaseException) -> None:
        """Close the socket and settle every caller with `error`. Idempotent."""
        if self._ended_by is not None:
            return
        self._ended_by = error
        callbacks, self._when_ended = self._when_ended, {}
        with ExitStack() as stack:  # a callback that fails does not keep the others from being called
            # The stack closes the channel last. A driver that sees the end answers the requests in its bursts with other errors.
            stack.callback(self._channel.close)
            for callback in callbacks.values():
                stack.callback(callback, error)
            for call_id, calling in list(self._calls.items()):
                calling.answer.fail(own := again(error))
                stack.callback(self._settle, call_id, own)

    def leave(self) -> None:
        """Make every later call fail, in a child of fork. The calls in flight are the parent's, and the child settles none of them."""
        self._ended_by = self._ended_by or CallerError("this connection belongs to the parent process; open a runtime in this process")

    def _settle(self, call_id: int, answer: object) -> None:
        calling = self._calls.pop(call_id, None)
        if calling is not None and calling.settled is not None:
            calling.settled(answer)

    def _message(self, message: Message, descriptors: Descriptors) -> None:
        match message:
            case Reply(id=call_id) | Failed(id=call_id):
                asked = self._calls.get(call_id)
                if asked is None:
                    raise ControlError(f"the peer answered call {call_id}, which does not exist or has been answered")
                answer: Any
                if isinstance(message, Failed):
                    answer = error_of(message.failure)
                else:
                    answer = decode(message.answer, descriptors.next_fd, asked.kind)
                try:
                    self._settle(call_id, answer)
                finally:  # also where `settled` raises: a caller must not wait for an answer that has come
                    if isinstance(message, Failed):
                        descriptors.close()
                        asked.answer.fail(answer)
                    elif asked.answer.done:
                        _close_unwanted(asked, answer, descriptors)
                    else:
                        asked.answer.set((answer, descriptors))
            case CallMessage(id=call_id, body=body):
                if call_id <= self._last_heard:
                    raise ControlError(f"the peer has numbered a call {call_id} after {self._last_heard}; each number is larger")
                self._last_heard = call_id
                try:
                    self._on_call(call_id, body, descriptors)
                except AionnError as error:
                    descriptors.close()
                    self.reply_failure(call_id, error)
            case Cancel(id=call_id) if self._on_cancel is not None:
                self._on_cancel(call_id)
            case Attach():
                if self._on_attach is None:
                    raise ControlError("the driver sent a client, which only an app does")
                self._on_attach(message, descriptors)
            case Ready() | Refused() | ServiceReady():
                greeted, self._on_greeting = self._on_greeting, None
                if greeted is None:
                    raise ControlError("it sent a greeting, which only a driver or a service sends, and once")
                greeted(message, descriptors)


def _close_unwanted(calling: _Calling[A], answer: A, descriptors: Descriptors) -> None:
    descriptors.close()
    if calling.unwanted is not None:
        calling.unwanted(answer)
