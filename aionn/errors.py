"""What can go wrong, and whose fault it is.

One tree, three questions. Is it the caller's mistake (`CallerError`)? Can the model or this request not be done
(`CompilationError`, `ExecutionError`, `DeadlineError`, `MemoryAllocationError`)? Is the driver gone
(`DriverDiedError`, `DriverHungError`, `DeviceUnavailableError`)? Facts stand on attributes; the message is one
sentence that names what was found, what was expected and the way out.

A cache miss, a refused artifact and a failed save are values (`CacheOutcome`) and log lines, never exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "AionnError",
    "CallerError",
    "CompilationError",
    "DeadlineError",
    "DeviceMemoryLostError",
    "DeviceUnavailableError",
    "DriverDiedError",
    "DriverHungError",
    "ExecutionError",
    "MemoryAllocationError",
    "OutputInsufficientSizeError",
    "StageRejected",
]


class AionnError(Exception):
    """The root of everything that aionn raises on purpose. Can be pickled and copied, attributes included."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args, dict(self.__dict__))

    def again(self) -> AionnError:
        """The same error for one more caller: an exception that several tasks raise would collect the traceback of each."""
        error = _made_again(type(self), self.args, self.__dict__)
        if self.__cause__ is not None:  # setting it, even to None, would hide what is handled when the error is raised
            error.__cause__ = self.__cause__
        return error


def _made_again(kind: type[AionnError], args: tuple[object, ...], attributes: Mapping[str, object]) -> AionnError:
    error = kind.__new__(kind)  # not by its own parameters: the message is made already
    error.args = args  # `OSError.__new__`, which makes a DeadlineError, would leave them to `__init__`
    error.__dict__.update(attributes)
    if hasattr(error, "__notes__"):
        error.__notes__ = [*error.__notes__]  # a note for one caller is not for the others
    return error


def again(error: BaseException) -> BaseException:
    """`error` for one more caller; one that is not ours is raised as it is."""
    return error.again() if isinstance(error, AionnError) else error


class CallerError(AionnError, ValueError):
    """The call itself is wrong: a shape, dtype, name, ended lease, wrong loop or bad argument. Nothing was done."""


class CompilationError(AionnError):
    """The model cannot be prepared on that device.

    Attributes:
        node: the first node that is at fault, as the graph names it, or None where the engine does not tell.
        reason: why, in the engine's words, without the device's name.
    """

    def __init__(self, message: str, *, node: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.reason = message if reason is None else reason


class ExecutionError(AionnError):
    """The driver answered that this execution failed. The driver and its other executions go on.

    Attributes:
        status: the HAL's `ErrorStatus` (`aionn.hal.ErrorStatus`); kept as its integer enum member.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class OutputInsufficientSizeError(ExecutionError):
    """An output is larger than the memory given for it.

    Attributes:
        shapes: the shapes the outputs need, by name, as far as the driver knows them.
    """

    def __init__(self, message: str, *, status: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(message, status=status)
        self.shapes = dict(shapes)


class DriverDiedError(AionnError):
    """The driver process has ended; what was asked of it will never be answered. Safe to ask again.

    Attributes:
        device: the name of the device whose driver it was.
        exit_code: as in `subprocess` (negative: killed by that signal), or None if it is not known.
    """

    def __init__(self, device: str, exit_code: int | None, why: str = "") -> None:
        """`why`: what is known of the reason, to stand behind "ended"."""
        how = "and its exit code is not known" if exit_code is None else f"with exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            how = f"by signal {-exit_code}"
        why = f" {why}" if why else ""
        super().__init__(f"the driver process of device {device!r} ended {how}{why}; the next use starts a new one")
        self.device = device
        self.exit_code = exit_code


class DeviceMemoryLostError(DriverDiedError):
    """The device memory was in a driver process that has ended: its contents are gone. Never answered by zeros.

    Attributes: as `DriverDiedError`. The way out: allocate it again, and fill it from a snapshot or from the start.
    """

    def __init__(self, device: str, exit_code: int | None) -> None:
        super().__init__(device, exit_code)
        self.args = (
            f"the device memory was lost with the driver process of device {device!r}; allocate it again and fill it from a snapshot",
        )


class DriverHungError(AionnError):
    """The driver process made no progress for the runtime's `hang_s`; it has been killed.

    Attributes:
        device: the name of the device whose driver it was.
        waited_s: for how long it made no progress, in seconds.
        stack: the stacks of its threads, at most 16 KiB of text; empty if it wrote none, as a stopped process does.
    """

    def __init__(self, device: str, waited_s: float, stack: str = "") -> None:
        super().__init__(
            f"the driver process of device {device!r} made no progress for {waited_s:.3f} s and was killed; the next use starts a new one"
        )
        self.device = device
        self.waited_s = waited_s
        self.stack = stack


class DeadlineError(AionnError, TimeoutError):
    """The answer did not come in time. The driver may still be busy with it.

    Attributes:
        transient: True if the same call may succeed when tried again (NNAPI: MISSED_DEADLINE_TRANSIENT).
    """

    def __init__(self, message: str, *, transient: bool = True) -> None:
        super().__init__(message)
        self.transient = transient


class DeviceUnavailableError(AionnError):
    """A device asked for by name is not there. Never answered by a silent fallback.

    Attributes:
        device: the name that was asked for.
    """

    def __init__(self, device: str, message: str) -> None:
        super().__init__(message)
        self.device = device


class MemoryAllocationError(AionnError):
    """Shared memory could not be reserved, or this process has no free file descriptor.

    Attributes:
        needed_bytes: what was asked for; 0 if only a descriptor is missing.
        available_bytes: what the tightest known limit leaves, or None without a known limit.
    """

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int | None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class StageRejected(AionnError):
    """A better stage was not swapped in; the stage before it goes on serving.

    Attributes:
        stage: the name of the stage that was refused.
        reason: why.
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"stage {stage!r} was not swapped in: {reason}")
        self.stage = stage
        self.reason = reason
