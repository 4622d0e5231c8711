"""Calls over a channel, both ways. Each call ends with its answer or with the connection.

Invariants
    An id is in `_calls` from just before its frame is posted until the peer answers or the connection ends. That holds also when the
    caller has been cancelled or is late. `settled` runs then, and only then, so memory that the peer may still touch stays pinned.
    After `end` no caller waits. Every call has its error, and each has a separate copy of it.
    An answer has the type that was asked for, or the peer has broken the protocol.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import msgspec

from aionn import trace
from aionn.errors import AionnError, CallerError, DeadlineError, ExecutionError, again
from aionn.hal.types import ErrorStatus
from aionn.remote.calls import HalCall
from aionn.remote.channel import ControlSocket, Descriptors
from aionn.remote.control import CallMessage, Cancel, ControlError, Failed, Message, Ready, Refused, Reply, decode, error_of, failure_of
from aionn.tasks import Answer, leave_in_child

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
        on_greeting: called with `Ready` or `Refused`. It owns the descriptors.
        on_cancel: called with the id of a call for which the peer has stopped waiting.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_call: CallHandler,
        on_end: Callable[[Exception | None], None],
        on_greeting: Callable[[Ready | Refused, Descriptors], None] | None = None,
        on_cancel: Callable[[int], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, _Calling[Any]] = {}
        self._last_id = 0
        self._ended_by: BaseException | None = None
        self._when_ended: dict[object, Callable[[BaseException], None]] = {}
        self._on_call = on_call
        self._on_greeting = on_greeting
        self._on_cancel = on_cancel
        self._channel = ControlSocket(sock, self._message, on_end)
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
        except asyncio.CancelledError:
            if call_id in self._calls:
                calling.answer.abandon()
                self._channel.post(Cancel(call_id))
            elif (answered := calling.answer.result) is not None:
                _discard(calling, *answered)  # cancelled between the answer and the resumption
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
        calling.answer.abandon()
        call_id = self._begin(calling, body)

        def stop() -> None:
            if call_id in self._calls:
                self._channel.post(Cancel(call_id))

        return stop

    def _begin(self, calling: _Calling[A], body: HalCall[A]) -> int:
        """Send a call. Returns its number."""
        if self._ended_by is not None:
            error = again(self._ended_by)
            if calling.settled is not None:
                calling.settled(error)
            raise error
        if trace.active:
            trace.count("control.call", call=type(body).__name__)
        self._last_id += 1
        call_id = self._last_id
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
            self._channel.post(Cancel(call_id))

    def post(self, body: HalCall[Any]) -> None:
        """Ask the peer without waiting, to give something back. The answer is dropped when it comes."""
        if self._ended_by is None:
            self._last_id += 1
            self._calls[self._last_id] = calling = _Calling(type(body), Answer(self._loop))
            calling.answer.abandon()
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

    def greet(self, greeting: Ready | Refused) -> None:
        """Send the first frame of a driver. The caller keeps owning the descriptors."""
        self._channel.post(greeting)

    def when_ended(self, key: object, callback: Callable[[BaseException], None]) -> None:
        """Call `callback` at `end`, or now if the connection has ended. `forget(key)` cancels that."""
        if self._ended_by is not None:
            callback(self._ended_by)
        else:
            self._when_ended[key] = callback

    def forget(self, key: object) -> None:
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
                    elif asked.answer.settled:
                        _discard(asked, answer, descriptors)
                    else:
                        asked.answer.set((answer, descriptors))
            case CallMessage(id=call_id, body=body):
                try:
                    self._on_call(call_id, body, descriptors)
                except AionnError as error:
                    descriptors.close()
                    self.reply_failure(call_id, error)
            case Cancel(id=call_id):
                if self._on_cancel is not None:
                    self._on_cancel(call_id)
            case Ready() | Refused():
                if self._on_greeting is None:
                    raise ControlError("the app sent a greeting, which only a driver sends")
                self._on_greeting(message, descriptors)


def _discard(calling: _Calling[A], answer: A, descriptors: Descriptors) -> None:
    descriptors.close()
    if calling.unwanted is not None:
        calling.unwanted(answer)
