"""`Incoming`: the body of a request, which arrives in chunks. It is read up to a limit, and copied at most once.

Invariants
    Bytes are handed out once, in order. `_chunk` holds those that have arrived and are not handed out.
    `_arrived` never exceeds the limit by more than one chunk of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.types import Receive, Scope

from aionn.asgi.open_inference.arrivals import AwaitedBodies
from aionn.asgi.open_inference.refusals import RequestRefusal
from aionn.asgi.open_inference.room import Room

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
            self._room.give_back(self._kept)
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
