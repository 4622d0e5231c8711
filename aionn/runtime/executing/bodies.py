"""The encoded requests of a burst. Each frame remembers those that it was used for, so a frame that is sent again is not encoded again."""

from __future__ import annotations

from typing import Any

from aionn.burst import PoolReference, encode_request_body
from aionn.hal.types import Request
from aionn.memory.pool import Frame
from aionn.remote.handles import RemoteBuffer
from aionn.runtime.executing.frame_layout import FrameLayout
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.placement import Placement

_REMEMBERED = 64
"""A frame remembers so many encoded requests, then it forgets all of them."""


def plain_body(layout: FrameLayout, frame: Frame, measure_timing: bool) -> bytes:
    """Return the request of a frame that holds all arguments. Sent again, it costs no more than the identity behind it."""
    body: bytes | None = frame.bindings.get((layout, measure_timing))
    if body is None:
        body = encode_request_body(layout.request(frame.offset), (PoolReference(frame.slot),), measure_timing, framed=True)
        keep(frame, (layout, measure_timing), body)
    return body


def placed_body(layout: FrameLayout, frame: Frame, frames: Frames, placement: Placement, measure_timing: bool) -> bytes:
    """Return the request of a frame and a placement. A state that swaps two buffers has two."""
    references = {
        pool: PoolReference(-1, pool.token) if isinstance(pool, RemoteBuffer) else PoolReference(frames.slot_of(pool))
        for pool in placement.pools
    }
    key = (layout, measure_timing, placement.key(references))
    body: bytes | None = frame.bindings.get(key)
    if body is None:
        body = remember(frame, key, placement.request(layout, frame.offset), tuple(references.values()), measure_timing)
    return body


def remember(frame: Frame, key: Any, request: Request, references: tuple[PoolReference, ...], measure_timing: bool) -> bytes:
    """Encode a request whose pools are the frame's and `references`, and keep it with the frame."""
    body = encode_request_body(request, (PoolReference(frame.slot), *references), measure_timing, framed=True)
    keep(frame, key, body)
    return body


def keep(frame: Frame, key: Any, body: bytes) -> None:
    """Remember an encoded request with its frame."""
    if len(frame.bindings) >= _REMEMBERED:
        frame.bindings.clear()
    frame.bindings[key] = body
