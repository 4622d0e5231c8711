"""Requests and results as sequences of 24-byte datums, and back. The module does no I/O, so the same code runs in both processes.

    FmqRequestDatum: discriminator u8 @0, union @4          FmqResultDatum: discriminator u8 @0, union @8
    0 packetInformation  packetSize nInputs nOutputs nPools  0 packetInformation  packetSize errorStatus(i32) nOperands
    1 inputOperand       hasNoValue pool offset length nDims 1 operandInformation isSufficient nDims
    2 inputDimension     u32                                 2 operandDimension   u32
    3 outputOperand      as 1                                3 executionTiming    onDevice inDriver (u64, microseconds)
    4 outputDimension    u32                                 4 identity           id, service time in ns (u64)       [aionn]
    5 poolIdentifier     slot (i32)                          5 text               16 bytes of UTF-8, zero-padded     [aionn]
    6 measureTiming      0 | 1 (i32)
    7 identity           id, deadline in ns (u64), 0: none; what it runs after   [aionn]
    8 bufferToken        token (u64), in the place of a poolIdentifier           [aionn]

A request is 0, (1 2*)*, (3 4*)*, (5|8)*, 6, 7?, and a result is 0, (1 2*)*, 3, (5* 4)?. packetSize counts every datum. Kinds marked
[aionn] are extensions. An identity frames a packet, so that several may be in flight. A packet without an identity is NNAPI's, and is
answered as NNAPI does. Everything else is HAL 1.2's as HIDL lays it out (`FmqRequestDatum`, `FmqResultDatum`): sizes, offsets and
padding, which is always zero.

The peer is not trusted to be correct. Each count is checked against the packet before it is used, and no memory is reserved by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple

import msgspec

from aionn.errors import AionnError
from aionn.hal.types import NO_TIMING, DataLocation, ErrorStatus, Operand, OutputShape, Request, RequestArgument, Result, Timing

DATUM_BYTES = 24
MESSAGE_BYTES = 16 * 64
"""An error's text is cut to this many bytes of UTF-8."""

FORFEITED = "the execution before this one did not succeed, or is not known any more, so this one did not begin"
"""The message of an answer to a request that was sent to run after another one. The app decides what becomes of it."""

QUEUE_CAPACITY = 1024
"""As NNAPI's bursts have. Queues have more datums only where two requests need them."""

_WIDEST = 16
"""An argument whose rank is not known counts with so many dimensions when a queue is sized."""

_INFORMATION = Struct("<B3x4I4x")
_OPERAND = Struct("<B3xB3x4I")
_DIMENSION = Struct("<B3xI16x")
_SIGNED = Struct("<B3xi16x")
_IDENTITY = Struct("<IQQI")
_TOKEN = Struct("<B3xQ12x")

_RESULT_INFORMATION = Struct("<B7xIiI4x")
_RESULT_OPERAND = Struct("<B7xB3xI8x")
_RESULT_DIMENSION = Struct("<B7xI12x")
_TIMING = Struct("<B7xQQ")
_TEXT = Struct("<B7x16s")

REQUEST_IDENTITY = 7
RESULT_IDENTITY = 4
"""Kinds of the last datum of a framed packet."""

_U32_MAX = 2**32 - 1
_I32_MAX = 2**31 - 1
_U64_MAX = 2**64 - 1
_LATE_STATUSES = frozenset((ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE))


class PacketError(AionnError):
    """A packet contradicts its own header, or a value does not fit a datum."""


class PoolReference(NamedTuple):
    """A pool of a burst's request: a cached memory by slot (token 0), or a device-owned buffer by token (slot -1)."""

    slot: int
    token: int = 0


class RequestPacket(msgspec.Struct, frozen=True):
    """One request as it crosses the queue. Without `identity` it is an NNAPI packet: one is in flight, and its answer has no identity.

    Attributes:
        after: the request that must succeed before this one runs, as `after_request` says, or 0.
    """

    request: Request
    pools: tuple[PoolReference, ...]
    measure_timing: bool = False
    identity: int | None = None
    deadline_ns: int | None = None
    after: int = 0


class ResultPacket(msgspec.Struct, frozen=True):
    """One answer as it crosses the queue. `service_ns` is how long the driver was busy with the request."""

    result: Result
    identity: int | None = None
    service_ns: int = 0


def enough_datums(operands: Iterable[Operand], depth: int) -> int:
    """Return the capacity of the queues of a burst.

    They hold `depth` requests, up to `QUEUE_CAPACITY`, and two requests or an error with its text in any case.

    Args:
        operands: all inputs and outputs of the model.
    """
    request = 4
    for operand in operands:
        request += 2 + (_WIDEST if operand.dimensions is None else len(operand.dimensions))
    return max(min(QUEUE_CAPACITY, depth * request), 2 * request, request + MESSAGE_BYTES // 16)


def after_request(burst: int, identity: int) -> int:
    """Return how a request names an earlier one of the same client, which must succeed before.

    The name has 24 bits for the number of that one's burst, and 32 bits of its identity. Returns 0, which stands for none, if the burst
    has a larger number.
    """
    return 0 if burst >= 1 << 24 else burst << 32 | identity & _U32_MAX


def encode_request_body(request: Request, pools: Sequence[PoolReference], measure_timing: bool, *, framed: bool) -> bytes:
    """Return a request without its identity datum. With `framed` the header counts that datum, too.

    Raises:
        PacketError: a value does not fit its field.
    """
    datums: list[bytes] = [b""]
    for kind, arguments in ((1, request.inputs), (3, request.outputs)):
        for argument in arguments:
            place = argument.location
            fields = (place.pool_index, place.offset, place.length, *argument.dimensions)
            if min(fields) < 0 or max(fields) > _U32_MAX:
                raise PacketError(f"{argument} does not fit the 32 bits that a burst carries; use compilation.compute for larger memories")
            rank = len(argument.dimensions)
            datums.append(_OPERAND.pack(kind, argument.has_no_value, place.pool_index, place.offset, place.length, rank))
            for extent in argument.dimensions:
                datums.append(_DIMENSION.pack(kind + 1, extent))
    for pool in pools:
        if 0 < pool.token <= _U64_MAX:
            datums.append(_TOKEN.pack(8, pool.token))
        elif pool.token == 0 and 0 <= pool.slot <= _I32_MAX:
            datums.append(_SIGNED.pack(5, pool.slot))
        else:
            raise PacketError(f"a burst cannot carry {pool}; a slot is 0 to {_I32_MAX}, a token 1 to {_U64_MAX}")
    datums.append(_SIGNED.pack(6, bool(measure_timing)))
    datums[0] = _INFORMATION.pack(0, len(datums) + framed, len(request.inputs), len(request.outputs), len(pools))
    return b"".join(datums)


def split_requests(datums: bytes) -> list[bytes]:
    """Cut the datums of the request queue into packets. A piece that cannot be cut stays whole, and `decode_request` refuses it.

    Only a packet with an identity may have another packet behind it. A packet without one is all that the queue holds (NNAPI).
    """
    return _split(datums, size_at=4, identity_kind=REQUEST_IDENTITY)


def split_results(datums: bytes) -> list[bytes]:
    """Cut the datums of the result queue into packets, as `split_requests`."""
    return _split(datums, size_at=8, identity_kind=RESULT_IDENTITY)


def _split(datums: bytes, size_at: int, identity_kind: int) -> list[bytes]:
    packets = []
    at, total = 0, len(datums)
    while at < total:
        size = int.from_bytes(datums[at + size_at : at + size_at + 4], "little") if datums[at] == 0 else 0
        end = at + size * DATUM_BYTES
        if end == total and at == 0:
            return [datums]
        if size == 0 or end > total or datums[end - DATUM_BYTES] != identity_kind:
            packets.append(datums[at:])
            break
        packets.append(datums[at:end])
        at = end
    return packets


def is_framed_request(packet: bytes) -> bool:
    """Return whether the last datum of a request packet is an identity."""
    return len(packet) >= 2 * DATUM_BYTES and packet[-DATUM_BYTES] == REQUEST_IDENTITY


def is_framed_result(packet: bytes) -> bool:
    """Return whether the last datum of a result packet is an identity."""
    return len(packet) >= 2 * DATUM_BYTES and packet[-DATUM_BYTES] == RESULT_IDENTITY


def read_identity(packet: bytes) -> tuple[int, int | None]:
    """Return the identity and the deadline (or None) of a framed request, from its last datum."""
    _, identity, deadline_ns, _ = _IDENTITY.unpack_from(packet, len(packet) - DATUM_BYTES)
    return identity, deadline_ns or None


def read_after(packet: bytes) -> int:
    """Return what a framed request runs after (`after_request`), or 0, from its last datum."""
    head, _, _, identity = _IDENTITY.unpack_from(packet, len(packet) - DATUM_BYTES)
    after: int = head >> 8 << 32 | identity
    return after


def read_result_identity(packet: bytes) -> tuple[int, int]:
    """Return the identity and the service time of a framed result, from its last datum."""
    _, identity, service_ns = _TIMING.unpack_from(packet, len(packet) - DATUM_BYTES)
    return identity, service_ns


class _Datums:
    """Takes one datum after the other, and never reads beyond the packet."""

    __slots__ = ("_at", "_packet", "count")

    def __init__(self, packet: bytes, what: str) -> None:
        if len(packet) % DATUM_BYTES or not packet:
            raise PacketError(f"a {what} packet has {len(packet)} bytes, but a packet is one or more datums of {DATUM_BYTES}")
        self._packet = packet
        self._at = 0
        self.count = len(packet) // DATUM_BYTES

    def take(self, layout: Struct, kind: int, what: str) -> tuple[int, ...]:
        if self._at == self.count:
            raise PacketError(f"the packet ends where {what} should stand")
        fields: tuple[int, ...] = layout.unpack_from(self._packet, self._at * DATUM_BYTES)
        if fields[0] & 0xFF != kind:
            raise PacketError(f"datum {self._at} has kind {fields[0] & 0xFF}, but {what} has kind {kind}")
        self._at += 1
        return fields

    @property
    def next_kind(self) -> int | None:
        return None if self._at == self.count else self._packet[self._at * DATUM_BYTES]

    def check_end(self) -> None:
        if self._at != self.count:
            raise PacketError(f"the packet has {self.count} datums, but its end was expected after {self._at}")


def decode_request(packet: bytes) -> RequestPacket:
    """Read one whole packet.

    Raises:
        PacketError: kinds, order, counts or length are not those of a request.
    """
    datums = _Datums(packet, "request")
    _, size, inputs, outputs, pools = datums.take(_INFORMATION, 0, "the packet information")
    if size != datums.count:
        raise PacketError(f"a request packet has {datums.count} datums, but its header says {size}")
    arguments: tuple[list[RequestArgument], list[RequestArgument]] = ([], [])
    for kind, count, into in ((1, inputs, arguments[0]), (3, outputs, arguments[1])):
        for _ in range(count):
            into.append(_take_argument(datums, kind))
    references = []
    for _ in range(pools):
        if datums.next_kind == 8:
            references.append(PoolReference(-1, datums.take(_TOKEN, 8, "a buffer token")[1]))
        else:
            references.append(PoolReference(datums.take(_SIGNED, 5, "a pool identifier")[1]))
    measure = datums.take(_SIGNED, 6, "the timing choice")[1]
    if measure not in (0, 1):
        raise PacketError(f"the timing choice is {measure}, but only 0 and 1 are allowed")
    identity, deadline_ns, after = None, None, 0
    if datums.next_kind == 7:
        head, identity, deadline, low = datums.take(_IDENTITY, 7, "the identity")
        deadline_ns, after = deadline or None, head >> 8 << 32 | low
    datums.check_end()
    request = Request(tuple(arguments[0]), tuple(arguments[1]))
    return RequestPacket(request, tuple(references), bool(measure), identity, deadline_ns, after)


def _take_argument(datums: _Datums, kind: int) -> RequestArgument:
    _, no_value, pool, offset, length, rank = datums.take(_OPERAND, kind, "an operand")
    if no_value not in (0, 1):
        raise PacketError(f"an operand's hasNoValue is {no_value}, but only 0 and 1 are allowed")
    dimensions = []
    for _ in range(rank):
        dimensions.append(datums.take(_DIMENSION, kind + 1, "an operand's dimension")[1])
    return RequestArgument(DataLocation(pool, offset, length), tuple(dimensions), bool(no_value))


def encode_result_body(result: Result, *, framed: bool) -> bytes:
    """Return a result without its identity datum. With `framed` the header counts that datum, too, and the message is included.

    Shapes and timing of a failed execution are dropped, as the HAL says.

    Raises:
        PacketError: a value does not fit its field.
    """
    shapes = result.output_shapes if result.status in _LATE_STATUSES else ()
    timing = result.timing if result.status is ErrorStatus.NONE else NO_TIMING
    datums: list[bytes] = [b""]
    for shape in shapes:
        datums.append(_RESULT_OPERAND.pack(1, shape.is_sufficient, len(shape.dimensions)))
        if any(not 0 <= extent <= _U32_MAX for extent in shape.dimensions):
            raise PacketError(f"an output has the shape {shape.dimensions}, but a burst carries extents of 32 bits")
        datums.extend(_RESULT_DIMENSION.pack(2, extent) for extent in shape.dimensions)
    datums.append(_TIMING.pack(3, timing.on_device_us, timing.in_driver_us))
    if framed:
        text = result.message.encode(errors="replace")[:MESSAGE_BYTES]
        datums.extend(_TEXT.pack(5, text[at : at + 16]) for at in range(0, len(text), 16))
    datums[0] = _RESULT_INFORMATION.pack(0, len(datums) + framed, result.status, len(shapes))
    return b"".join(datums)


def result_identity_datum(identity: int, service_ns: int) -> bytes:
    """Return the last datum of a framed result. Only this datum changes when the same answer is given again."""
    return _TIMING.pack(RESULT_IDENTITY, identity, service_ns)


def decode_result(packet: bytes) -> ResultPacket:
    """Read one whole packet.

    Raises:
        PacketError: kinds, order, counts or length are not those of a result, or they contradict its status.
    """
    datums = _Datums(packet, "result")
    _, size, status_number, operands = datums.take(_RESULT_INFORMATION, 0, "the packet information")
    if size != datums.count:
        raise PacketError(f"a result packet has {datums.count} datums, but its header says {size}")
    try:
        status = ErrorStatus(status_number)
    except ValueError:
        raise PacketError(f"a result packet has the error status {status_number}, which the HAL does not know") from None
    shapes = []
    for _ in range(operands):
        _, sufficient, rank = datums.take(_RESULT_OPERAND, 1, "an output shape")
        if sufficient not in (0, 1):
            raise PacketError(f"an output shape's isSufficient is {sufficient}, but only 0 and 1 are allowed")
        dimensions = []
        for _ in range(rank):
            dimensions.append(datums.take(_RESULT_DIMENSION, 2, "an output's dimension")[1])
        shapes.append(OutputShape(tuple(dimensions), bool(sufficient)))
    if shapes and status not in _LATE_STATUSES:
        raise PacketError(f"a result packet with status {status.name} has {len(shapes)} output shapes, but such a result has none")
    _, on_device_us, in_driver_us = datums.take(_TIMING, 3, "the timing")
    identity, service_ns, text = None, 0, bytearray()
    while datums.next_kind == 5:
        text += _take_text(datums)
    if text or datums.next_kind == 4:
        _, identity, service_ns = datums.take(_TIMING, 4, "the identity")
    datums.check_end()
    message = bytes(text).rstrip(b"\0").decode(errors="replace")
    return ResultPacket(Result(status, tuple(shapes), Timing(on_device_us, in_driver_us), message), identity, service_ns)


def _take_text(datums: _Datums) -> bytes:
    piece: object = datums.take(_TEXT, 5, "a piece of text")[1]
    assert isinstance(piece, bytes)
    return piece
