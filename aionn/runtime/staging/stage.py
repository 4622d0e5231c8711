"""One stage as the app sees it, and the policy by which stages are made and judged.

Only `enter_state` changes the state of a stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import anyio
import numpy as np

from aionn import trace
from aionn.errors import CallerError
from aionn.loopless import checked_count
from aionn.runtime.record import LOADING
from aionn.runtime.staging.comparing import Comparison, Tolerance

if TYPE_CHECKING:
    from aionn.caching.offers import CompileBackend
    from aionn.caching.outcomes import Refusal

State = Literal["waiting", "compiling", "loading", "comparing", "serving", "replaced", "rejected", "skipped"]
_STEPS: Mapping[str, float] = {"waiting": 0.0, "compiling": 0.1, "loading": 0.7, "comparing": 0.8}


@dataclass(frozen=True)
class StagePolicy:
    """When a better stage is made, at what cost, and what it must show before it serves.

    Attributes:
        executions: a better stage is made once the model has been executed so many times within a week. A compile costs seconds of CPU,
            and a script that runs a model three times a week would never gain them back. With a cache, executions of earlier starts
            count, too. `Compilation.wait_for_stage` has a stage made at once.
        threads: the number of threads, and of CPUs, for the process that compiles the stage. It has the lowest priority. One thread
            takes least from the stream.
        timeout_s: the seconds for compiling and loading the stage together. A process that takes longer is killed.
        min_gain: the share of the median run by which the new stage must be faster. 0.1 asks for runs that are 10 % shorter. If None,
            the outputs alone decide.
        tolerances: how far outputs may differ from those of the stage before, by element type. They replace the defaults of these types.
        backend: where a better stage, or the model of a swap, is asked for before a process of this machine compiles it: an
            `aionn.fleet.StoreBackend`, or any other `aionn.fleet.CompileBackend`. What it offers is adopted only if a trusted builder
            has signed it. It may take its `wait_s` seconds, and half of `timeout_s` at most. None: the runtime's backend
            (`aionn.fleet.use_backend`), if it has one.

    Examples:
        >>> policy = aionn.StagePolicy(executions=100, min_gain=0.2)
        >>> compilation = await runtime.compile(model, mode="staged", stages=("onnxruntime", "openvino"), stage_policy=policy)
        >>> [stage.name for stage in compilation.stages]
        ['onnxruntime', 'openvino']
    """

    executions: int = 10
    threads: int = 1
    timeout_s: float = 600.0
    min_gain: float | None = 0.1
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    backend: CompileBackend | None = None

    def __post_init__(self) -> None:
        for name, least in (("executions", 0), ("threads", 1)):
            object.__setattr__(self, name, checked_count(f"StagePolicy: {name}", getattr(self, name), least))
        if not _is_number(self.timeout_s) or not self.timeout_s > 0:
            raise CallerError(f"StagePolicy: timeout_s={self.timeout_s!r}; give a number of seconds above 0")
        if self.min_gain is not None and not (_is_number(self.min_gain) and 0 <= self.min_gain < 1):
            raise CallerError(f"StagePolicy: min_gain={self.min_gain!r}; give a share from 0 to below 1, or None to compare outputs only")
        if not isinstance(self.tolerances, Mapping) or not all(isinstance(value, Tolerance) for value in self.tolerances.values()):
            raise CallerError(f"StagePolicy: tolerances={self.tolerances!r}; give an aionn.Tolerance per element type, by name")
        if self.backend is not None and not (callable(getattr(self.backend, "compile", None)) and hasattr(self.backend, "wait_s")):
            raise CallerError(f"StagePolicy: backend={self.backend!r}; give an aionn.fleet.CompileBackend, which has compile and wait_s")


def _is_number(value: object) -> bool:
    if isinstance(value, float | np.floating):
        return True
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < 2**63


@dataclass
class Stage:
    """One stage of a compilation, as it is now (public face: `compilation.stages`).

    Attributes:
        name: of its device.
        state: "waiting", "compiling", "loading", "comparing", then "serving", "replaced" (by a better one) or "rejected". "skipped" if
            a better one was stored already and served from the start. A stage that serves is rejected if it fails again and again.
        reason: why it was rejected or skipped. Empty otherwise.
        made_by: "cache", "backend" (compiled by another machine, see `StagePolicy.backend`), "worker" (compiled by a process in the
            background) or "driver" (compiled by the driver that serves it, because artifacts of this device cannot be stored).
        step: what is done while it is compiled or loaded, as in `aionn.events.CompileStep`. A backend's own words are shown here, such
            as "compiling (attempt 2)". Empty otherwise.
        local_reason: why it was compiled on this machine although a backend could be asked. Empty otherwise.
        times_s: the seconds spent in each state that the stage has left.
        comparison: what the comparison with the stage before found, or None.
        not_kept: why the cache does not keep it, so that the next start makes it again. None if there is nothing to keep, too.
    """

    name: str
    state: State = "waiting"
    reason: str = ""
    made_by: str = ""
    step: str = ""
    local_reason: str = ""
    times_s: dict[str, float] = field(default_factory=dict)
    comparison: Comparison | None = None
    not_kept: Refusal | None = None
    _entered: Callable[[str, str, str], None] | None = field(default=None, repr=False, compare=False)
    _since_ns: int = field(default_factory=time.monotonic_ns, repr=False)
    _decided: anyio.Event = field(default_factory=anyio.Event, repr=False)

    @property
    def progress(self) -> float:
        """How much is done, from 0 to 1, by the steps that are done. Engines do not report how far a compile is."""
        return _STEPS.get(self.state, 1.0)


def reported_stage(name: str, entered: Callable[[str, str, str], None]) -> Stage:
    """Return a new stage. `entered`: called with its name, each state that it enters, and the reason."""
    entered(name, "waiting", "")
    return Stage(name, _entered=entered)


def enter_state(stage: Stage, state: State, reason: str = "") -> None:
    """Move a stage to a state. The trace has a span for the state before."""
    now_ns = time.monotonic_ns()
    if state != stage.state:
        stage.times_s[stage.state] = stage.times_s.get(stage.state, 0.0) + (now_ns - stage._since_ns) / 1e9
        trace.span_at(f"stage.{stage.state}", stage._since_ns, now_ns, stage=stage.name)
        stage._since_ns = now_ns
        if stage._entered is not None:
            stage._entered(stage.name, state, reason)
    stage.state, stage.reason, stage.step = state, reason, ""
    if state in ("serving", "replaced", "rejected", "skipped"):
        stage._decided.set()


def enter_step(stage: Stage, step: str) -> None:
    """Show a step of the preparation, which is "loading" or a part of "compiling"."""
    enter_state(stage, "loading" if step == LOADING else "compiling")
    stage.step = step


def compiles_here(stage: Stage, reason: str) -> None:
    """Note why a stage is compiled here although a backend could be asked."""
    stage.local_reason = reason
    trace.count("stage.compiled_here", stage=stage.name, reason=reason)


def decided(stage: Stage) -> anyio.Event:
    """Return the event that is set once it is decided whether the stage serves."""
    return stage._decided
