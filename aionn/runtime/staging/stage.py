"""One stage as the app sees it, and the policy by which stages are made and judged."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import anyio

from aionn import trace
from aionn.errors import CallerError
from aionn.runtime.staging.comparing import Comparison, Tolerance

State = Literal["waiting", "compiling", "loading", "comparing", "serving", "replaced", "rejected", "skipped"]
_STEPS: Mapping[str, float] = {"waiting": 0.0, "compiling": 0.1, "loading": 0.7, "comparing": 0.8}


@dataclass(frozen=True)
class StagePolicy:
    """When a better stage is made, at what cost, and what it must show before it serves.

    Attributes:
        executions, per_s: the frequency of use that warrants a better stage: so many executions within that many seconds. With a cache,
            executions of earlier starts count, too; the cache keeps them for 30 days, in pieces of ten minutes. A compile costs seconds
            of CPU: a script that runs a model three times a week would pay and never gain. `Compilation.wait_for_stage` warrants a
            stage at once.
        threads: of the worker that compiles it, and the CPUs that it may use. At the lowest priority, one takes least from the stream.
        timeout_s: for compile and load together; a worker that takes longer is killed.
        min_gain: the new stage must be faster by this share of the median run; None: outputs alone decide.
        tolerances: how far outputs may differ, by element type, in place of those in `TOLERANCES`.
        run_timeout_s: a run in the comparison may take so long; then the new stage hangs and is killed.
        hold: the stream may be held back for single runs of the comparison where it leaves no gaps (`runtime.staging.measuring` has the
            rule); False: such a stream keeps its stage unless the new one is faster even beside it.
        state: device memories are copied to the new stage's driver at the swap ("move"), or the swap waits until the app has filled
            each of them anew, as at the beginning of a recording ("wait_for_reset"). The way back from a failing stage never waits.
    """

    executions: int = 10
    per_s: float = 7 * 86400.0
    threads: int = 1
    timeout_s: float = 600.0
    min_gain: float | None = 0.1
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    run_timeout_s: float = 30.0
    hold: bool = True
    state: Literal["move", "wait_for_reset"] = "move"

    def __post_init__(self) -> None:
        if self.executions < 0:
            raise CallerError(f"StagePolicy: executions={self.executions}; give at least 0")
        if self.threads < 1:
            raise CallerError(f"StagePolicy: threads={self.threads}; give at least 1")
        if not (self.per_s > 0 and self.timeout_s > 0 and self.run_timeout_s > 0):
            raise CallerError("StagePolicy: per_s, timeout_s and run_timeout_s are more than 0 seconds")
        if self.min_gain is not None and not 0 <= self.min_gain < 1:
            raise CallerError(f"StagePolicy: min_gain={self.min_gain}; give a share from 0 to below 1, or None for no gain")
        if self.state not in ("move", "wait_for_reset"):
            raise CallerError(f"StagePolicy: state {self.state!r} is one of 'move', 'wait_for_reset'")


@dataclass
class Stage:
    """One stage of a compilation, as it is now (public face: `compilation.stages`).

    Attributes:
        name: of its device.
        state: "waiting", "compiling", "loading", "comparing", then "serving", "replaced" (by a better one) or "rejected"; "skipped"
            where a better one was stored already and served from the start. One that serves is rejected if it fails again and again.
        reason: why it was rejected or skipped; empty otherwise.
        made_by: "cache", "worker" (compiled in the background) or "driver" (in its own driver, for its artifacts cannot be stored).
        times_s: seconds spent so far in each state that it has left.
        comparison: what the comparison with the stage before found.
    """

    name: str
    state: State = "waiting"
    reason: str = ""
    made_by: str = ""
    times_s: dict[str, float] = field(default_factory=dict)
    comparison: Comparison | None = None
    _since_ns: int = field(default_factory=time.monotonic_ns, repr=False)
    _settled: anyio.Event = field(default_factory=anyio.Event, repr=False)

    @property
    def in_state_s(self) -> float:
        """Seconds since it came into its present state."""
        return (time.monotonic_ns() - self._since_ns) / 1e9

    @property
    def progress(self) -> float:
        """0 to 1, by steps done: engines do not tell how far a compile is."""
        return _STEPS.get(self.state, 1.0)

    def _enter(self, state: State, reason: str = "") -> None:
        now_ns = time.monotonic_ns()
        if state != self.state:
            self.times_s[self.state] = self.times_s.get(self.state, 0.0) + (now_ns - self._since_ns) / 1e9
            trace.span_at(f"stage.{self.state}", self._since_ns, now_ns, stage=self.name)
            self._since_ns = now_ns
            trace.count("stage.entered", stage=self.name, state=state)
        self.state, self.reason = state, reason
        if state in ("serving", "replaced", "rejected", "skipped"):
            self._settled.set()
