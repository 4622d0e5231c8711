"""Control frames as an honest peer makes them, and as a hostile one may."""

from __future__ import annotations

from typing import Any

from aionn.remote.calls import HalCall
from aionn.remote.control import HEADER, CallMessage, Cancel, Failed, Message, Ready, Refused, Reply, decode, encode

__all__ = ["HEADER", "CallMessage", "Cancel", "Failed", "Message", "Ready", "Refused", "Reply", "answer_in", "decode", "frame"]


def frame(message: Message, descriptors: int | None = None) -> bytes:
    """Return a frame. `descriptors` is how many it announces, if that is not what the message names."""
    whole, fds = encode(message)
    count = len(fds) if descriptors is None else descriptors
    return HEADER.pack(len(whole) - HEADER.size, count, 0) + whole[HEADER.size :]


def answer_in(kind: type[HalCall[Any]], whole: bytes) -> Any:
    """Return the answer in the frame of a reply."""
    reply = decode(whole[HEADER.size :])
    assert isinstance(reply, Reply)
    return decode(reply.answer, answer_to=kind)
