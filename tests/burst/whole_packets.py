"""Whole packets of a burst, as tests write them. aionn itself keeps the body of a packet, and writes only the last datum anew."""

from __future__ import annotations

from struct import Struct

from aionn.burst.packets import (
    REQUEST_IDENTITY,
    RequestPacket,
    ResultPacket,
    encode_request_body,
    encode_result_body,
    result_identity_datum,
)

_IDENTITY = Struct("<IQQI")


def identity_datum(identity: int, deadline_ns: int | None, after: int = 0) -> bytes:
    """Return the last datum of a framed request. Only this datum changes when the same request is sent again."""
    return _IDENTITY.pack(REQUEST_IDENTITY | after >> 32 << 8, identity, deadline_ns or 0, after & 0xFFFF_FFFF)


def encode_request(packet: RequestPacket) -> bytes:
    """Return one whole request packet."""
    framed = packet.identity is not None
    body = encode_request_body(packet.request, packet.pools, packet.measure_timing, framed=framed)
    return body if packet.identity is None else body + identity_datum(packet.identity, packet.deadline_ns, packet.after)


def encode_result(packet: ResultPacket) -> bytes:
    """Return one whole result packet."""
    body = encode_result_body(packet.result, framed=packet.identity is not None)
    return body if packet.identity is None else body + result_identity_datum(packet.identity, packet.service_ns)
