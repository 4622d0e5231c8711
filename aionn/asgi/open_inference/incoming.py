"""`Incoming`: the body of a request, which arrives in chunks. It is read up to a limit, and copied at most once.

Invariants
    Bytes are handed out once, in order. `_chunk` holds those that have arrived and are not handed out.
    `_arrived` never exceeds the limit by more than one chunk of the server.

`AwaitedBodies` ends requests whose bodies do not arrive in time, with one timer for all of them. A cancel scope for each wait would make
small requests slower by a twentieth.

Invariants
    All requests run in one event loop.
    The timer is set while a body is waited for, and fires no later than the first of their deadlines.
    A task is cancelled only while it waits in `message`, and at most once per wait. The wait takes that cancellation back.

`Room` says how much memory the bodies of all requests that arrive in pieces may take together. Without such a bound a thousand clients,
each with a body of the largest size, would take all of the machine's memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.types import Message, Receive, Scope

from aionn.asgi.open_inference.refusals import RESTART_S, RequestRefusal

_HEADER = "Inference-Header-Content-Length"
_READ = frozenset((b"content-length", b"content-encoding", b"inference-header-content-length"))


class Incoming:
    """A request's body.

    Args:
        most_bytes: a larger body is refused, before it is read if the request has a Content-Length.
        room: counts what is kept of bodies that arrive in several chunks. `close` gives back what this body took.

    Attributes:
        json_bytes: how many bytes at its beginning are JSON; None if all are.
    """

    def __init__(self, scope: Scope, receive: Receive, most_bytes: int, room: Room) -> None:
        found: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:  # ASGI gives names in lower case
            if name in _READ and found.setdefault(name, value) != value:
                raise RequestRefusal(400, f"the header {name.decode()} has two values; give it once", {"Connection": "close"})
        self._most = most_bytes
        self._declared = _number("Content-Length", found.get(b"content-length"))
        if self._declared is not None and self._declared > most_bytes:
            raise self._too_large()
        if found.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RequestRefusal(415, "this server takes no compressed requests; leave out Content-Encoding")
        self.json_bytes = _number(_HEADER, found.get(b"inference-header-content-length"))
        if self.json_bytes is not None and self.json_bytes > (most_bytes if self._declared is None else self._declared):
            raise RequestRefusal(400, f"{_HEADER} is {self.json_bytes}, which is more than the body has")
        self._room = room
        self._kept = 0
        self._receive = receive
        self._arrivals: AwaitedBodies | None = None
        self._seconds = self._by_s = 0.0
        self._ended = False
        self._chunk = memoryview(b"")
        self._arrived = 0

    def expect(self, arrivals: AwaitedBodies, seconds: float) -> None:
        """Begin to read the body, and have it refused if it has not arrived after so many seconds."""
        self._arrivals = arrivals
        self._seconds, self._by_s = seconds, asyncio.get_running_loop().time() + seconds

    def close(self) -> None:
        """Give back the room that the body took. Its bytes are not used any more."""
        if self._kept:
            self._room.release(self._kept)
            self._kept = 0

    @property
    def at_hand(self) -> int:
        """How many bytes have arrived and are not handed out."""
        return len(self._chunk)

    def json(self) -> Coroutine[Any, Any, memoryview]:
        """Return the JSON at the beginning of the body, or the whole body if all of it is JSON."""
        return self.take(self.json_bytes) if self.json_bytes is not None else self._rest()

    def check_rest(self, needed: int) -> None:
        """Raise `RequestRefusal` if the body is known to have another number of bytes behind its JSON, or more than the limit."""
        if self.json_bytes is None:
            if needed:
                raise RequestRefusal(400, f"the request has raw bytes, but no header {_HEADER} that says where its JSON ends")
        elif self._declared is None:
            if self.json_bytes + needed > self._most:
                raise self._too_large()
        elif self._declared - self.json_bytes != needed:
            raise self._wrong_size(self._declared - self.json_bytes, needed)

    async def take(self, count: int) -> memoryview:
        """Return the next bytes. They are copied only if they arrive in several chunks."""
        if not self._chunk:
            await self._more()
        if len(self._chunk) >= count:
            taken, self._chunk = self._chunk[:count], self._chunk[count:]
            return taken
        self._keep(count)
        whole = memoryview(bytearray(count))
        await self.into([whole])
        return whole

    async def into(self, places: Sequence[memoryview]) -> None:
        """Copy the next bytes into these places."""
        for place in places:
            at = 0
            while at < len(place):
                if not self._chunk and not await self._more():
                    raise RequestRefusal(400, f"the body ends {len(place) - at} bytes before the end of a tensor")
                part = self._chunk[: len(place) - at]
                place[at : at + len(part)] = part
                self._chunk = self._chunk[len(part) :]
                at += len(part)

    async def end(self) -> None:
        """Return at the end of the body. Raises `RequestRefusal` if it has more bytes."""
        if self._chunk or (self._arrived != self._declared and await self._more()):
            raise RequestRefusal(400, "the body goes on behind its last tensor; the sizes of its tensors do not add up")

    async def _rest(self) -> memoryview:
        chunks = [self._chunk] if self._chunk else []
        while await self._more():
            if chunks:
                self._keep(len(self._chunk))
            chunks.append(self._chunk)
        self._chunk = memoryview(b"")
        return chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))

    def _keep(self, count: int) -> None:
        self._room.take(count)
        self._kept += count

    async def _more(self) -> bool:
        """Wait for a chunk with bytes. Returns False at the end."""
        assert self._arrivals is not None
        while not self._ended:
            try:
                message = await self._arrivals.message(self._receive, self._by_s)
            except TimeoutError as error:
                raise RequestRefusal(408, f"the body did not arrive within {self._seconds:g} s", {"Connection": "close"}) from error
            if message["type"] == "http.disconnect":
                raise RequestRefusal(400, "the client left before the end of its request")
            self._ended = not message.get("more_body", False)
            chunk = message.get("body", b"")
            if chunk:
                self._arrived += len(chunk)
                if self._arrived > self._most:
                    raise self._too_large()
                self._chunk = memoryview(chunk)
                return True
        return False

    def _too_large(self) -> RequestRefusal:
        # The connection is closed, or the server would have to read all that still comes.
        return RequestRefusal(413, f"the body has more than {self._most} bytes, which is the limit of this server", {"Connection": "close"})

    @staticmethod
    def _wrong_size(found: int, needed: int) -> RequestRefusal:
        return RequestRefusal(400, f"{found} bytes follow the JSON, but its tensors have {needed}; correct binary_data_size or {_HEADER}")


def _number(header: str, value: bytes | None) -> int | None:
    if value is None:
        return None
    value = value.strip(b" \t")  # which belong to no value, but some servers leave them there
    if not (value.isdigit() and len(value) < 20):
        raise RequestRefusal(400, f"{header} is {value.decode('latin-1')!r}; give a number of bytes")
    return int(value)


class AwaitedBodies:
    """The requests whose bodies are waited for, with one timer."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Task[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def message(self, receive: Receive, by_s: float) -> Message:
        """Return the next message of a request.

        Args:
            by_s: when the message must have arrived, in seconds of the event loop's clock.

        Raises:
            TimeoutError: the message has not arrived by then.
        """
        task = asyncio.current_task()
        assert task is not None
        others = task.cancelling()
        self._waiting[task] = by_s
        if self._timer is None or by_s < self._timer.when():
            self._set(by_s)
        try:
            return await receive()
        except asyncio.CancelledError:
            # Another part of the program may have cancelled the task, too, and that cancellation goes on.
            if task not in self._waiting and task.uncancel() <= others:
                raise TimeoutError from None
            raise
        finally:
            self._waiting.pop(task, None)

    def _set(self, by_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(by_s, self._end_late)

    def _end_late(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for task in [task for task, by_s in self._waiting.items() if by_s <= now_s]:
            del self._waiting[task]
            task.cancel()
        if self._waiting:
            self._set(min(self._waiting.values()))


ROOM_BYTES, ROOM_BODIES = 2**29, 4
"""All bodies together may take `ROOM_BYTES`, or as much as `ROOM_BODIES` bodies of the largest size, if that is more."""


class Room:
    """Memory for bodies.

    Args:
        largest_bytes: the largest body that is accepted.
    """

    def __init__(self, largest_bytes: int) -> None:
        self._most = max(ROOM_BYTES, ROOM_BODIES * largest_bytes)
        self._used = 0

    def take(self, count: int) -> None:
        """Count bytes that a body takes.

        Raises:
            Refusal: the bodies of all requests would take more than they may.
        """
        if self._used + count > self._most:
            sentence = (
                f"the requests under way take {self._used} of the {self._most} bytes that this server keeps for them; try again later"
            )
            raise RequestRefusal(503, sentence, {"Retry-After": str(RESTART_S), "Connection": "close"})
        self._used += count

    def release(self, count: int) -> None:
        """Count bytes that a body took, and does not take any more."""
        self._used -= count
