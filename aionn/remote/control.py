"""Control frames as bytes, and back (msgpack through msgspec). No I/O: the same code runs in both processes.

    frame: length u32 | descriptors u16 | zero u16 | body          little-endian; length counts the body alone

Both ends call and answer. A `CallMessage` carries one of the calls of `calls`, and a `Reply` or a `Failed` with its id answers it.
Descriptors travel beside the frame (SCM_RIGHTS), in the order of the message's fields of type `Fd`. The peer is not trusted to be
correct. Lengths are bounded before a buffer grows, every field is decoded against its declared type, and the checks of the
values themselves (`hal`) run on what comes in.

Exceptions travel as messages, too. A failure keeps its class, its text and its attributes.
"""

# No `from __future__ import annotations`: msgspec would have to evaluate each annotation, which takes 2 ms of a start.
import signal
import threading
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any, Generic, TypeVar, Union, cast, get_args

import msgspec

from aionn.errors import (
    AionnError,
    CallerError,
    CompilationError,
    DeadlineError,
    DeviceUnavailableError,
    DriverDiedError,
    DriverHungError,
    ExecutionError,
    MemoryAllocationError,
    ModelQuarantinedError,
    OutputInsufficientSizeError,
    QuotaError,
    ServiceDiedError,
    text_of,
)
from aionn.escapes import escaped
from aionn.hal.types import CacheFiles, DeviceType, ErrorStatus, Performance
from aionn.needs import Confinement
from aionn.remote.calls import ControlMessage, Fd, HalCall

A = TypeVar("A")

PROTOCOL = 17
"""Grows with every change of a message. Two ends with different numbers refuse each other at once."""

STACKS_SIGNAL = int(signal.SIGRTMIN) + 7
"""A driver that has greeted answers this signal by writing the stacks of all its threads beside its statistics page."""

HEADER = Struct("<IHH")
MAX_BODY_BYTES = 256 * 2**20
GUEST_BODY_BYTES = 16 * 2**20
"""Of a message that an app sends to a driver of others. A driver holds each message whole, before it is checked."""

MAX_DESCRIPTORS = 253
"""The kernel's own limit for one message (SCM_MAX_FD)."""


class ControlError(AionnError):
    """The peer has sent a frame or a message that the protocol does not allow."""


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
    what: str = ""
    limit: int = 0
    used: int = 0
    until_s: float = 0.0


class Ready(ControlMessage, frozen=True):
    """The first frame of a driver, with the facts of its device. `page` has the descriptors of its
    statistics page, and of the memory by which its owner asks it for trace records and stacks."""

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
    page: tuple[Fd, ...] = ()


class ServiceReady(ControlMessage, frozen=True):
    """The first frame of a service. `release` is that of its aionn."""

    protocol: int
    release: str


class Refused(ControlMessage, frozen=True):
    """The first frame of a driver or a service that cannot serve."""

    failure: Failure


class CallMessage(ControlMessage, Generic[A], frozen=True):
    id: int
    body: A


class Reply(ControlMessage, Generic[A], frozen=True):
    """The answer to a call. It arrives as bytes, because only the caller knows its type (`decode`)."""

    id: int
    answer: A


class Failed(ControlMessage, frozen=True):
    """The error that a call is answered with."""

    id: int
    failure: Failure


class Cancel(ControlMessage, frozen=True):
    """The caller of call `id` has stopped waiting. The peer still answers the call."""

    id: int


class Attach(ControlMessage, frozen=True):
    """A further client of the driver. It has no answer, but the driver greets the new client.

    Attributes:
        socket: the driver's end of the connection with the client.
        prepared: the prepared model that the client gets, by its number with the client that sends this. The new client knows the model
            as `ATTACHED`, and keeps it in the driver. 0: the client gets none.
        guest: the number of another app, as the sender counts them. Such a client lives on when the sender has gone. 0: it is the sender's.
    """

    socket: Fd
    prepared: int
    guest: int = 0


ATTACHED = 1
"""The number of the prepared model that a client has from the beginning."""

Message = CallMessage[Any] | Reply[Any] | Failed | Cancel | Attach | Ready | Refused | ServiceReady


def no_fd() -> Fd:
    """Stand for the descriptors of a frame that came without any."""
    raise ControlError("the peer's message names more descriptors than came with it")


_decoding = threading.local()
"""`next_fd` returns the next descriptor for the message that this thread decodes now. Decoding neither awaits nor nests."""


def _named(kind: type, value: object) -> Fd:
    return cast("Fd", _decoding.next_fd())


_CALLS = tuple(HalCall.__subclasses__())
_MESSAGES: Any = CallMessage[Union[_CALLS]] | Reply[msgspec.Raw] | Failed | Cancel | Attach | Ready | Refused | ServiceReady  # type: ignore[valid-type]  # noqa: UP007
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_MESSAGES, dec_hook=_named)


@cache
def _answer_decoder(call: type[HalCall[Any]]) -> msgspec.msgpack.Decoder[Any]:
    """Return what decodes the answer to a call. Each is made when its first answer comes: all of them take 3 ms of a start."""
    return msgspec.msgpack.Decoder(get_args(call.__orig_bases__[0])[0], dec_hook=_named)  # type: ignore[attr-defined]


def encode(message: Message, most_bytes: int = MAX_BODY_BYTES) -> tuple[bytes, list[int]]:
    """Return one whole frame and the descriptors that travel beside it. `most_bytes`: of its body.

    Raises:
        CallerError: the message is too large, has too many descriptors, or holds a value that no message can carry.
    """
    fds: list[int] = []
    try:
        body = msgspec.msgpack.Encoder(enc_hook=fds.append).encode(message)
        if strange := {*map(type, fds)} - {Fd}:  # everything that msgspec cannot encode lands there
            raise TypeError(f"it holds {strange}")
    except (TypeError, OverflowError, ValueError) as error:
        raise CallerError(f"the call cannot be sent, because a value in it does not fit a message: {error}") from error
    if len(body) > most_bytes:
        own = "" if most_bytes == MAX_BODY_BYTES else ", or use a driver of this app with Runtime(service='off')"
        raise CallerError(
            f"the call needs a message of {len(body)} bytes, but at most {most_bytes} fit; "
            f"make the graph smaller (its large constants do not count){own}"
        )
    if len(fds) > MAX_DESCRIPTORS:
        raise CallerError(
            f"the call needs a message with {len(fds)} descriptors, but the kernel passes at most {MAX_DESCRIPTORS}; use fewer memories"
        )
    return HEADER.pack(len(body), len(fds), 0) + body, fds


def decode_header(header: bytes, most_bytes: int = MAX_BODY_BYTES) -> tuple[int, int]:
    """Return the length of the body, at most `most_bytes`, and the number of descriptors.

    Raises:
        ControlError: a frame cannot begin with these bytes.
    """
    length, descriptors, zero = HEADER.unpack(header)
    if zero or length > most_bytes or descriptors > MAX_DESCRIPTORS:
        raise ControlError(
            f"the peer announced a frame of {length} bytes with {descriptors} descriptors; at most {most_bytes} and "
            f"{MAX_DESCRIPTORS} are allowed"
        )
    return length, descriptors


def decode(body: bytes | msgspec.Raw, next_fd: Callable[[], Fd] = no_fd, answer_to: type[HalCall[Any]] | None = None) -> Any:
    """Return the message in the body of a frame, or the answer in a `Reply`.

    Args:
        next_fd: returns the descriptors that came with the frame, one by one.
        answer_to: the call whose answer is expected. The type of the answer is in the table.

    Raises:
        ControlError: the protocol has no such message, a field has the wrong type or value, or a descriptor is missing.
    """
    _decoding.next_fd = next_fd
    try:
        return (_DECODER if answer_to is None else _answer_decoder(answer_to)).decode(body)
    except (ValueError, RecursionError, MemoryError) as error:  # those of msgspec are ValueErrors
        what = "control message" if answer_to is None else f"answer to {answer_to.__name__}"
        found = len(memoryview(body))
        raise ControlError(f"the peer sent {found} bytes that are not a valid {what}: {error or type(error).__name__}") from error


_LARGEST = 2**64 - 1

MAX_MESSAGE_CHARACTERS = 4096
"""So much of an error's text is sent. The error of an engine may carry a whole graph."""


MAX_NOTES = 8


def failure_of(error: BaseException) -> Failure:
    """Return the message for an exception, with its notes. Every exception has one, whatever its text holds."""
    failure = _failure_of(error)
    notes = tuple(_sendable(str(note)) for note in getattr(error, "__notes__", ())[:MAX_NOTES])
    return msgspec.structs.replace(failure, notes=notes) if notes else failure


def _failure_of(error: BaseException) -> Failure:
    kind = type(error).__name__
    message = _sendable(text_of(error)) or kind
    match error:
        case ModelQuarantinedError():
            return Failure("ModelQuarantinedError", message, until_s=error.until_s)
        case QuotaError():
            return Failure("QuotaError", message, status=int(error.status), what=error.what, limit=error.limit, used=error.used)
        case CompilationError():
            node = None if error.node is None else _sendable(str(error.node))
            return Failure("CompilationError", message, node=node, reason=_sendable(str(error.reason)))
        case OutputInsufficientSizeError():
            return Failure("OutputInsufficientSizeError", message, status=int(error.status), shapes=error.shapes)
        case ExecutionError():
            return Failure("ExecutionError", message, status=int(error.status))
        case DeadlineError():
            return Failure("DeadlineError", message, transient=error.transient)
        case DeviceUnavailableError():
            return Failure("DeviceUnavailableError", message, device=error.device)
        case MemoryAllocationError():
            needed_bytes = min(error.needed_bytes, _LARGEST)  # a client may ask for more bytes than a message can name
            return Failure("MemoryAllocationError", message, needed_bytes=needed_bytes, available_bytes=error.available_bytes)
        case CallerError():
            return Failure("CallerError", message)
        case ServiceDiedError():
            return Failure("ServiceDiedError", message)
        case DriverDiedError() | DriverHungError():
            return Failure("ExecutionError", message, status=int(ErrorStatus.DEVICE_UNAVAILABLE))
        case _:
            return Failure("ExecutionError", f"{kind}: {message}" if kind != message else kind)


def _sendable(text: str) -> str:
    """Return a text that UTF-8 can carry and that a log line can hold. The text of an error may hold a path with stray bytes."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[:MAX_MESSAGE_CHARACTERS]} [{len(text)} characters in all]"


def error_of(failure: Failure) -> AionnError:
    """Return the exception that a failure stands for. An unknown kind gives an `ExecutionError` with the failure's message.

    Its texts are those of another process, so control characters in them become escapes.
    """
    error = _error_of(msgspec.structs.replace(failure, message=escaped(failure.message), reason=_escaped(failure.reason)))
    for note in failure.notes[:MAX_NOTES]:
        error.add_note(escaped(note))
    return error


def _escaped(text: str | None) -> str | None:
    return None if text is None else escaped(text)


def _error_of(failure: Failure) -> AionnError:
    match failure.kind:
        case "CompilationError":
            return CompilationError(failure.message, node=failure.node, reason=failure.reason)
        case "OutputInsufficientSizeError":
            return OutputInsufficientSizeError(failure.message, status=_status(failure.status), shapes=failure.shapes)
        case "ModelQuarantinedError":
            return ModelQuarantinedError(failure.message, until_s=failure.until_s)
        case "QuotaError":
            status = _status(failure.status)
            return QuotaError(failure.message, status=status, what=escaped(failure.what), limit=failure.limit, used=failure.used)
        case "DeadlineError":
            return DeadlineError(failure.message, transient=failure.transient)
        case "DeviceUnavailableError":
            return DeviceUnavailableError(failure.device, failure.message)
        case "MemoryAllocationError":
            return MemoryAllocationError(failure.message, needed_bytes=failure.needed_bytes, available_bytes=failure.available_bytes)
        case "CallerError":
            return CallerError(failure.message)
        case "ServiceDiedError":
            return ServiceDiedError(failure.message)
        case _:
            return ExecutionError(failure.message, status=_status(failure.status))


def _status(number: int) -> ErrorStatus:
    try:
        return ErrorStatus(number)
    except ValueError:
        return ErrorStatus.GENERAL_FAILURE
