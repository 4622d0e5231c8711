"""`Health`: whether an open runtime can do the app's work (`Runtime.health`). Only values; `health_watch` makes them.

starting    entered, and no compilation serves yet                                            live
compiling   a required compilation is being prepared, or waits for another process            live
serving     every required compilation serves                                                 live, ready
degraded    it serves, and something is wrong: a driver has ended, the cache refuses          live, ready
stalled     a driver is hung, or the event loop stands still
closing     `aclose` has begun                                                                live
closed      the runtime was closed, or an internal error has ended it
"""

from __future__ import annotations

from typing import Literal

import msgspec

from aionn.errors import CallerError

State = Literal["starting", "compiling", "serving", "degraded", "stalled", "closing", "closed"]
CompilationState = Literal["preparing", "failed", "serving", "ended", "on demand"]
DriverState = Literal["starting", "idle", "loading", "compiling", "executing", "hung", "ended"]


class DeviceHealth(msgspec.Struct, frozen=True):
    """How the driver process of a device does.

    Attributes:
        name: of the device. low_priority: whether this is its driver for compilations of low priority.
        state: "starting" before it is ready, also after a death. "hung" if it makes no progress. "ended" if it has died, and nothing has
            started another one yet. Else what it does.
        pid: of the process, or None while none runs.
        seconds: for how long it has been in that state.
        deaths: how many driver processes have died in a row, without the present one.
        reason: what was seen of a hang or an end, in words. Else empty.
    """

    name: str
    low_priority: bool
    state: DriverState
    pid: int | None
    seconds: float
    deaths: int = 0
    reason: str = ""

    def __str__(self) -> str:
        low = " of low priority" if self.low_priority else ""
        if self.state == "hung":
            return f"the driver of device {self.name!r}{low} is hung: it {self.reason}"
        return f"the driver of device {self.name!r}{low} is {self.state} for {self.seconds:.1f} s"


class CompilationHealth(msgspec.Struct, frozen=True):
    """How a compilation does.

    Attributes:
        name: of the compilation. required: whether the runtime is ready only if it serves.
        state: "serving", or "preparing". "failed" if `aionn.asgi` could not prepare it, and may try again. "ended" if its driver has ended,
            so that the next call prepares it again. "on demand" if the next call prepares it: mode "jit", or after idle time.
        device: the one that serves, or that prepares it.
        step: of the preparation, else empty. step_s: for how many seconds.
        seconds: since the preparation began, or 0.
        reason: why the driver has ended, or why the attempt failed. Else empty.
    """

    name: str
    required: bool
    state: CompilationState
    device: str
    step: str = ""
    step_s: float = 0.0
    seconds: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        named = f"compilation {self.name!r}"
        if self.state == "preparing":
            where = f" on {self.device!r}" if self.device else ""
            return f"{named} is in preparation{where}, {self.step} for {self.step_s:.1f} s of {self.seconds:.1f} s"
        if self.state == "failed":
            return f"{named} failed ({self.reason})"
        if self.state == "ended":
            return f"{named} lost its driver, and the next call starts another one ({self.reason})"
        return f"{named} is {self.state}"


class Health(msgspec.Struct, frozen=True):
    """Whether a runtime can do the app's work, at one moment. `str()` gives one sentence.

    Attributes:
        state: "starting", "compiling", "serving", "degraded", "stalled", "closing" or "closed".
        live: whether the process should go on. If False, only a restart helps.
        ready: whether calls are answered now, so that the app should get traffic.
        reasons: why it is in that state, and what takes long, each in words. Mostly empty while it serves.
        devices: how each driver process does (`DeviceHealth`).
        compilations: how each compilation does (`CompilationHealth`), also those that are being prepared for the first time.

    Examples:
        >>> health = runtime.health()
        >>> print(health.ready, health)
    """

    state: State
    live: bool
    ready: bool
    reasons: tuple[str, ...] = ()
    devices: tuple[DeviceHealth, ...] = ()
    compilations: tuple[CompilationHealth, ...] = ()

    def __str__(self) -> str:
        return f"the runtime is {self.state}" + (f": {'; '.join(self.reasons)}" if self.reasons else "")


def not_open() -> Health:
    """Return the health of a runtime that was not opened yet."""
    return Health("starting", True, False, ("it has not been opened yet",))


class HealthPolicy(msgspec.Struct, frozen=True):
    """What `Runtime.health` counts as degraded, besides what always does.

    Attributes:
        max_drop_rate: the share of the frames of all streams that may be dropped within ten seconds, from 0 to 1. None: any share.

    Examples:
        >>> runtime = aionn.Runtime(health_policy=aionn.HealthPolicy(max_drop_rate=0.05))
    """

    max_drop_rate: float | None = None

    def __post_init__(self) -> None:
        rate = self.max_drop_rate
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1):
            raise CallerError(f"HealthPolicy: max_drop_rate={rate!r}; give a share from 0 to 1, or None")


def checked_policy(policy: object) -> HealthPolicy:
    """Return `Runtime(health_policy=)`. None stands for the default policy.

    Raises:
        CallerError: it is not a policy.
    """
    if policy is None:
        return HealthPolicy()
    if not isinstance(policy, HealthPolicy):
        raise CallerError(f"health_policy={policy!r}: give an aionn.HealthPolicy, or None")
    return policy
