"""VTS ValidateBurst and ValidateRequest (burst leg), row by row: a raw client against a real server, one datum wrong at a time.

Each packet is sent twice: as NNAPI's (without identity, alone in the queue, answered with exactly two datums on error) and as
aionn's (with identity). After every refusal a good request is executed, so no packet has broken the listener.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aionn.burst.packets import (
    DATUM_BYTES,
    REQUEST_IDENTITY,
    PoolReference,
    RequestPacket,
    ResultPacket,
    encode_request_body,
)
from aionn.hal.types import NO_TIMING, DataLocation, ErrorStatus, OutputShape, Request, RequestArgument
from aionn.testing.models import identity_model
from tests.burst.ends import RawClient, nothing_computed, packet, raw_client, request
from tests.burst.whole_packets import encode_request, identity_datum

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("both_ways")]

UNUSED_SLOT = 2**31 - 1
GOOD = packet()
FRAMED = packet(identity=1)


def datums_of(data: bytes) -> list[bytes]:
    return [data[at : at + DATUM_BYTES] for at in range(0, len(data), DATUM_BYTES)]


def _bad_datums() -> list[bytes]:
    """VTS's seven: packetInfo{10,10,10,10}, inputInfo{no, {}, dims 10}, inputDim 0, outputInfo, outputDim 0, pool, timing."""
    info = bytes([0, 0, 0, 0]) + (10).to_bytes(4, "little") * 4 + bytes(4)
    ten_dims = RequestArgument(DataLocation(0, 0, 0), (0,) * 10)
    body = datums_of(encode_request_body(Request((ten_dims,), (ten_dims,)), (PoolReference(UNUSED_SLOT),), True, framed=False))
    return [info, body[1], body[2], body[12], body[13], body[23], body[24]]


BAD = _bad_datums()


async def refused(client: RawClient, data: bytes) -> bool:
    """Send one bad packet, then a good one; whether both were answered as they should."""
    framed = data[-DATUM_BYTES] == REQUEST_IDENTITY
    await client.send(data)
    answer = await client.receive()
    good = await client.answer_to(FRAMED)
    two_datums = answer.identity is None
    return nothing_computed(answer) and good.result.status is ErrorStatus.NONE and (framed or two_datums)


def test_the_bad_datums_are_the_seven_kinds() -> None:
    assert [datum[0] for datum in BAD] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("good", [GOOD, FRAMED], ids=["nnapi", "framed"])
async def test_validate_burst_serialization_remove_datum(good: RequestPacket) -> None:
    whole = datums_of(encode_request(good))
    async with raw_client() as client:
        assert UNUSED_SLOT not in client.slots.regions
        for index in range(len(whole)):
            cut = whole[:index] + whole[index + 1 :]
            assert await refused(client, b"".join(cut)), f"without datum {index}"


@pytest.mark.parametrize("good", [GOOD, FRAMED], ids=["nnapi", "framed"])
async def test_validate_burst_serialization_add_datum(good: RequestPacket) -> None:
    whole = datums_of(encode_request(good))
    async with raw_client() as client:
        for index in range(len(whole) + 1):
            for bad in BAD:
                if good.identity is not None and index == len(whole):
                    # Behind a framed packet another one begins: the first is executed, what follows is refused.
                    first = await client.answer_to(b"".join([*whole, bad]))
                    assert first.result.status is ErrorStatus.NONE
                    assert nothing_computed(await client.receive())
                else:
                    assert await refused(client, b"".join([*whole[:index], bad, *whole[index:]])), f"datum of kind {bad[0]} at {index}"


@pytest.mark.parametrize("good", [GOOD, FRAMED], ids=["nnapi", "framed"])
async def test_validate_burst_serialization_mutate_datum(good: RequestPacket) -> None:
    whole = datums_of(encode_request(good))
    async with raw_client() as client:
        for index, datum in enumerate(whole):
            for bad in BAD:
                if datum == bad or (datum[0] == bad[0] and bad[0] in (2, 4)):
                    continue  # as VTS: another value of a dimension may be good
                assert await refused(client, b"".join([*whole[:index], bad, *whole[index + 1 :]])), f"datum {index} of kind {bad[0]}"


async def test_nnapi_error_answers_have_exactly_two_datums_and_no_identity() -> None:
    async with raw_client() as client:
        await client.send(b"".join(datums_of(encode_request(GOOD))[:-1]))
        await client.results.wait_readable(2)
        assert client.results.available_to_read() == 2
        answer = await client.receive()
        assert (answer.result.status, answer.identity) == (ErrorStatus.GENERAL_FAILURE, None)


async def test_two_nnapi_packets_at_once_are_one_bad_packet() -> None:
    """Without identity a packet is all that lies in the queue: one in flight."""
    async with raw_client() as client:
        assert client.requests.write(encode_request(GOOD) * 2)
        answer = await client.receive()
        assert nothing_computed(answer)
        assert answer.result.status is ErrorStatus.GENERAL_FAILURE
        assert (await client.answer_to(GOOD)).result.status is ErrorStatus.NONE


OPEN_MODEL = identity_model({"x": ("N", 16)})


def open_request(room_bytes: int) -> Request:
    argument = RequestArgument(DataLocation(0, 0, 64), (1, 16))
    return Request((argument,), (RequestArgument(DataLocation(0, 1024, room_bytes), (0, 16)),))


async def test_validate_burst_fmq_length() -> None:
    """An answer that the regular result queue holds does not fit into one of 8 datums: an error, no shapes, no times."""
    for identity in (None, 1):
        big = RequestPacket(open_request(64), (PoolReference(0),), True, identity)
        async with raw_client(OPEN_MODEL) as regular:
            answer = await regular.answer_to(big)
            assert answer.result.status is ErrorStatus.NONE
            assert answer.result.output_shapes == (OutputShape((1, 16)),)
    many = {f"x{index}": ("N", 16) for index in range(4)}
    arguments = tuple(RequestArgument(DataLocation(0, 64 * index, 64), (1, 16)) for index in range(4))
    outputs = tuple(RequestArgument(DataLocation(0, 1024 + 64 * index, 64), (0, 16)) for index in range(4))
    for identity in (None, 1):
        wide = RequestPacket(Request(arguments, outputs), (PoolReference(0),), True, identity)
        async with raw_client(identity_model(many), result_capacity=8) as small:
            answer = await small.answer_to(wide)
            assert answer.result.status is ErrorStatus.GENERAL_FAILURE
            assert nothing_computed(answer)
            assert answer.identity == identity
            assert identity is None or "does not fit into 8 datums" in answer.result.message
            assert nothing_computed(await small.answer_to(wide))


async def test_an_answer_keeps_its_status_when_only_its_text_is_too_long_for_the_queue() -> None:
    def fail() -> None:
        raise RuntimeError("x" * 100_000)

    async with raw_client(result_capacity=8) as client:
        client.engine.act = fail
        answer = await client.answer_to(FRAMED)
        assert (answer.result.status, answer.identity) == (ErrorStatus.GENERAL_FAILURE, 1)


async def test_error_texts_of_any_length_and_content_reach_the_client_cut() -> None:
    def fail() -> None:
        raise RuntimeError("\udcff\0€" * 30_000)

    async with raw_client() as client:
        client.engine.act = fail
        answer = await client.answer_to(FRAMED)
        assert answer.result.status is ErrorStatus.GENERAL_FAILURE
        assert answer.result.message.startswith("\\udcff\0€")
        assert len(answer.result.message.encode()) <= 1026


async def test_validate_burst_sanitized() -> None:
    """Padding bytes of every answer are zero: nothing of the driver's memory leaks."""
    async with raw_client(OPEN_MODEL) as client:
        await client.send(RequestPacket(open_request(64), (PoolReference(0),), True, 5))
        await client.results.wait_readable(6)
        datums = client.results.read(client.results.available_to_read())
        assert datums is not None
        kinds = datums_of(datums)
        assert [datum[0] for datum in kinds] == [0, 1, 2, 2, 3, 4]
        used = {0: range(8, 20), 1: (8, *range(12, 16)), 2: range(8, 12), 3: range(8, 24), 4: range(8, 24)}
        for datum in kinds:
            padding = set(range(1, 24)) - set(used[datum[0]])
            assert not any(datum[at] for at in padding), f"kind {datum[0]}"
        operand = kinds[1]
        assert operand[8] == 1  # isSufficient
        assert int.from_bytes(operand[12:16], "little") == 2  # number of dimensions, at 4 of the 8-byte struct


TWO = identity_model({"a": (1, 16), "b": (1, 16)})


@pytest.mark.every_combination  # one row per operand
@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("identity", [None, 9])
async def test_validate_request_remove_operand(side: str, index: int, identity: int | None) -> None:
    whole = request(inputs=2)
    left = tuple(argument for at, argument in enumerate(getattr(whole, side)) if at != index)
    async with raw_client(TWO) as client:
        answer = await client.answer_to(RequestPacket(replace(whole, **{side: left}), (PoolReference(0),), True, identity))
        assert answer.result.status is ErrorStatus.INVALID_ARGUMENT
        assert nothing_computed(answer)
        await client.server.free_memory(0)
        await client.server.free_memory(77)
        await client.server.free_memory(0)
        good = await client.answer_to(RequestPacket(whole, (PoolReference(0),), True, identity))
        assert good.result.status is ErrorStatus.NONE


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("identity", [None, 3])
async def test_evaluate_prepared_model_by_burst(measure: bool, identity: int | None) -> None:
    async with raw_client() as client:
        memory = client.slots.add(0)
        memory[:16] = range(16)
        answer = await client.answer_to(packet(identity=identity, measure_timing=measure))
        assert answer.result.status is ErrorStatus.NONE
        assert answer.result.output_shapes == ()
        assert memory[16:32].tolist() == [value + 1 for value in range(16)]
        timing = answer.result.timing
        assert (timing == NO_TIMING) is not measure
        assert not measure or timing.on_device_us <= timing.in_driver_us


@pytest.mark.parametrize("measure", [False, True])
async def test_unspecified_output_dimensions_are_told(measure: bool) -> None:
    async with raw_client(OPEN_MODEL) as client:
        answer = await client.answer_to(RequestPacket(open_request(64), (PoolReference(0),), measure, 1))
        assert answer.result.status is ErrorStatus.NONE
        assert answer.result.output_shapes == (OutputShape((1, 16)),)


@pytest.mark.parametrize("measure", [False, True])
async def test_an_output_one_byte_short_is_insufficient_and_its_shape_is_told(measure: bool) -> None:
    async with raw_client(OPEN_MODEL) as client:
        answer = await client.answer_to(RequestPacket(open_request(63), (PoolReference(0),), measure, 1))
        assert answer.result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert answer.result.output_shapes == (OutputShape((1, 16), False),)
        assert answer.result.timing == NO_TIMING


async def test_a_request_that_waited_past_its_deadline_is_not_executed() -> None:
    async with raw_client() as client:
        answer = await client.answer_to(packet(identity=1, deadline_ns=1))
        assert answer.result.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
        assert client.engine.runs == 0


async def test_framed_packets_may_come_together_and_are_answered_in_order() -> None:
    async with raw_client() as client:
        await client.send(b"".join(encode_request(packet(identity=number)) for number in range(1, 51)))
        answers: list[ResultPacket] = [await client.receive() for _ in range(50)]
        assert [answer.identity for answer in answers] == list(range(1, 51))
        assert all(answer.result.status is ErrorStatus.NONE for answer in answers)


async def test_an_identity_may_be_any_64_bits() -> None:
    async with raw_client() as client:
        body = encode_request_body(request(), (PoolReference(0),), False, framed=True)
        for identity in (0, 2**64 - 1):
            assert (await client.answer_to(body + identity_datum(identity, None))).identity == identity
