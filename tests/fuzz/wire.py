"""Packets, control frames, the socket they come through, and requests for memory."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

from aionn.burst.packets import (
    DATUM_BYTES,
    PacketError,
    PoolReference,
    RequestPacket,
    ResultPacket,
    decode_request,
    decode_result,
    is_framed_request,
    is_framed_result,
    read_identity,
    read_result_identity,
    split_requests,
    split_results,
)
from aionn.errors import AionnError, CompilationError
from aionn.hal.model import Constant, Operation
from aionn.hal.queues import GrantorDescriptor, MQFlavor
from aionn.hal.types import (
    BufferDesc,
    BufferRole,
    CacheFiles,
    DataLocation,
    DeviceType,
    ErrorStatus,
    ExecutionPreference,
    FencedResult,
    MemoryDescription,
    MemoryKind,
    Operand,
    OperandType,
    OutputShape,
    Priority,
    Request,
    RequestArgument,
    Result,
    Timing,
)
from aionn.hal.values import TypeMessage, ValueKind
from aionn.memory.requests import check_request
from aionn.remote import calls, control
from aionn.remote.calls import Fd, HalCall, LentMemory
from aionn.remote.connection import ControlSocket, Descriptors
from aionn.remote.control import HEADER, ControlError, Message, error_of, failure_of
from tests.burst.whole_packets import encode_request, encode_result
from tests.fuzz.choices import Choices

# ---- packets ----------------------------------------------------------------------------------------------------------


def request_seeds() -> list[bytes]:
    argument = RequestArgument(DataLocation(0, 64, 256), (1, 16))
    omitted = RequestArgument(DataLocation(0, 0, 0), (), has_no_value=True)
    requests = [
        RequestPacket(Request((argument,), (argument,)), (PoolReference(0),), True),
        RequestPacket(Request((argument, omitted), (argument,)), (PoolReference(0), PoolReference(-1, 7)), False, 3, 10**12),
        RequestPacket(Request((), ()), (), False, 2**64 - 1),
    ]
    encoded = [encode_request(packet) for packet in requests]
    return [*encoded, encoded[1] + encoded[2], encoded[2] + encoded[1] + encoded[0]]


def requests(data: bytes) -> None:
    """Cut and decoded, as a server does it; what is decoded means the same once more."""
    pieces = split_requests(data[: len(data) - len(data) % DATUM_BYTES])
    assert b"".join(pieces) == data[: len(data) - len(data) % DATUM_BYTES]
    for piece in (data, *pieces):
        try:
            packet = decode_request(piece)
        except PacketError:
            continue
        assert is_framed_request(piece) == (packet.identity is not None)
        if packet.identity is not None:
            assert read_identity(piece) == (packet.identity, packet.deadline_ns)
        if all(pool.slot >= 0 or pool.token for pool in packet.pools):  # others can be received, never sent
            assert decode_request(encode_request(packet)) == packet


def result_seeds() -> list[bytes]:
    shapes = (OutputShape((1, 16)), OutputShape((), False))
    results = [
        ResultPacket(Result(ErrorStatus.NONE, shapes, Timing(3, 5))),
        ResultPacket(Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes), 7, 1000),
        ResultPacket(Result(ErrorStatus.GENERAL_FAILURE, message="an engine's own words, longer than one datum"), 8, 1),
    ]
    encoded = [encode_result(packet) for packet in results]
    return [*encoded, encoded[1] + encoded[2]]


def results(data: bytes) -> None:
    """Cut and decoded, as a client does it."""
    pieces = split_results(data[: len(data) - len(data) % DATUM_BYTES])
    assert b"".join(pieces) == data[: len(data) - len(data) % DATUM_BYTES]
    for piece in (data, *pieces):
        try:
            packet = decode_result(piece)
        except PacketError:
            continue
        assert is_framed_result(piece) == (packet.identity is not None)
        if packet.identity is not None:
            assert read_result_identity(piece) == (packet.identity, packet.service_ns)
        again = decode_result(encode_result(packet))
        # A message of stray bytes grows when it is made readable, and a failed execution's times are dropped.
        assert (again.result.status, again.result.output_shapes, again.identity) == (
            packet.result.status,
            packet.result.output_shapes,
            packet.identity,
        )


# ---- control frames -----------------------------------------------------------------------------------------------------


def messages() -> list[Message]:
    """One of nearly every kind."""
    operand = Operand(OperandType.FLOAT32, (0, 16), ("N", None))
    memory = LentMemory(MemoryDescription(MemoryKind.ASHMEM, 4096), Fd(0))
    constant = Constant("c", operand, DataLocation(0, 0, 64))
    border = (("x", operand),), (("y", operand),)
    model = calls.ModelMessage(b"graph", *border, (Operation("a", "Add", ""),), (constant,), (memory,), bytes(32), b"")
    engine = calls.EngineOptionsMessage({"level": 1, "file": "/x"}, {"file": (bytes(32), Fd(0))})
    options = calls.OptionsMessage(ExecutionPreference.FAST_SINGLE_ANSWER, Priority.MEDIUM, None, 1, engine=engine)
    queue = calls.MQMessage((GrantorDescriptor(0, 0, 8), GrantorDescriptor(0, 64, 8)), 24, MQFlavor.SYNCHRONIZED, (Fd(0),) * 3)
    argument = RequestArgument(DataLocation(0, 0, 64), (1, 16))
    request, values = Request((argument,), (argument,)), calls.Values(b"\x91\x92\x90\x00", b"data", memory)
    bodies: list[HalCall[Any]] = [
        calls.GetSupportedOperations(model),
        calls.PrepareModel(model, options, calls.CacheMessage((Fd(0),), (Fd(0),), bytes(32))),
        calls.PrepareModelFromCache(options, calls.CacheMessage((Fd(0),), (), bytes(32))),
        calls.Execute(1, request, (memory, 3), True, 10**15),
        calls.ExecuteFenced(1, request, (memory, 3), True, 10**15, Fd(0), (calls.DependencyMessage(Fd(0), True),)),
        calls.ConfigureExecutionBurst(1, queue, queue, brought={0: memory}),
        calls.ExecuteValues(1, values, True, 10**15),
        calls.FreeMemory(1, 2),
        calls.Allocate(BufferDesc((1, 2)), (1,), (BufferRole(0, 0, 0.5),), ()),
        calls.CopyFrom(1, memory, (1, 2)),
        calls.GetMemories(1, (0, 1, 2)),
        calls.LogLine(40, "aionn.driver", "text"),
    ]
    return [
        *map(control.CallMessage, range(len(bodies)), bodies),
        *(control.Reply(number, answer) for number, (_, answer) in enumerate(answers())),
        control.Failed(1, failure_of(CompilationError("no", node="a", reason="b"))),
        control.Cancel(3),
        control.Attach(Fd(0), 1),
        control.Ready(control.PROTOCOL, "fake", "1", DeviceType.CPU, CacheFiles(1, 1), page=(Fd(0), Fd(1))),
        control.Refused(control.Failure("CallerError", "no")),
    ]


def answers() -> list[tuple[type[HalCall[Any]], object]]:
    """One of nearly every kind, and the call that it answers."""
    operand = Operand(OperandType.FLOAT32, (0, 16), ("N", None))
    memory = LentMemory(MemoryDescription(MemoryKind.ASHMEM, 4096), Fd(0))
    rows = TypeMessage(ValueKind.SEQUENCE, TypeMessage(ValueKind.MAP, operand, OperandType.STRING))
    result = Result(ErrorStatus.NONE, (OutputShape((1,)),), Timing(1, 2), "")
    return [
        (calls.GetSupportedOperations, (True, False)),
        (calls.PrepareModel, calls.Prepared(1, (("x", operand),), (("y", operand),), "declined")),
        (calls.PrepareModelFromCache, calls.Prepared(1, (("x", rows),), (("y", rows),), "")),
        (calls.Execute, result),
        (calls.ExecuteFenced, FencedResult(result, 1, Timing(1, 2))),
        (calls.ExecuteValues, calls.ExecutedValues(Result(ErrorStatus.NONE), calls.Values(b"\x91\xc0", b"data"))),
        (calls.ExecuteValues, calls.ExecutedValues(Result(ErrorStatus.NONE), calls.Values(b"\x91\xc0", b"", memory))),
        (calls.Allocate, 1),
        (calls.HasRequest, True),
        (calls.ExportAgain, "saved"),
        (calls.FreeBuffer, None),
        (calls.GetMemories, (memory, memory)),
    ]


def frame_seeds() -> list[bytes]:
    return [control.encode(message)[0] for message in messages()]


def frames(data: bytes) -> None:
    """A header and a body; what is decoded can be sent on, and means the same."""
    with suppress(ControlError):
        length, descriptors = control.decode_header(data[: HEADER.size].ljust(HEADER.size, b"\0"))
        assert 0 <= length <= control.MAX_BODY_BYTES
        assert 0 <= descriptors <= control.MAX_DESCRIPTORS
    try:
        message = control.decode(data[HEADER.size :], lambda: Fd(0))
    except ControlError:
        return
    if isinstance(message, control.Reply):  # each call's answer is read or refused
        for call in {call for call, _ in answers()}:
            with suppress(ControlError):
                answer = control.decode(message.answer, lambda: Fd(0), call)
                again = control.decode(control.encode(control.Reply(message.id, answer))[0][HEADER.size :], lambda: Fd(0))
                assert isinstance(again, control.Reply)
                assert repr(control.decode(again.answer, lambda: Fd(0), call)) == repr(answer)
        return
    sent, _ = control.encode(message)
    assert control.encode(control.decode(sent[HEADER.size :], lambda: Fd(0)))[0] == sent
    if isinstance(message, control.Failed):
        assert isinstance(error_of(message.failure), AionnError)


def channel_seeds() -> list[bytes]:
    """Pieces: a header byte (descriptors in the high half, 0: the end), a length u16, the bytes."""
    seeds = []
    for message in messages():
        frame, named = control.encode(message)
        fds = len(named)
        halves = frame[: len(frame) // 2], frame[len(frame) // 2 :]
        seeds.append(_piece(frame, fds))
        seeds.append(_piece(halves[0], fds) + _piece(halves[1], 0) + _piece(frame, fds))
    return seeds


def _piece(content: bytes, fds: int) -> bytes:
    return bytes([(fds << 4 | 1) & 0xFF]) + len(content).to_bytes(2, "little") + content


_loops: list[asyncio.AbstractEventLoop] = []


def fuzz_loop() -> asyncio.AbstractEventLoop:
    """One loop for all inputs of this process: making one takes longer than most inputs."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


def let_go_of_loop() -> None:
    while _loops:
        _loops.pop().close()


def channel(data: bytes) -> None:
    """Pieces through a real socket pair, some with descriptors: a message or the end comes of it, and no descriptor stays open."""
    fuzz_loop().run_until_complete(_channel(Choices(data)))


async def _channel(choices: Choices) -> None:
    ends: list[Exception | None] = []
    held: list[Descriptors] = []
    before = len(os.listdir("/proc/self/fd"))

    def on_message(message: Message, descriptors: Descriptors) -> None:
        assert not ends, "a message after the end"
        if len(descriptors) > 1:
            os.close(descriptors.take(Fd(min(descriptors._open))))
        held.append(descriptors)

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.setblocking(False)
    receiving = ControlSocket(ours, on_message, ends.append)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(64):
            kind = choices.byte()
            if not kind or not choices.left:
                break
            content = choices.piece(int.from_bytes(choices.piece(2), "little"))
            fds = [null] * (kind >> 4)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            if content:
                with suppress(OSError):  # our end has ended, or the socket is full
                    theirs.sendmsg([content], rights, socket.MSG_NOSIGNAL)
            receiving.drain()
        theirs.close()
        receiving.drain()
        assert len(ends) == 1, f"{len(ends)} ends"
        assert ends[0] is None or isinstance(ends[0], ControlError), repr(ends[0])
        assert receiving.closed
    finally:
        theirs.close()
        receiving.close()
        for descriptors in held:
            descriptors.close()
        os.close(null)
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor stays open"


# ---- requests for memory --------------------------------------------------------------------------------------------------

_TYPES = (OperandType.UINT8, OperandType.FLOAT16, OperandType.FLOAT32, OperandType.INT64)


def memory_seeds() -> list[bytes]:
    return [bytes(64), bytes(range(256)), bytes([1, 1, 0, 2, 1, 2, 2, 1, 1, 64, 64, 0, 0, 0, 4, 0, 1, 1, 1, 0, 16, 0, 4])]


def memory_requests(data: bytes) -> None:
    """The verdict is that of the rules read one by one, each byte counted where there are few."""
    choices = Choices(data)
    sizes = [choices.of((0, 1, 8, 24, 64, 2**63, choices.byte())) for _ in range(choices.below(4))]
    sides: list[list[tuple[str, Operand]]] = []
    arguments: list[tuple[RequestArgument, ...]] = []
    for word in ("i", "o"):
        operands = []
        for index in range(choices.below(4)):
            rank = choices.below(5)
            dimensions = None if rank == 4 else tuple(choices.below(4) for _ in range(rank))
            operands.append((f"{word}{index}", Operand(choices.of(_TYPES), dimensions)))
        sides.append(operands)
        wrong_count = choices.byte() == 255
        arguments.append(tuple(_argument(choices, operand) for _, operand in operands)[: -1 if wrong_count else None])
    open_outputs = choices.byte() < 128
    request = Request(*arguments)
    said = check_request(sides[0], sides[1], request, sizes, open_outputs=open_outputs)
    right = _fits(sides[0], sides[1], request, sizes, open_outputs)
    assert (said is None) == right, f"{said!r} of {request} with {sides}, pools {sizes}, open_outputs={open_outputs}"


def _argument(choices: Choices, operand: Operand) -> RequestArgument:
    """Right more often than not, or nothing past the first rule would be tried."""
    dimensions = tuple(extent or choices.below(4) for extent in operand.dimensions or ())
    if choices.byte() < 48:
        dimensions = tuple(choices.below(5) - 1 for _ in range(choices.below(4)))
    length = prod(dimensions) * operand.type.element_bytes
    twist = choices.byte()
    if twist < 32:
        length += choices.below(9) - 4
    elif twist < 48:
        length = choices.number()
    offset = choices.below(64) if choices.byte() < 224 else choices.number()
    place = DataLocation(choices.of((0, 0, 0, 1, 1, 2, -1)), offset, length)
    no_value = choices.byte() > 240
    if no_value and choices.byte() < 128:
        place, dimensions = DataLocation(0, 0, 0), ()
    return RequestArgument(place, dimensions if choices.byte() < 160 else (), no_value)


def _fits(
    inputs: Sequence[tuple[str, Operand]],
    outputs: Sequence[tuple[str, Operand]],
    request: Request,
    sizes: Sequence[int],
    open_outputs: bool,
) -> bool:
    if (len(inputs), len(outputs)) != (len(request.inputs), len(request.outputs)):
        return False
    for is_input, operands, arguments in ((True, inputs, request.inputs), (False, outputs, request.outputs)):
        for (_, operand), argument in zip(operands, arguments, strict=True):
            if not _argument_fits(operand, argument, sizes, is_input, open_outputs):
                return False
    written = [argument.location for argument in request.outputs]
    touched = [*written, *(argument.location for argument in request.inputs)]
    return not any(
        _share_a_byte(output, other) for index, output in enumerate(written) for number, other in enumerate(touched) if number != index
    )


def _share_a_byte(one: DataLocation, other: DataLocation) -> bool:
    if one.pool_index != other.pool_index:
        return False
    if max(one.length, other.length) < 1024:
        return bool(set(range(one.offset, one.offset + one.length)) & set(range(other.offset, other.offset + other.length)))
    return min(one.length, other.length) > 0 and one.offset < other.offset + other.length and other.offset < one.offset + one.length


def _argument_fits(operand: Operand, argument: RequestArgument, sizes: Sequence[int], is_input: bool, open_outputs: bool) -> bool:
    place, given, own = argument.location, argument.dimensions, operand.dimensions
    if argument.has_no_value:
        return place == DataLocation(0, 0, 0) and given == ()
    if place.pool_index not in range(len(sizes)) or min(place.offset, place.length) < 0:
        return False
    size = sizes[place.pool_index]
    if place.offset + place.length > size or any(extent < 0 for extent in given):
        return False
    token = size == 0
    shape: list[int] | None
    if given and own is not None:
        if len(given) != len(own):
            return False
        shape = []
        for mine, theirs in zip(own, given, strict=True):
            if mine and theirs not in ((mine,) if is_input else (mine, 0)):
                return False
            shape.append(theirs or mine)
        if is_input and 0 in given:
            return False
    elif given:
        shape = list(given)
        if is_input and 0 in given:
            return False
    else:
        shape = None if own is None else list(own)
        if is_input and shape is not None and 0 in shape and not token:
            return False
    known = shape is not None and 0 not in shape
    if not is_input and not known and not open_outputs:
        return False
    if token:
        return True
    if is_input:
        return place.length == prod(shape or ()) * operand.type.element_bytes
    if known and shape is not None:
        return place.length >= prod(shape) * operand.type.element_bytes
    return place.length > 0
