"""Exceptions as messages, and back: a failure keeps its class, its text and its attributes. No I/O."""

from __future__ import annotations

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
    OutputInsufficientSizeError,
    text_of,
)
from aionn.escapes import escaped
from aionn.hal.types import ErrorStatus
from aionn.remote.control import Failure

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
        case "DeadlineError":
            return DeadlineError(failure.message, transient=failure.transient)
        case "DeviceUnavailableError":
            return DeviceUnavailableError(failure.device, failure.message)
        case "MemoryAllocationError":
            return MemoryAllocationError(failure.message, needed_bytes=failure.needed_bytes, available_bytes=failure.available_bytes)
        case "CallerError":
            return CallerError(failure.message)
        case _:
            return ExecutionError(failure.message, status=_status(failure.status))


def _status(number: int) -> ErrorStatus:
    try:
        return ErrorStatus(number)
    except ValueError:
        return ErrorStatus.GENERAL_FAILURE
