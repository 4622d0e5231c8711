"""Whole packets of a burst, as tests write them. aionn itself keeps the body of a packet, and writes only the last datum anew."""

from __future__ import annotations

from aionn.burst.packets import (
    RequestPacket,
    ResultPacket,
    encode_request_body,
    encode_result_body,
    identity_datum,
    result_identity_datum,
)


def encode_request(packet: RequestPacket) -> bytes:
    """Return one whole request packet."""
    framed = packet.identity is not None
    body = encode_request_body(packet.request, packet.pools, packet.measure_timing, framed=framed)
    return body if packet.identity is None else body + identity_datum(packet.identity, packet.deadline_ns, packet.after)


def encode_result(packet: ResultPacket) -> bytes:
    """Return one whole result packet."""
    body = encode_result_body(packet.result, framed=packet.identity is not None)
    return body if packet.identity is None else body + result_identity_datum(packet.identity, packet.service_ns)
