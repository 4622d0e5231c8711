"""One event of Wyoming from a connection: a line of JSON, then perhaps more JSON, then perhaps bytes.

The package `wyoming` reads as many bytes as a client announces. Here every length has a limit, and a message that has begun a time.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import anyio
import msgspec
from wyoming.event import Event, Eventable, async_write_event

from aionn.errors import AionnError

MOST_LINE_BYTES = 1 << 16
MOST_PAYLOAD_BYTES = 1 << 18
"""8 s of sound. Satellites send 64 ms at once."""

MESSAGE_S = 30.0
"""How long the rest of an event may take after its line, and how long a client may take to receive one."""

_Length = Annotated[int, msgspec.Meta(ge=0, le=MOST_PAYLOAD_BYTES)]


class EventError(AionnError):
    """What a client has sent is not an event, or not one that can be served. Its connection ends."""


class _Line(msgspec.Struct):
    type: str
    data: dict[str, Any] | None = None
    data_length: _Length | None = None
    payload_length: _Length | None = None


async def read_event(reader: asyncio.StreamReader) -> Event | None:
    """Return the next event of a connection, or None where it ends between two events.

    Raises:
        EventError: the bytes are not an event, a length is too large, or the rest of an event does not come.
    """
    try:
        text = await reader.readline()
        if not text:
            return None
        line = msgspec.json.decode(text, type=_Line)
        with anyio.fail_after(MESSAGE_S):
            more = await reader.readexactly(line.data_length or 0)
            payload = await reader.readexactly(line.payload_length or 0)
        data = {**(line.data or {}), **(msgspec.json.decode(more, type=dict[str, Any]) if more else {})}
    except TimeoutError as error:
        raise EventError(f"the rest of an event did not come within {MESSAGE_S:.0f} s; send events whole") from error
    except asyncio.IncompleteReadError as error:
        raise EventError("the connection ended in the middle of an event; send events whole") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise EventError(f"the bytes are not an event of Wyoming ({error}); begin with a line of JSON that has a type") from error
    except ValueError as error:  # the reader's
        raise EventError(
            f"a line is longer than {MOST_LINE_BYTES} bytes; announce a data_length, and send the data behind the line"
        ) from error
    return Event(line.type, data, payload or None)


async def write_event(writer: asyncio.StreamWriter, event: Eventable) -> None:
    """Send an event.

    Raises:
        EventError: the client does not receive.
        OSError: the connection has ended.
    """
    try:
        with anyio.fail_after(MESSAGE_S):
            await async_write_event(event.event(), writer)
    except TimeoutError as error:
        raise EventError(f"the client received nothing for {MESSAGE_S:.0f} s; read what the server sends") from error
