"""HAL calls as bytes, and back (msgpack through msgspec). No I/O: the same code runs in both processes.

    frame: length u32 | descriptors u16 | zero u16 | body          little-endian; length counts the body alone

Both ends call and answer: a `Call` carries one of the messages below, a `Reply` its value or a `Failure`, matched by id.
Descriptors travel beside the frame (SCM_RIGHTS), in the order in which the message speaks of them. The peer is not
trusted to be sane: lengths are bounded before a buffer grows, every field is decoded against its declared type, and
the values' own checks (`hal`) run on what comes in.
"""

from __future__ import annotations

import signal
from struct import Struct

import msgspec

from aionn.errors import AionnError, CallerError
from aionn.hal.model import Constant, Operation
from aionn.hal.types import (
    BufferDesc,
    BufferRole,
    CacheFiles,
    DeviceType,
    ErrorStatus,
    ExecutionPreference,
    GrantorDescriptor,
    MemoryDescription,
    MQFlavor,
    Operand,
    Priority,
    Request,
    Result,
)

PROTOCOL = 2
"""Grows with every change of a message; two ends of different numbers refuse each other at once."""

STACKS_SIGNAL = int(signal.SIGRTMIN) + 7
"""A driver that has greeted answers this signal by writing the stacks of all its threads into its statistics page."""

HEADER = Struct("<IHH")
MAX_BODY_BYTES = 256 * 2**20
MAX_DESCRIPTORS = 253
"""The kernel's own limit for one message (SCM_MAX_FD)."""


class ControlError(AionnError):
    """A frame that the peer should never have sent."""


class _Message(msgspec.Struct, frozen=True, tag=True, tag_field="verb", forbid_unknown_fields=True, array_like=True):
    pass


class MQMessage(_Message, frozen=True):
    """An `MQDescriptor`; its `fds` descriptors travel beside it."""

    grantors: tuple[GrantorDescriptor, ...]
    quantum: int
    flavor: MQFlavor
    fds: int


class ModelMessage(_Message, frozen=True):
    """A `hal.Model`; one descriptor per pool travels beside it."""

    graph: bytes
    inputs: tuple[tuple[str, Operand], ...]
    outputs: tuple[tuple[str, Operand], ...]
    operations: tuple[Operation, ...]
    constants: tuple[Constant, ...]
    pools: tuple[MemoryDescription, ...]
    token: bytes
    contents: bytes


class CacheMessage(_Message, frozen=True):
    """`CacheHandles`: that many model files, then data files, travel beside it."""

    model: int
    data: int
    token: bytes


class OptionsMessage(_Message, frozen=True):
    """`PrepareOptions`."""

    preference: ExecutionPreference
    priority: Priority
    deadline_ns: int | None
    threads: int
    open_outputs: tuple[str, ...] = ()


class PoolMessage(_Message, frozen=True):
    """A pool of an execution: a memory whose descriptor travels beside it, or a buffer of the driver by token."""

    memory: MemoryDescription | None
    token: int = 0


# --- calls: the app asks the driver ------------------------------------------------------------------------------------


class GetSupportedOperations(_Message, frozen=True):
    model: ModelMessage


class PrepareModel(_Message, frozen=True):
    model: ModelMessage
    options: OptionsMessage
    cache: CacheMessage | None


class PrepareModelFromCache(_Message, frozen=True):
    options: OptionsMessage
    cache: CacheMessage


class Execute(_Message, frozen=True):
    prepared: int
    request: Request
    pools: tuple[PoolMessage, ...]
    measure_timing: bool
    deadline_ns: int | None


class ConfigureExecutionBurst(_Message, frozen=True):
    prepared: int
    request_channel: MQMessage
    result_channel: MQMessage


class FreeMemory(_Message, frozen=True):
    burst: int
    slot: int


class CloseBurst(_Message, frozen=True):
    burst: int


class ReleasePreparedModel(_Message, frozen=True):
    prepared: int


class Allocate(_Message, frozen=True):
    desc: BufferDesc
    prepared_models: tuple[int, ...]
    input_roles: tuple[BufferRole, ...]
    output_roles: tuple[BufferRole, ...]


class CopyFrom(_Message, frozen=True):
    """`offset`, `length`: the part of the memory that is meant; None: to its end."""

    token: int
    source: MemoryDescription
    dimensions: tuple[int, ...]
    offset: int = 0
    length: int | None = None


class CopyTo(_Message, frozen=True):
    """`offset`, `length`: as `CopyFrom`."""

    token: int
    target: MemoryDescription
    offset: int = 0
    length: int | None = None


class FreeBuffer(_Message, frozen=True):
    token: int


# --- calls: the driver asks the app ------------------------------------------------------------------------------------


class GetMemories(_Message, frozen=True):
    burst: int
    slots: tuple[int, ...]


# --- answers and events --------------------------------------------------------------------------------------------------


class Flags(_Message, frozen=True):
    supported: tuple[bool, ...]


class Prepared(_Message, frozen=True):
    """A prepared model and what the app needs to know of it: its operands come along, for a model loaded from a cache.

    `outcome`: what became of the cache files that were sent: "" or a reason (a declined or failed save).
    """

    prepared: int
    inputs: tuple[tuple[str, Operand], ...]
    outputs: tuple[tuple[str, Operand], ...]
    outcome: str = ""


class Executed(_Message, frozen=True):
    result: Result


class Configured(_Message, frozen=True):
    burst: int


class Allocated(_Message, frozen=True):
    token: int


class Memories(_Message, frozen=True):
    """One descriptor per memory travels beside it."""

    memories: tuple[MemoryDescription, ...]


class Done(_Message, frozen=True):
    pass


class Failure(_Message, frozen=True):
    """An exception of `aionn.errors` by name, with its attributes; any other is an ExecutionError or what the caller makes of it."""

    kind: str
    message: str
    node: str | None = None
    reason: str | None = None
    status: int = int(ErrorStatus.GENERAL_FAILURE)
    shapes: dict[str, tuple[int, ...]] = {}
    transient: bool = True
    device: str = ""
    needed_bytes: int = 0
    available_bytes: int | None = None


class Ready(_Message, frozen=True):
    """The first frame of a driver: who it is. The descriptor of its statistics page travels beside it."""

    protocol: int
    name: str
    version: str
    type: DeviceType
    cache_files: CacheFiles
    priority_matters: bool = False


class Refused(_Message, frozen=True):
    """The first frame of a driver that cannot serve."""

    failure: Failure


CallBody = (
    GetSupportedOperations
    | PrepareModel
    | PrepareModelFromCache
    | Execute
    | ConfigureExecutionBurst
    | FreeMemory
    | CloseBurst
    | ReleasePreparedModel
    | Allocate
    | CopyFrom
    | CopyTo
    | FreeBuffer
    | GetMemories
)
ReplyBody = Flags | Prepared | Executed | Configured | Allocated | Memories | Done | Failure


class Call(_Message, frozen=True):
    id: int
    body: CallBody


class Reply(_Message, frozen=True):
    id: int
    body: ReplyBody


class Cancel(_Message, frozen=True):
    """Nobody waits for call `id` any more. It is still answered."""

    id: int


Message = Call | Reply | Cancel | Ready | Refused

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message, descriptors: int) -> bytes:
    """One whole frame.

    Raises:
        CallerError: the message is larger than a frame may be, speaks of too many descriptors, or holds what no message can.
    """
    try:
        body = _ENCODER.encode(message)
    except (TypeError, OverflowError, ValueError) as error:
        raise CallerError(f"a control message cannot be sent: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise CallerError(
            f"a control message of {len(body)} bytes: at most {MAX_BODY_BYTES} fit; the graph without its large constants is too large"
        )
    if descriptors > MAX_DESCRIPTORS:
        raise CallerError(f"a control message with {descriptors} descriptors: the kernel passes at most {MAX_DESCRIPTORS}; use fewer pools")
    return HEADER.pack(len(body), descriptors, 0) + body


def decode_header(header: bytes) -> tuple[int, int]:
    """Length of the body and number of descriptors.

    Raises:
        ControlError: no frame begins like this.
    """
    length, descriptors, zero = HEADER.unpack(header)
    if zero or length > MAX_BODY_BYTES or descriptors > MAX_DESCRIPTORS:
        raise ControlError(f"control frame: {length} bytes with {descriptors} descriptors; at most {MAX_BODY_BYTES} and {MAX_DESCRIPTORS}")
    return length, descriptors


def decode(body: bytes | bytearray | memoryview) -> Message:
    """One message.

    Raises:
        ControlError: it is not one of ours, or a field has the wrong type or value.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError, MemoryError) as error:
        raise ControlError(f"control message of {len(body)} bytes: {error or type(error).__name__}") from error
