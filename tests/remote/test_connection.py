"""Calls over the channel: each is answered, or ends with the connection; nothing lent is given back too early."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aionn.errors import AionnError, CallerError, DeadlineError, DriverDiedError, ExecutionError
from aionn.hal.types import BufferDesc, ErrorStatus, MemoryDescription, MemoryKind
from aionn.remote.calls import Allocate, CopyFrom, Fd, FreeBuffer, LentMemory
from aionn.remote.connection import Connection, ControlSocket, Descriptors
from aionn.remote.control import PROTOCOL, CallMessage, Cancel, ControlError, Failed, Message, Reply, ServiceReady, encode, failure_of

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


ALLOCATE = Allocate(BufferDesc(), (), (), ())
MEMORY = MemoryDescription(MemoryKind.ASHMEM, 4096)


class Peer:
    """The other end: hears everything, answers when told."""

    def __init__(self, sock: socket.socket) -> None:
        self.heard: list[Message] = []
        self.channel = ControlSocket(sock, self._hear, lambda error: None)

    def _hear(self, message: Message, descriptors: Descriptors) -> None:
        descriptors.close()
        self.heard.append(message)

    async def call(self, number: int = 1) -> int:
        with anyio.fail_after(30):
            while len(calls := [m for m in self.heard if isinstance(m, CallMessage)]) < number:
                await anyio.lowlevel.checkpoint()
        return calls[number - 1].id

    def answer(self, call_id: int, answer: object) -> None:
        self.channel.post(Reply(call_id, answer))


@asynccontextmanager
async def conversation() -> AsyncIterator[tuple[Connection, Peer, list[Exception | None]]]:
    ours, theirs = socket.socketpair()
    ends: list[Exception | None] = []
    connection = Connection(ours, lambda *_: None, ends.append)
    peer = Peer(theirs)
    try:
        yield connection, peer, ends
    finally:
        connection.end(CallerError("over"))
        peer.channel.close()


async def test_a_call_cancelled_between_its_answer_and_its_resumption_gives_back_what_the_answer_brings() -> None:
    unwanted: list[object] = []
    settled: list[object] = []
    async with conversation() as (connection, peer, _):
        call = connection.call(ALLOCATE, settled=settled.append, unwanted=unwanted.append)
        task = asyncio.ensure_future(call)
        call_id = await peer.call()
        peer.answer(call_id, 5)
        connection.drain()  # the answer is set; its caller has not run yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert unwanted == [5]
    assert settled == [5]


async def test_a_cancelled_call_is_cancelled_at_the_peer_and_stays_pinned_until_it_answers() -> None:
    unwanted: list[object] = []
    settled: list[object] = []
    async with conversation() as (connection, peer, _):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                await connection.call(ALLOCATE, settled=settled.append, unwanted=unwanted.append)

            tasks.start_soon(ask)
            call_id = await peer.call()
            tasks.cancel_scope.cancel()
        peer.channel.drain()
        assert Cancel(call_id) in peer.heard
        assert (settled, unwanted) == ([], [])
        peer.answer(call_id, 5)
        connection.drain()
        assert (settled, unwanted) == ([5], [5])


async def test_the_end_settles_every_caller_with_an_error_of_its_own() -> None:
    errors: list[AionnError] = []
    settled: list[object] = []
    async with conversation() as (connection, peer, _):
        died = DriverDiedError("fake", -9)

        async def ask() -> None:
            with pytest.raises(DriverDiedError) as caught:
                await connection.call(FreeBuffer(1), settled=settled.append)
            errors.append(caught.value)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            await peer.call(3)

            def clumsy(_: BaseException) -> None:
                raise ZeroDivisionError

            connection.when_ended("clumsy", clumsy)
            with pytest.raises(ZeroDivisionError):
                connection.end(died)
        await ask()  # and after the end
    assert len({id(error) for error in errors}) == 4
    assert {(str(error), getattr(error, "exit_code", None)) for error in errors} == {(str(died), -9)}
    assert [(type(error), str(error)) for error in settled] == [(DriverDiedError, str(died))] * 4


@pytest.mark.parametrize("answer", [1, None], ids=["wrong type", "not asked"])
async def test_an_answer_that_was_not_asked_for_ends_the_conversation(answer: int | None) -> None:
    async with conversation() as (connection, peer, ends), anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(CallerError, match="over"):
                await connection.call(FreeBuffer(1))

        tasks.start_soon(ask)
        call_id = await peer.call()
        peer.answer(call_id if answer else call_id + 1, answer)
        connection.drain()
        assert len(ends) == 1
        assert ("answered call" if answer is None else "are not a valid answer to FreeBuffer") in str(ends[0])
        connection.end(CallerError("over"))


async def test_descriptors_that_cannot_be_sent_are_the_callers_error_and_nobody_waits() -> None:
    settled: list[object] = []
    async with conversation() as (connection, _, _):
        fd = os.open("/dev/null", os.O_RDONLY)
        os.close(fd)
        with pytest.raises(ExecutionError) as caught:
            await connection.call(CopyFrom(1, LentMemory(MEMORY, Fd(fd)), ()), settled=settled.append)
        assert os.strerror(errno.EBADF) in str(caught.value)
        assert settled == [caught.value]
        assert connection.calls_in_flight == 0


async def test_what_no_message_can_hold_is_the_callers_error() -> None:
    async with conversation() as (connection, _, _):
        with pytest.raises(CallerError, match="cannot be sent"):
            await connection.call(FreeBuffer(2**70))
        with pytest.raises(CallerError, match="cannot be sent"):  # neither as a descriptor of that number
            await connection.call(FreeBuffer(np.int64(1)))  # type: ignore[arg-type]
        assert connection.calls_in_flight == 0


async def test_a_deadline_ends_the_wait_and_what_was_lent_stays_lent_until_the_answer() -> None:
    settled: list[object] = []
    unwanted: list[object] = []
    async with conversation() as (connection, peer, ends):
        for late in (None, failure_of(ExecutionError("late", status=ErrorStatus.GENERAL_FAILURE))):
            with anyio.fail_after(30), pytest.raises(DeadlineError):
                await connection.call(
                    FreeBuffer(1), settled=settled.append, unwanted=unwanted.append, deadline_ns=time.monotonic_ns() + 10**6
                )
            assert connection.calls_in_flight == 1
            assert settled == []
            call_id = await peer.call(len([m for m in peer.heard if isinstance(m, CallMessage)]) or 1)
            with anyio.fail_after(30):
                while Cancel(call_id) not in peer.heard:
                    await anyio.lowlevel.checkpoint()
            peer.channel.post(Reply(call_id, None) if late is None else Failed(call_id, late))
            with anyio.fail_after(30):
                while not settled:
                    await anyio.lowlevel.checkpoint()
            assert [None if each is None else str(each) for each in settled] == [None if late is None else "late"]
            assert unwanted == ([None] if late is None else [])
            settled.clear()
            unwanted.clear()
            assert connection.calls_in_flight == 0
        assert ends == []  # it ended nothing else


async def test_an_answer_before_the_deadline_is_the_answer() -> None:
    async with conversation() as (connection, peer, _), anyio.create_task_group() as tasks:
        answers: list[object] = []

        async def ask() -> None:
            answers.append((await connection.call(FreeBuffer(1), deadline_ns=time.monotonic_ns() + 10**12))[0])

        tasks.start_soon(ask)
        peer.answer(await peer.call(), None)
        with anyio.fail_after(30):
            while not answers:
                await anyio.lowlevel.checkpoint()
        assert connection.calls_in_flight == 0


async def test_a_peer_greets_once() -> None:
    ours, theirs = socket.socketpair()
    ends: list[Exception | None] = []
    greetings: list[object] = []
    connection = Connection(ours, lambda *_: None, ends.append, lambda greeting, _: greetings.append(greeting))
    theirs.sendall(encode(ServiceReady(PROTOCOL, "1"))[0] * 2)
    with anyio.fail_after(30):
        while not ends:
            await anyio.lowlevel.checkpoint()
    assert len(greetings) == 1
    assert isinstance(ends[0], ControlError)
    connection.end(CallerError("over"))
    theirs.close()
