"""The socket below the calls: a hostile or dying peer ends it, and nothing is left open."""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import ErrorStatus, MemoryDescription, MemoryKind
from aionn.remote.calls import CopyFrom, Fd, LentMemory
from aionn.remote.connection import ControlSocket, Descriptors
from aionn.remote.control import (
    HEADER,
    MAX_BODY_BYTES,
    MAX_DESCRIPTORS,
    CallMessage,
    Cancel,
    ControlError,
    Failed,
    Message,
    Reply,
    decode,
    encode,
    error_of,
    failure_of,
)
from tests.descriptors import free_descriptors
from tests.remote.frames import frame

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

FRAME = frame(Reply(1, None))
NAMING = CallMessage(1, CopyFrom(1, LentMemory(MemoryDescription(MemoryKind.ASHMEM, 1), Fd(0)), ()))


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class Ear:
    """A channel and what it heard."""

    def __init__(self, on_message: Callable[[Message, Descriptors], None] | None = None) -> None:
        ours, self.peer = socket.socketpair()
        self.peer.setblocking(False)
        self.messages: list[Message] = []
        self.came: list[Descriptors] = []
        self.ends: list[Exception | None] = []
        self.channel = ControlSocket(ours, on_message or self._heard, self.ends.append)

    def _heard(self, message: Message, descriptors: Descriptors) -> None:
        self.messages.append(message)
        self.came.append(descriptors)

    def send(self, data: bytes, fds: list[int] | None = None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.peer.sendmsg([data], rights)

    def close(self) -> None:
        self.channel.close()
        self.peer.close()
        for descriptors in self.came:
            descriptors.close()


async def test_a_message_and_its_descriptors_arrive_and_what_is_not_taken_is_closed() -> None:
    before = open_fds()
    ear = Ear()
    reader, writer = os.pipe()
    ear.send(frame(Reply(7, None), 2), [reader, writer])
    ear.channel.drain()
    assert [message.id for message in ear.messages if isinstance(message, Reply)] == [7]
    taken = ear.came[0].take(ear.came[0].next_fd())
    assert not os.get_inheritable(taken)
    for fd in (taken, reader, writer):
        os.close(fd)
    ear.close()
    assert open_fds() == before


@pytest.mark.parametrize(
    ("data", "fds"),
    [
        (HEADER.pack(MAX_BODY_BYTES + 1, 0, 0), 0),
        (HEADER.pack(1, MAX_DESCRIPTORS + 1, 0), 0),
        (HEADER.pack(1, 0, 1) + b"x", 0),
        (HEADER.pack(len(FRAME) - HEADER.size, 1, 0) + FRAME[HEADER.size :], 0),
        (FRAME, 1),
        (frame(NAMING, 0), 0),
        (HEADER.pack(4, 0, 0) + b"\xdd\xff\xff\xff", 0),
        (HEADER.pack(5, 2, 0) + b"\xc1\xc1\xc1\xc1\xc1", 2),
        (HEADER.pack(2000, 0, 0) + b"\x91" * 2000, 0),
    ],
    ids=[
        "too long",
        "too many descriptors",
        "bad zero",
        "missing descriptor",
        "stray descriptor",
        "named descriptor",
        "cut array",
        "no message",
        "too deep",
    ],
)
async def test_a_frame_that_is_none_ends_the_channel_with_a_reason_and_leaves_nothing_open(data: bytes, fds: int) -> None:
    before = open_fds()
    ear = Ear()
    sent = [os.open("/dev/null", os.O_RDONLY) for _ in range(fds)]
    ear.send(data, sent)
    for fd in sent:
        os.close(fd)
    ear.channel.drain()
    (end,) = ear.ends
    assert isinstance(end, ControlError)
    assert str(end)
    assert ear.channel.closed
    ear.peer.close()
    assert open_fds() == before  # while `end` and its traceback are remembered
    ear.channel.post(Reply(1, None))  # after the end: no peer hears it, and it is not an error


async def test_the_longest_message_is_sent_and_a_longer_one_is_refused() -> None:
    whole, _ = encode(Reply(1, None))
    most_bytes = len(whole) - HEADER.size
    assert encode(Reply(1, None), most_bytes) == (whole, [])
    with pytest.raises(CallerError, match=f"needs a message of {most_bytes + 1} bytes, but at most"):
        encode(Reply(1, "a"), most_bytes)


async def test_descriptors_piled_onto_one_unfinished_frame_end_the_channel() -> None:
    before = open_fds()
    ear = Ear()
    null = os.open("/dev/null", os.O_RDONLY)
    for byte in HEADER.pack(100, 0, 0)[:3]:
        ear.send(bytes([byte]), [null] * 200)
    ear.channel.drain()
    assert isinstance(ear.ends[0], ControlError)
    os.close(null)
    ear.close()
    assert open_fds() == before


async def test_an_error_of_the_one_who_handles_a_message_ends_the_channel() -> None:
    def clumsy(message: Message, descriptors: Descriptors) -> None:
        raise ZeroDivisionError

    ear = Ear(clumsy)
    ear.send(FRAME)
    ear.channel.drain()
    assert isinstance(ear.ends[0], ZeroDivisionError)
    ear.close()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(st.binary(max_size=64), st.just(FRAME), st.binary(max_size=40).map(lambda b: HEADER.pack(len(b), 0, 0) + b)), max_size=6
    )
)
async def test_no_bytes_whatever_raise_in_the_loop_or_end_it_twice(pieces: list[bytes]) -> None:
    ear = Ear()
    for piece in pieces:
        if piece:
            ear.send(piece)
    ear.peer.close()
    ear.channel.drain()
    assert len(ear.ends) == 1
    assert all(isinstance(message, Reply) and message.id == 1 for message in ear.messages[: pieces.index(FRAME) if FRAME in pieces else 0])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(body: bytes) -> None:
    try:
        decode(body)
    except ControlError as error:
        assert str(error)


async def test_frames_that_the_socket_does_not_take_go_out_later_whole_and_in_order() -> None:
    before = open_fds()
    ear = Ear()
    reader, writer = os.pipe()
    big = "x" * 300_000
    for number in range(20):
        ear.channel.post(Reply(number, (big, Fd(reader))))
    os.close(reader)
    os.close(writer)
    heard: list[Message] = []
    counts: list[int] = []
    done = anyio.Event()

    def on_message(message: Message, descriptors: Descriptors) -> None:
        heard.append(message)
        counts.append(len(descriptors))
        descriptors.close()
        if len(heard) == 20:
            done.set()

    other = ControlSocket(ear.peer, on_message, lambda error: None)
    with anyio.fail_after(30):
        await done.wait()
    assert [message.id for message in heard if isinstance(message, Reply)] == list(range(20))
    assert counts == [1] * 20
    other.close()
    ear.close()
    assert open_fds() == before


async def test_a_full_socket_that_ends_closes_what_was_kept_for_it() -> None:
    before = open_fds()
    ear = Ear()
    null = os.open("/dev/null", os.O_RDONLY)
    for _ in range(2000):
        ear.channel.post(CallMessage(1, CopyFrom(1, LentMemory(MemoryDescription(MemoryKind.ASHMEM, 1), Fd(null)), ())))
    assert open_fds() > before + 10
    os.close(null)
    ear.close()
    assert open_fds() == before


async def test_descriptors_lost_for_want_of_room_fail_their_own_message_alone() -> None:
    before = open_fds()
    ear = Ear()
    null = os.open("/dev/null", os.O_RDONLY)
    lost = frame(Reply(2, None), 3)
    ear.send(frame(Reply(1, None), 1), [null])
    ear.send(lost[:5], [null] * 3)  # a header in two pieces
    with free_descriptors(2):  # room for the one of the first message, and for one of three of the second
        ear.channel.drain()
    ear.send(lost[5:])
    ear.send(frame(Reply(3, None), 2), [null] * 2)
    ear.channel.drain()
    os.close(null)
    assert ear.ends == []
    assert [message.id for message in ear.messages if isinstance(message, Reply)] == [1, 2, 3]
    assert [descriptors.lost for descriptors in ear.came] == [False, True, False]
    with pytest.raises(ExecutionError, match="too many open files") as caught:
        ear.came[1].take(ear.came[1].next_fd())
    assert caught.value.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert [len(descriptors) for descriptors in ear.came] == [1, 0, 2]
    ear.close()
    assert open_fds() == before


@given(st.text(alphabet=st.characters(codec=None), max_size=50), st.text(max_size=5000))
def test_every_error_crosses_the_wall_whatever_its_text(odd: str, long: str) -> None:
    for error in (RuntimeError(odd), CallerError(odd + long), ExecutionError(long, status=ErrorStatus.GENERAL_FAILURE)):
        message = decode(frame(Failed(1, failure_of(error)))[HEADER.size :])
        assert isinstance(message, Failed)
        assert str(error_of(message.failure))


class InterruptedSocket(socket.socket):
    """Takes half of the first frame. Then the handler of a signal runs in the sending thread."""

    handler: Callable[[], None] | None = None

    def sendmsg(self, buffers: Any, *how: Any) -> int:
        handler, self.handler = self.handler, None
        if handler is None:
            return super().sendmsg(buffers, *how)
        (frame,) = buffers
        sent = super().sendmsg([frame[: len(frame) // 2]], *how)
        handler()
        return sent


async def test_a_signals_handler_that_posts_while_its_thread_does_cuts_no_frame_in_two() -> None:
    ours, theirs = socket.socketpair()
    interrupted = InterruptedSocket(fileno=ours.detach())
    heard: list[int] = []
    all_came = anyio.Event()

    def hear(message: Message, _: Descriptors) -> None:
        assert isinstance(message, Reply)
        heard.append(message.id)
        if len(heard) == 3:
            all_came.set()

    ends: list[Exception | None] = []
    sender = ControlSocket(interrupted, hear, ends.append)
    receiver = ControlSocket(theirs, hear, ends.append)
    interrupted.handler = lambda: sender.post(Reply(2, None))
    sender.post(Reply(1, None))
    sender.post(Reply(3, None))
    with anyio.fail_after(20):
        await all_came.wait()
    assert heard == [1, 2, 3]
    assert ends == []
    sender.close()
    receiver.close()


async def test_a_socket_whose_other_owner_lets_reads_wait_stops_no_loop() -> None:
    ours, peer = socket.socketpair()
    kept, heard, rescued = ours.dup(), anyio.Event(), threading.Event()
    channel = ControlSocket(ours, lambda message, descriptors: heard.set(), lambda error: None)
    kept.setblocking(True)  # it is the same open file
    message = encode(Cancel(1))[0]

    def end() -> None:
        rescued.set()
        peer.shutdown(socket.SHUT_RDWR)

    rescue = threading.Timer(10, end)  # for a loop that waits in the read
    rescue.start()
    peer.sendall(message)
    await heard.wait()
    await anyio.lowlevel.checkpoint()  # the read that found nothing more has returned
    assert not rescued.is_set()
    rescue.cancel()
    channel.close()
    kept.close()
    peer.close()


def test_a_descriptor_that_cannot_be_closed_keeps_no_other_one_open() -> None:
    bad, good = os.pipe()
    found = Descriptors((bad, good))
    os.close(bad)
    found.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(good)


@pytest.mark.parametrize("kind", ["file", "datagram", "network"])
def test_what_is_no_unix_stream_socket_is_refused_and_closed(kind: str) -> None:
    if kind == "file":
        fd = os.open("/dev/null", os.O_RDONLY)
    else:
        fd = socket.socket(*((socket.AF_UNIX, socket.SOCK_DGRAM) if kind == "datagram" else (socket.AF_INET, socket.SOCK_STREAM))).detach()
    found = Descriptors((fd,))
    with pytest.raises(ControlError, match="where a Unix stream socket was expected"):
        found.take_socket(Fd(fd))
    found.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
