"""Events: what happens in an open runtime that an app may want to show or to log, as typed values.

`Runtime.events` yields them, and `compile(on_event=)` is called with those of one compilation. Frames make no events. Events are rare:
compiles, drivers, stages, refused cache entries, and a summary of dropped frames once a second.

They are structs of msgspec, because an opened runtime imports them and a dataclass takes forty times as long to make.
"""

from __future__ import annotations

import time

import msgspec

__all__ = [
    "CacheRefused",
    "CompileDone",
    "CompileStarted",
    "CompileStep",
    "CompileWaiting",
    "DriverEnded",
    "DriverHung",
    "DriverStarted",
    "DropsSummary",
    "Event",
    "StageChanged",
]


class _Event(msgspec.Struct, frozen=True, kw_only=True):
    """What all events have.

    Attributes:
        at_ns: when it happened (CLOCK_MONOTONIC).
    """

    at_ns: int = msgspec.field(default_factory=time.monotonic_ns)


class CompileStarted(_Event, frozen=True, kw_only=True):
    """A model is being prepared: by `Runtime.compile`, by `Runtime.swap`, for a better stage, or for the first use with mode "jit".

    A compilation is also prepared anew at its next use after a driver's death, or after idle time.

    Attributes:
        compilation: its name. device: of the first candidate.
    """

    compilation: str
    device: str


class CompileStep(_Event, frozen=True, kw_only=True):
    """A preparation is in another step.

    Attributes:
        compilation: its name. device: the one that does the step.
        step: "starting the driver", "reading the model", "looking into the cache", "asking the compile backend", "asking what the device
            can run", "compiling" or "loading from the cache". Or other words that a compile backend has reported.
        expected_s: how many seconds the step took the last time, if that is known: from this compilation's last preparation, or from
            the cache for a compile.
    """

    compilation: str
    device: str
    step: str
    expected_s: float | None = None


class CompileWaiting(_Event, frozen=True, kw_only=True):
    """A preparation waits for another process or compilation that compiles the same model for the same cache."""

    compilation: str
    device: str


class CompileDone(_Event, frozen=True, kw_only=True):
    """A preparation is over. Each `CompileStarted` has one.

    Attributes:
        compilation: its name. device: the one that was chosen, or that failed. Those of a plan are joined by "+".
        outcome: "hit", "miss", "no_cache", "declined" or "failed".
        reason: why the cache did not serve, or why the preparation failed, in words.
        seconds: what the preparation took.
    """

    compilation: str
    device: str
    outcome: str
    reason: str
    seconds: float


class DriverStarted(_Event, frozen=True, kw_only=True):
    """A driver process is ready.

    Attributes:
        device: its name. pid: of the process. seconds: from its start to its greeting.
    """

    device: str
    pid: int
    seconds: float


class DriverEnded(_Event, frozen=True, kw_only=True):
    """A driver process has ended.

    Attributes:
        device: its name. pid: of the process.
        cause: "closed" by aionn or by `Device.restart`, "exit", "signal", "hung" or "protocol".
        exit_code: as of `subprocess`: negative for a signal. None if it is not known.
    """

    device: str
    pid: int
    cause: str
    exit_code: int | None


class DriverHung(_Event, frozen=True, kw_only=True):
    """A driver process makes no progress.

    Attributes:
        device: its name. pid: of the process. seconds: for how long.
        stack: of its threads, or empty. killed: whether it is killed now.
    """

    device: str
    pid: int
    seconds: float
    stack: str
    killed: bool


class StageChanged(_Event, frozen=True, kw_only=True):
    """A stage of a compilation is in another state.

    Attributes:
        compilation: its name. stage: the name of the stage. state, reason: as of `aionn.Stage`.
    """

    compilation: str
    stage: str
    state: str
    reason: str


class CacheRefused(_Event, frozen=True, kw_only=True):
    """An entry of a cache, or a new artifact, was refused. The model is compiled, or is not stored.

    Attributes:
        cache: its directory. device: of the entry. reason: the value of an `aionn.MissReason`. detail: what was found, in words.
    """

    cache: str
    device: str
    reason: str
    detail: str


class DropsSummary(_Event, frozen=True, kw_only=True):
    """Streams of a burst have dropped frames within the last second.

    Attributes:
        compilation: its name. burst: its name, or empty for all bursts of the compilation without a name.
        dropped: how many frames in that second. frames: how many were dropped or answered.
    """

    compilation: str
    burst: str
    dropped: int
    frames: int


Event = (
    CompileStarted
    | CompileStep
    | CompileWaiting
    | CompileDone
    | DriverStarted
    | DriverEnded
    | DriverHung
    | StageChanged
    | CacheRefused
    | DropsSummary
)
