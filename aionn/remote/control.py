"""HAL calls as bytes, and back (msgpack through msgspec). No I/O: the same code runs in both processes.

    frame: length u32 | descriptors u16 | zero u16 | body          little-endian; length counts the body alone

Both ends call and answer. A `Call` carries one of the messages below, a `Reply` its value or a `Failure`; ids match them.
Descriptors travel beside the frame (SCM_RIGHTS), in the order in which the message names them. The peer is not trusted to be
correct. Lengths are bounded before a buffer grows, every field is decoded against its declared type, and the checks of the
values themselves (`hal`) run on what comes in.
"""

from __future__ import annotations

import signal
from struct import Struct

import msgspec

from aionn.errors import AionnError, CallerError
from aionn.hal.performance import Performance
from aionn.hal.types import (
    NO_TIMING,
    BufferDesc,
    BufferRole,
    CacheFiles,
    DeviceType,
    ErrorStatus,
    MemoryDescription,
    Request,
    Result,
    Timing,
)
from aionn.hal.values import Border
from aionn.remote.parts import CacheMessage, ControlMessage, ModelMessage, MQMessage, OptionsMessage, PoolMessage
from aionn.sandbox.report import Confinement

PROTOCOL = 9
"""Grows with every change of a message. Two ends with different numbers refuse each other at once."""

STACKS_SIGNAL = int(signal.SIGRTMIN) + 7
"""A driver that has greeted answers this signal by writing the stacks of all its threads into its statistics page."""

HEADER = Struct("<IHH")
MAX_BODY_BYTES = 256 * 2**20
MAX_DESCRIPTORS = 253
"""The kernel's own limit for one message (SCM_MAX_FD)."""


class ControlError(AionnError):
    """The peer has sent a frame or a message that the protocol does not allow."""


# --- calls: the app asks the driver ------------------------------------------------------------------------------------


class GetSupportedOperations(ControlMessage, frozen=True):
    """Attributes: `options` and `files` are as in `OptionsMessage`, whose descriptors follow those of the model."""

    model: ModelMessage
    options: dict[str, str | int | float | bool] = msgspec.field(default_factory=dict)
    files: dict[str, bytes] = msgspec.field(default_factory=dict)


class PrepareModel(ControlMessage, frozen=True):
    model: ModelMessage
    options: OptionsMessage
    cache: CacheMessage | None


class PrepareModelFromCache(ControlMessage, frozen=True):
    options: OptionsMessage
    cache: CacheMessage


class Adopt(ControlMessage, frozen=True):
    """Prepare from an artifact that another machine has compiled; see `IDevice.adopt`. The token in `cache` is the entry's key."""

    options: OptionsMessage
    cache: CacheMessage
    model_digest: bytes
    signed: bytes


class Execute(ControlMessage, frozen=True):
    """An execution. The descriptors of its memories travel beside the message.

    Attributes:
        fenced: whether a fence to be signalled is the first descriptor.
        after: per dependency whether it is a fence of aionn. Their descriptors follow that of the fence.
    """

    prepared: int
    request: Request
    pools: tuple[PoolMessage, ...]
    measure_timing: bool
    deadline_ns: int | None
    fenced: bool = False
    after: tuple[bool, ...] = ()


class ExecuteValues(ControlMessage, frozen=True):
    """Execute with strings, sequences, maps or optionals; see `remote.values`.

    Attributes:
        tree: the inputs. data: what their tensors hold, if it is small.
        memory: else the memory that holds it, whose descriptor travels beside the message.
    """

    prepared: int
    tree: bytes
    data: bytes
    memory: MemoryDescription | None
    measure_timing: bool
    deadline_ns: int | None


class ConfigureExecutionBurst(ControlMessage, frozen=True):
    prepared: int
    request_channel: MQMessage
    result_channel: MQMessage
    anticipate: bool = False


class ExportAgain(ControlMessage, frozen=True):
    """Ask for a better artifact of a prepared model, or store it in the cache files that come with the call."""

    prepared: int
    cache: CacheMessage | None


class FreeMemory(ControlMessage, frozen=True):
    burst: int
    slot: int


class CloseBurst(ControlMessage, frozen=True):
    burst: int


class HasRequest(ControlMessage, frozen=True):
    """Ask whether a burst's listener still has a request to answer. `identity` is that of the request's packet."""

    burst: int
    identity: int


class ReleasePreparedModel(ControlMessage, frozen=True):
    prepared: int


class Allocate(ControlMessage, frozen=True):
    desc: BufferDesc
    prepared_models: tuple[int, ...]
    input_roles: tuple[BufferRole, ...]
    output_roles: tuple[BufferRole, ...]


class CopyFrom(ControlMessage, frozen=True):
    """Copy a part of a memory into a buffer.

    Attributes:
        offset: where the part begins in the memory.
        length: how long the part is. With None it reaches to the memory's end.
    """

    token: int
    source: MemoryDescription
    dimensions: tuple[int, ...]
    offset: int = 0
    length: int | None = None


class CopyTo(ControlMessage, frozen=True):
    """Copy a buffer into a part of a memory. `offset` and `length` are as in `CopyFrom`."""

    token: int
    target: MemoryDescription
    offset: int = 0
    length: int | None = None


class FreeBuffer(ControlMessage, frozen=True):
    token: int


# --- calls: the driver asks the app ------------------------------------------------------------------------------------


class GetMemories(ControlMessage, frozen=True):
    burst: int
    slots: tuple[int, ...]


class LogLine(ControlMessage, frozen=True):
    """A line of the driver's log. Level and logger are as in `logging`."""

    level: int
    logger: str
    text: str


# --- answers and events --------------------------------------------------------------------------------------------------


class Flags(ControlMessage, frozen=True):
    supported: tuple[bool, ...]


class Prepared(ControlMessage, frozen=True):
    """A prepared model, with its operands for an app that has loaded the model from a cache.

    Attributes:
        outcome: what the device did with the cache files of the call; see `IPreparedModel.save_outcome`.
        contents: what `known_contents` is for the constants that were compiled, if the device copied them.
        runs_on: what computes the model, if the engine says so.
        tunes: whether the model may offer a better artifact while it runs.
    """

    prepared: int
    inputs: tuple[tuple[str, Border], ...]
    outputs: tuple[tuple[str, Border], ...]
    outcome: str = ""
    contents: bytes = b""
    runs_on: str = ""
    tunes: bool = False


class Executed(ControlMessage, frozen=True):
    """The answer to an execution. `failed` and `since_launch` are those of `hal.FencedResult`."""

    result: Result
    failed: int | None = None
    since_launch: Timing = NO_TIMING


class ExecutedValues(ControlMessage, frozen=True):
    """The result, and if it is a success the outputs, as the inputs in `ExecuteValues`."""

    result: Result
    tree: bytes = b""
    data: bytes = b""
    memory: MemoryDescription | None = None


class ExportedAgain(ControlMessage, frozen=True):
    outcome: str


class Configured(ControlMessage, frozen=True):
    burst: int


class RequestFound(ControlMessage, frozen=True):
    known: bool


class Allocated(ControlMessage, frozen=True):
    token: int


class Memories(ControlMessage, frozen=True):
    """Memories of a burst. One descriptor per memory travels beside the message."""

    memories: tuple[MemoryDescription, ...]


class Done(ControlMessage, frozen=True):
    pass


class Failure(ControlMessage, frozen=True):
    """An exception of `aionn.errors` by name, with its attributes. Any other exception travels as an `ExecutionError`."""

    kind: str
    message: str
    node: str | None = None
    reason: str | None = None
    status: int = int(ErrorStatus.GENERAL_FAILURE)
    shapes: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    transient: bool = True
    device: str = ""
    needed_bytes: int = 0
    available_bytes: int | None = None
    notes: tuple[str, ...] = ()


class Ready(ControlMessage, frozen=True):
    """The first frame of a driver, with the facts of its device. The descriptor of its statistics page travels beside it."""

    protocol: int
    name: str
    version: str
    type: DeviceType
    cache_files: CacheFiles
    priority_matters: bool = False
    performance: Performance = Performance()
    providers: tuple[str, ...] = ()
    runs_on: str = ""
    sandbox: Confinement = Confinement()


class Refused(ControlMessage, frozen=True):
    """The first frame of a driver that cannot serve."""

    failure: Failure


CallBody = (
    GetSupportedOperations
    | PrepareModel
    | PrepareModelFromCache
    | Adopt
    | Execute
    | ExecuteValues
    | ConfigureExecutionBurst
    | FreeMemory
    | CloseBurst
    | HasRequest
    | ReleasePreparedModel
    | Allocate
    | CopyFrom
    | CopyTo
    | FreeBuffer
    | ExportAgain
    | GetMemories
    | LogLine
)
ReplyBody = Flags | Prepared | Executed | ExecutedValues | ExportedAgain | Configured | RequestFound | Allocated | Memories | Done | Failure


class Call(ControlMessage, frozen=True):
    id: int
    body: CallBody


class Reply(ControlMessage, frozen=True):
    id: int
    body: ReplyBody


class Cancel(ControlMessage, frozen=True):
    """The caller of call `id` has stopped waiting. The peer still answers the call."""

    id: int


Message = Call | Reply | Cancel | Ready | Refused

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message, descriptors: int) -> bytes:
    """Return one whole frame.

    Raises:
        CallerError: the message is too large, has too many descriptors, or holds a value that no message can carry.
    """
    try:
        body = _ENCODER.encode(message)
    except (TypeError, OverflowError, ValueError) as error:
        raise CallerError(f"the call cannot be sent, because a value in it does not fit a message: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise CallerError(
            f"the call needs a message of {len(body)} bytes, but at most {MAX_BODY_BYTES} fit; "
            "make the graph smaller (its large constants do not count)"
        )
    if descriptors > MAX_DESCRIPTORS:
        raise CallerError(
            f"the call needs a message with {descriptors} descriptors, but the kernel passes at most {MAX_DESCRIPTORS}; use fewer memories"
        )
    return HEADER.pack(len(body), descriptors, 0) + body


def decode_header(header: bytes) -> tuple[int, int]:
    """Return the length of the body and the number of descriptors.

    Raises:
        ControlError: a frame cannot begin with these bytes.
    """
    length, descriptors, zero = HEADER.unpack(header)
    if zero or length > MAX_BODY_BYTES or descriptors > MAX_DESCRIPTORS:
        raise ControlError(
            f"the peer announced a frame of {length} bytes with {descriptors} descriptors; at most {MAX_BODY_BYTES} and "
            f"{MAX_DESCRIPTORS} are allowed"
        )
    return length, descriptors


def decode(body: bytes | bytearray | memoryview) -> Message:
    """Return the message in the body of a frame.

    Raises:
        ControlError: the protocol has no such message, or a field has the wrong type or value.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError, MemoryError) as error:
        raise ControlError(f"the peer sent {len(body)} bytes that are not a control message: {error or type(error).__name__}") from error
