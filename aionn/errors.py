"""The errors of aionn: what went wrong, and whose fault it is.

One tree answers three questions. Has the caller made a mistake (`CallerError`)? Can the model or the request not be done
(`CompilationError`, `ExecutionError`, `DeadlineError`, `DeviceBusyError`, `MemoryAllocationError`)? Has the driver gone
(`DriverDiedError`, `DriverHungError`, `DeviceUnavailableError`)? Attributes hold the facts. The message is one sentence that says what
was found, what was expected and the way out.

A cache miss, a refused artifact and a failed save are values (`CacheOutcome`) and log lines, never exceptions.
"""

from __future__ import annotations

import errno
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

__all__ = [
    "AionnError",
    "CallerError",
    "CompilationError",
    "DeadlineError",
    "DeviceBusyError",
    "DeviceMemoryLostError",
    "DeviceUnavailableError",
    "DriverDiedError",
    "DriverHungError",
    "ExecutionError",
    "MemoryAllocationError",
    "ModelQuarantinedError",
    "OutputInsufficientSizeError",
    "QuotaError",
    "ServiceDiedError",
    "StageRejected",
]

NO_DESCRIPTOR_LEFT = (errno.EMFILE, errno.ENFILE)
_SIGSYS = 31  # on every architecture that aionn has tables for
E = TypeVar("E", bound=BaseException)
A = TypeVar("A", bound="AionnError")


class AionnError(Exception):
    """The base of all errors that aionn raises on purpose. Pickling and copying keep the attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args, dict(self.__dict__))


def _made_again(kind: type[A], args: tuple[object, ...], attributes: Mapping[str, object]) -> A:
    error = kind.__new__(kind)  # without `__init__`, because the message is made already
    error.args = args  # `OSError.__new__`, which makes a DeadlineError, leaves them to `__init__`
    error.__dict__.update(attributes)
    if hasattr(error, "__notes__"):
        error.__notes__ = [*error.__notes__]  # a note for one caller must not reach the others
    return error


def text_of(error: BaseException) -> str:
    """Return an error's text as UTF-8 can carry it. That of another library may have stray bytes, and its `__str__` may raise."""
    try:
        text = str(error)
    except Exception:
        text = "no text can be made of it"
    return text.encode("utf-8", "backslashreplace").decode()


def again(error: E) -> E:
    """Return a copy of `error` for one more caller. An error that is not an `AionnError` is returned as it is.

    One exception that several tasks raise would collect the tracebacks of all of them.
    """
    if not isinstance(error, AionnError):
        return error
    copy = _made_again(type(error), error.args, error.__dict__)
    if error.__cause__ is not None:  # setting it, even to None, would hide the exception that is being handled at the raise
        copy.__cause__ = error.__cause__
    return copy


class CallerError(AionnError, ValueError):
    """The call is wrong: a shape, dtype, name, ended lease, wrong loop or bad argument. Nothing was done."""


class UnknownNameError(CallerError, KeyError):
    """A mapping of aionn has no such name. It is a `KeyError` too, so that `in` and `get` work as those of a dict."""

    __str__ = Exception.__str__  # that of KeyError would put the sentence in quotes


def refuse_coroutine(value: object, what: str) -> None:
    """Raise if `value` is a coroutine: a call of an async function whose `await` was forgotten. `what` is its place in the sentence.

    Raises:
        CallerError: it is one, and it has been closed, or Python would warn that it was never awaited.
    """
    if isinstance(value, Coroutine):
        value.close()
        raise CallerError(f"{what} is a coroutine; write `await` before the call that makes it")


class CompilationError(AionnError):
    """The model cannot be prepared on that device.

    Attributes:
        node: the first node at fault, as the graph names it, or None if the engine does not report it.
        reason: the reason in the engine's words, without the device's name.
    """

    def __init__(self, message: str, *, node: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.reason = message if reason is None else reason


class ModelQuarantinedError(CompilationError):
    """The model has ended its driver several times, so the service of all apps refuses to prepare it for a while.

    Attributes:
        until_s: in how many seconds the model may be prepared again.
    """

    def __init__(self, message: str, *, until_s: float) -> None:
        super().__init__(message)
        self.until_s = until_s


class ExecutionError(AionnError):
    """The driver answered that this execution failed. The driver and its other executions go on.

    Attributes:
        status: the status of the answer, an `aionn.hal.ErrorStatus`.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class OutputInsufficientSizeError(ExecutionError):
    """An output needs more memory than was given for it.

    Attributes:
        shapes: the shapes that the outputs need, by name, as far as the driver knows them.
    """

    def __init__(self, message: str, *, status: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(message, status=status)
        self.shapes = dict(shapes)


class QuotaError(ExecutionError):
    """The app would use more of a shared driver than one app may. Nothing was done.

    Attributes:
        what: what is counted, such as "prepared models" or "bytes of weights".
        limit: how much of it one app may use.
        used: how much of it the app uses now.
    """

    def __init__(self, message: str, *, status: int, what: str, limit: int, used: int) -> None:
        super().__init__(message, status=status)
        self.what = what
        self.limit = limit
        self.used = used


class DriverDiedError(AionnError):
    """The driver process has ended, and will never answer its open calls. It is safe to make the same call again.

    If the process has printed anything, a note (`__notes__`) has its last lines.

    Attributes:
        device: the name of the device whose driver it was.
        exit_code: as in `subprocess` (a negative number is the signal that killed it), or None if it is not known.
    """

    def __init__(self, device: str, exit_code: int | None, why: str = "") -> None:
        """Make the message. `why` is what is known of the reason, and stands behind "ended"."""
        how = "and its exit code is not known" if exit_code is None else f"with exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            how = f"by signal {-exit_code}"
        if exit_code == -_SIGSYS:
            how += " (SIGSYS: its sandbox denied a system call)"
        why = f" {why}" if why else ""
        super().__init__(f"the driver process of device {device!r} ended {how}{why}; the next use starts a new one")
        self.device = device
        self.exit_code = exit_code


class DeviceMemoryLostError(DriverDiedError):
    """The device memory was in a driver process that has ended, so its contents are lost. They are never replaced by zeros.

    Allocate the memory again, and fill it from a snapshot or from the start. The attributes are those of `DriverDiedError`.
    """

    def __init__(self, device: str, exit_code: int | None) -> None:
        super().__init__(device, exit_code)
        self.args = (
            f"the device memory was lost with the driver process of device {device!r}; allocate it again and fill it from a snapshot",
        )


class ServiceDiedError(DriverDiedError):
    """The service whose drivers the app uses has ended. Bursts that are open go on for a while. It is safe to make the same call again.

    The runtime connects anew at each call that needs the service. The attributes are those of `DriverDiedError`; the exit code is None.
    """

    def __init__(self, why: str) -> None:
        """Make the error. `why` is its message."""
        super().__init__("", None)
        self.args = (why,)


class DriverHungError(AionnError):
    """The driver process made no progress for the runtime's `hang_s`, and was killed.

    Attributes:
        device: the name of the device whose driver it was.
        waited_s: how long it made no progress, in seconds.
        stack: the stacks of its threads, at most 16 KiB of text. A stopped process writes none, and the text is empty.
    """

    def __init__(self, device: str, waited_s: float, stack: str = "") -> None:
        super().__init__(
            f"the driver process of device {device!r} made no progress for {waited_s:.3f} s and was killed; the next use starts a new one"
        )
        self.device = device
        self.waited_s = waited_s
        self.stack = stack


class DeadlineError(AionnError, TimeoutError):
    """The answer did not come in time. The driver may still be busy with the request.

    Attributes:
        transient: True if the same call may succeed when tried again (NNAPI: MISSED_DEADLINE_TRANSIENT).
    """

    def __init__(self, message: str, *, transient: bool = True) -> None:
        super().__init__(message)
        self.transient = transient


class DeviceBusyError(AionnError):
    """Too many executions of the compilation wait (`Batching.max_waiting`), or those that wait take longer than until the deadline.

    Nothing was sent, and the executions that wait go on.

    Attributes:
        waited_s: how long the first of those that wait has waited so far, in seconds.
        queue: how many wait.
        transient: True, because the same call may succeed when tried again.
    """

    transient = True

    def __init__(self, message: str, *, waited_s: float, queue: int) -> None:
        super().__init__(message)
        self.waited_s = waited_s
        self.queue = queue


class DeviceUnavailableError(AionnError):
    """A device that was asked for by name is not available. aionn never falls back silently to another device.

    Attributes:
        device: the name that was asked for.
    """

    def __init__(self, device: str, message: str) -> None:
        super().__init__(message)
        self.device = device


class MemoryAllocationError(AionnError):
    """Shared memory could not be reserved, or this process has no free file descriptor.

    Attributes:
        needed_bytes: how many bytes were asked for; 0 if only a descriptor is missing.
        available_bytes: how many bytes the tightest known limit leaves, or None if no limit is known.
    """

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int | None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class StageRejected(AionnError):
    """A better stage was not swapped in. The stage before it keeps serving.

    Attributes:
        stage: the name of the stage that was rejected.
        reason: the reason, as a sentence.
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"stage {stage!r} was not swapped in: {reason}")
        self.stage = stage
        self.reason = reason


def lost_with(device: str, error: BaseException) -> DeviceMemoryLostError:
    """Return what the end of a driver means to the memory in it."""
    lost = DeviceMemoryLostError(device, error.exit_code if isinstance(error, DriverDiedError) else None)
    for note in getattr(error, "__notes__", ()):
        lost.add_note(note)
    return lost
