"""The codec alone: round trips, every cut refused, random bytes never accepted for what they are not, sizes as HIDL lays them out."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aionn.burst.packets import (
    DATUM_BYTES,
    MESSAGE_BYTES,
    QUEUE_CAPACITY,
    PacketError,
    PoolReference,
    RequestPacket,
    ResultPacket,
    decode_request,
    decode_result,
    encode_request_body,
    encode_result_body,
    enough_datums,
    split_requests,
    split_results,
)
from aionn.hal.types import (
    NO_TIMING,
    DataLocation,
    ErrorStatus,
    Operand,
    OperandType,
    OutputShape,
    Request,
    RequestArgument,
    Result,
    Timing,
)
from tests.burst.whole_packets import encode_request, encode_result

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
dimensions = st.lists(u32, max_size=4).map(tuple)
arguments = st.lists(st.builds(RequestArgument, st.builds(DataLocation, u32, u32, u32), dimensions, st.booleans()), max_size=4).map(tuple)
references = st.lists(
    st.builds(PoolReference, st.integers(0, 2**31 - 1), st.just(0)) | st.builds(PoolReference, st.just(-1), st.integers(1, 2**64 - 1)),
    max_size=4,
).map(tuple)
framed_requests = st.builds(
    RequestPacket, st.builds(Request, arguments, arguments), references, st.booleans(), u64, st.none() | st.integers(1, 2**64 - 1)
)
requests = framed_requests | st.builds(RequestPacket, st.builds(Request, arguments, arguments), references, st.booleans())

shapes = st.lists(st.builds(OutputShape, dimensions, st.booleans()), max_size=4).map(tuple)
texts = st.text(max_size=60).map(lambda text: text.rstrip("\0"))
late = st.builds(Result, st.just(ErrorStatus.NONE), shapes, st.builds(Timing, u64, u64))
insufficient = st.builds(Result, st.just(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE), shapes, message=texts)
failed = st.builds(
    Result, st.sampled_from([s for s in ErrorStatus if s not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)]), message=texts
)
results = st.builds(ResultPacket, late | insufficient | failed, u64, u64)


@given(requests)
def test_a_request_survives_the_trip(packet: RequestPacket) -> None:
    data = encode_request(packet)
    assert decode_request(data) == packet
    request = packet.request
    ranks = sum(len(argument.dimensions) for argument in (*request.inputs, *request.outputs))
    count = 2 + len(request.inputs) + len(request.outputs) + len(packet.pools) + ranks + (packet.identity is not None)
    assert len(data) == count * DATUM_BYTES
    assert int.from_bytes(data[4:8], "little") == count


@given(results)
def test_a_result_survives_the_trip(packet: ResultPacket) -> None:
    assert decode_result(encode_result(packet)) == packet


@given(late)
def test_a_result_without_identity_is_nnapis(result: Result) -> None:
    data = encode_result(ResultPacket(result))
    assert decode_result(data) == ResultPacket(result)
    assert len(data) == DATUM_BYTES * (2 + sum(1 + len(shape.dimensions) for shape in result.output_shapes))


@given(failed)
def test_a_failure_without_identity_has_two_datums(result: Result) -> None:
    data = encode_result(ResultPacket(result))
    assert len(data) == 2 * DATUM_BYTES
    assert decode_result(data).result == Result(result.status)


@given(requests, st.data())
def test_a_cut_request_is_refused(packet: RequestPacket, data: st.DataObject) -> None:
    whole = encode_request(packet)
    with pytest.raises(PacketError):
        decode_request(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(results, st.data())
def test_a_cut_result_is_refused(packet: ResultPacket, data: st.DataObject) -> None:
    whole = encode_result(packet)
    with pytest.raises(PacketError):
        decode_result(whole[: data.draw(st.integers(0, len(whole) - 1))])


@settings(max_examples=40)
@given(st.lists(framed_requests, min_size=1, max_size=5))
def test_framed_requests_in_one_queue_are_told_apart(packets: list[RequestPacket]) -> None:
    whole = [encode_request(packet) for packet in packets]
    assert split_requests(b"".join(whole)) == whole


@settings(max_examples=40)
@given(st.lists(results, min_size=1, max_size=5))
def test_framed_results_in_one_queue_are_told_apart(packets: list[ResultPacket]) -> None:
    whole = [encode_result(packet) for packet in packets]
    assert split_results(b"".join(whole)) == whole


@given(st.binary(max_size=40).map(lambda some: some * DATUM_BYTES))
def test_splitting_loses_no_byte(datums: bytes) -> None:
    assert b"".join(split_requests(datums)) == datums
    assert b"".join(split_results(datums)) == datums


def test_counts_larger_than_the_packet_are_refused_before_anything_is_reserved() -> None:
    for field in range(8, 20, 4):
        data = bytearray(encode_request(RequestPacket(Request((), ()), (), False)))
        data[field : field + 4] = b"\xff" * 4
        with pytest.raises(PacketError, match=r"kind|ends"):
            decode_request(bytes(data))
    huge = bytearray(encode_result(ResultPacket(Result(ErrorStatus.NONE), 1)))
    huge[16:20] = b"\xff" * 4
    with pytest.raises(PacketError):
        decode_result(bytes(huge))


@pytest.mark.parametrize(
    ("argument", "pools"),
    [
        (RequestArgument(DataLocation(0, 2**32, 1), ()), ()),
        (RequestArgument(DataLocation(0, -1, 1), ()), ()),
        (RequestArgument(DataLocation(0, 0, 1), (2**32,)), ()),
        (RequestArgument(DataLocation(0, 0, 1), ()), (PoolReference(2**31),)),
        (RequestArgument(DataLocation(0, 0, 1), ()), (PoolReference(-1),)),
        (RequestArgument(DataLocation(0, 0, 1), ()), (PoolReference(-1, 2**64),)),
        (RequestArgument(DataLocation(0, 0, 1), ()), (PoolReference(-1, -1),)),
    ],
)
def test_what_no_datum_can_hold_is_refused(argument: RequestArgument, pools: tuple[PoolReference, ...]) -> None:
    with pytest.raises(PacketError):
        encode_request(RequestPacket(Request((argument,), ()), pools))


def test_a_failure_that_comes_with_shapes_is_refused() -> None:
    data = bytearray(encode_result(ResultPacket(Result(ErrorStatus.NONE, (OutputShape((3,)),)), 1)))
    data[12:16] = int(ErrorStatus.GENERAL_FAILURE).to_bytes(4, "little")
    with pytest.raises(PacketError, match="GENERAL_FAILURE"):
        decode_result(bytes(data))
    data[12:16] = (99).to_bytes(4, "little")
    with pytest.raises(PacketError, match="99"):
        decode_result(bytes(data))


def test_a_long_text_is_cut_and_times_of_a_failure_are_dropped() -> None:
    result = Result(ErrorStatus.GENERAL_FAILURE, (OutputShape((1,)),), Timing(1, 2), "é" * 5000)
    told = decode_result(encode_result(ResultPacket(result, 1))).result
    assert told == Result(ErrorStatus.GENERAL_FAILURE, (), NO_TIMING, "é" * (MESSAGE_BYTES // 2))


def fuzz(mutations: int, seed: int) -> int:
    """Feed so many mutated packets and queue contents to the decoders; how many were still taken. Only PacketError may come."""
    chance = random.Random(seed)
    place = RequestArgument(DataLocation(0, 64, 128), (1, 2, 3))
    nothing = RequestArgument(DataLocation(0, 0, 0), (), True)
    shapes = (OutputShape((1, 2), False), OutputShape(()))
    wires: list[tuple[bytes, Callable[[bytes], object], Callable[[bytes], list[bytes]]]] = []
    for identity in (None, 2**63):
        request = RequestPacket(Request((place, nothing), (place,)), (PoolReference(1), PoolReference(-1, 5)), True, identity, None)
        wires.append((encode_request(request), decode_request, split_requests))
        for status in ErrorStatus:
            result = ResultPacket(Result(status, shapes, Timing(1, 2), "what happened"), identity, 9)
            wires.append((encode_result(result), decode_result, split_results))
    taken = 0
    for turn in range(mutations):
        wire, decode, split = wires[turn % len(wires)]
        data = bytearray(wire)
        for _ in range(chance.randint(1, 4)):
            kind, at = chance.random(), chance.randrange(len(data))
            if kind < 0.5:
                data[at] = chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            elif kind < 0.75:
                at -= at % 4
                data[at : at + 4] = chance.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)).to_bytes(4, "little")
            elif kind < 0.9:
                at -= at % DATUM_BYTES
                data[at : at + DATUM_BYTES] = data[at : at + DATUM_BYTES] * chance.choice((0, 2))
            else:
                del data[at:]
            if not data:
                break
        mutated = bytes(data)
        try:
            for packet in split(mutated) if len(mutated) % DATUM_BYTES == 0 else [mutated]:
                decode(packet)
                taken += 1
        except PacketError:
            continue
    return taken


def test_mutated_packets_are_refused_or_taken_and_nothing_else() -> None:
    assert fuzz(5_000, seed=1) > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_million_mutated_packets_are_refused_or_taken_and_nothing_else() -> None:
    assert fuzz(1_200_000, seed=2) > 0


@given(st.binary(max_size=DATUM_BYTES * 6))
@settings(max_examples=300)
def test_random_bytes_never_crash_the_decoders(data: bytes) -> None:
    for decode in (decode_request, decode_result):
        try:
            decode(data)
        except PacketError:
            continue


@pytest.mark.parametrize(("depth", "inputs"), [(1, 1), (8, 1), (64, 3), (1, 600)])
def test_queues_hold_the_requests_of_their_depth_and_the_longest_text(depth: int, inputs: int) -> None:
    operand = Operand(OperandType.FLOAT32, (1, 2, 3))
    argument = RequestArgument(DataLocation(0, 0, 24), (1, 2, 3))
    capacity = enough_datums([operand] * (inputs + 1), depth)
    request = Request((argument,) * inputs, (argument,))
    bytes_of_one = len(encode_request_body(request, (PoolReference(1),), True, framed=True)) + DATUM_BYTES
    answer = Result(ErrorStatus.GENERAL_FAILURE, (OutputShape((1, 2, 3), True),), message="x" * 5000)
    text_bytes = len(encode_result_body(answer, framed=True)) + DATUM_BYTES
    assert capacity * DATUM_BYTES >= max(2 * bytes_of_one, text_bytes)
    assert capacity * DATUM_BYTES >= min(QUEUE_CAPACITY * DATUM_BYTES, depth * bytes_of_one)
