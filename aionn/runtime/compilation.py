"""`Compilation`: a model prepared on a device, as an app uses it. `CompilationParts` is what lies below that face, and does the work.

A compilation outlives its driver. When that dies, awaiting calls end with `DriverDiedError`. The next use starts a new driver and prepares
the model there again, once, however many callers wait (`preparing.kept_model`).

The runtime opens and closes the parts. Bursts, recurrent streams and device memories hold the `KeptModel`, never these parts. What runs in
the runtime's tasks holds neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aionn import trace
from aionn.caching.outcomes import CacheOutcome
from aionn.errors import AionnError, CallerError
from aionn.graph.steps import Step
from aionn.hal.model import PooledModel
from aionn.hal.options import CallOptions
from aionn.hal.types import ExecutionPreference, Priority
from aionn.loopless import AsyncClosed, checked_count, checked_name, deadline_of
from aionn.runtime.executing.arguments import Arguments, Outputs
from aionn.runtime.executing.control import execution_of, fixed_route, frames_refusal
from aionn.runtime.executing.device_buffers import DeviceRoles, ModelRoles, roles_of
from aionn.runtime.executing.device_memory import DeviceMemory, allocate
from aionn.runtime.executing.execution import Call, Executor
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.link import CLOSE_S
from aionn.runtime.executing.retrying import Retries, retried
from aionn.runtime.preparing.compile_acts import CompileRequest
from aionn.runtime.preparing.kept_model import MOST_JOINED_DEATHS, KeptModel
from aionn.runtime.preparing.preparation import Found
from aionn.runtime.serving.serving import Serving
from aionn.runtime.session import Session
from aionn.runtime.streaming.burst import Burst, burst_over
from aionn.runtime.streaming.connection import BurstConnection, Connections
from aionn.runtime.streaming.kept_burst import KeptBurst
from aionn.tasks import bounded_shield, ending_by

if TYPE_CHECKING:  # most apps make no stages, and start no executions
    from numpy.typing import NDArray

    from aionn.memory.memory import HasFileno
    from aionn.runtime.executing.event import Event
    from aionn.runtime.staging.measuring import Inputs, Run
    from aionn.runtime.staging.stage import Stage, StagePolicy
    from aionn.runtime.staging.stages import Staging
    from aionn.runtime.staging.swapping import NewModel
    from aionn.runtime.streaming.blocking import BlockingBurst
    from aionn.runtime.streaming.recovering import RecurrentStream
    from aionn.runtime.streaming.starting import Starts

_TRIALS = 16
"""So many trials of one compilation may run at once."""


class BatchingState(NamedTuple):
    """Whether requests are joined, as it is now (public face: `compilation.batching`).

    Attributes:
        allowed: whether the device may join requests.
        reason: why it may not, or why no rows are joined now: what larger runs have cost. Empty otherwise.
        axes: the axis of the rows of each input, by name. None: the input must be equal in all joined requests.
        most_rows: how many rows are joined at most now. 1 until larger runs have been measured, and where they do not pay.
        row_ms: the mean milliseconds of one row, by the size of the run: 1, 2, 4 and so on. Each stands for the sizes up to the next one.
    """

    allowed: bool
    reason: str
    axes: Mapping[str, int | None]
    most_rows: int
    row_ms: Mapping[int, float]


class CompilationParts:
    """The parts of one compilation.

    Attributes:
        kept_model: keeps the model prepared. Its `compiled` is what serves.
        arguments: how arguments are laid out.
        roles: returns the `ModelRoles` with the inputs and the outputs that an app names for device memory.
        bursts: connections of the bursts that the app has made, and of the kept one.
        kept: the burst behind `Compilation.compute`.
        staging: makes better stages, in mode "staged".
    """

    def __init__(self, session: Session, request: CompileRequest, first: Found | None = None) -> None:
        """`first`: what was prepared already, or None to prepare it at the first use."""
        model = request.model
        self.session = session
        self.kept_model = KeptModel(session, request, first)
        self.compiled = self.kept_model.compiled
        self.staging: Staging | None = None
        self.arguments = arguments = Arguments(model)
        self.roles = partial(_roles, self.kept_model, arguments)
        self.kept_model.disproved = lambda: arguments.disproved
        self._trials: Executor | None = None
        fallback = None
        if request.candidates is None:  # devices that the app has named forbid any fallback
            from aionn.runtime.executing.fallback import Fallback

            fallback = Fallback(self.kept_model, self.trials)
        self.bursts = Connections(self.kept_model, arguments, fallback)
        self.kept = KeptBurst(self.bursts)
        self._starts: Starts | None = None
        self._closed = False

    @property
    def trials(self) -> Executor:
        """What runs a prepared model that does not serve yet."""
        if self._trials is None:
            self._trials = Executor(self.arguments, Frames(_TRIALS), None)
            self.compiled.at_release.append(self._trials.frames.close)  # a burst that the app keeps may outlive this object
        return self._trials

    @property
    def starts(self) -> Starts:
        """The executions behind `Compilation.start`."""
        if self._starts is None:
            from aionn.runtime.streaming.starting import Starts

            self._starts = Starts(self.bursts)
        return self._starts

    async def wait_for_stage(self, staging: Staging, name: str, timeout_s: float | None) -> None:
        """See `Compilation.wait_for_stage`."""
        with self.compiled.use.hold():
            await staging.wait_for(name, timeout_s)

    def check_frames(self, what: str) -> None:
        """Raise a `CallerError` if frames cannot hold the model's inputs and outputs. `what`: the call that needs frames."""
        if self.arguments.values:
            raise frames_refusal(self.kept_model.model, what)

    # --- closing -------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """See `Compilation.aclose`."""
        if self._closed or self.session.inherited:
            return
        self.session.check_loop()
        self._closed = True
        bursts = list(self.bursts)
        try:
            self.kept_model.close()
            self.kept.end_waiting()
            if self._starts is not None:
                self._starts.close()
            if self.staging is not None:
                await self.staging.aclose()
            await self.kept.aclose()
            for burst in bursts:
                await burst.aclose()
            self.bursts.count_joined()
            with bounded_shield(CLOSE_S):
                await self.kept_model.store_tuned()
                if self.compiled.serving is not None:
                    await self.compiled.serving.aclose()
        except AionnError as error:
            trace.count("compilation.release_failed", reason=str(error))  # the driver is gone, and the model with it
        finally:
            self._end(bursts)
            self.compiled.release()

    def end(self) -> None:
        """Give the memory back: the runtime has closed, and every driver has ended. `CompiledModel.end` follows."""
        self._end(self.bursts)

    def _end(self, bursts: Iterable[BurstConnection]) -> None:
        self.kept.end()
        if self._starts is not None:
            self._starts.end()
        for burst in bursts:
            burst.end()
        self.bursts.close()

    # --- stages and new models -----------------------------------------------------------------------------------------

    def begin_stages(self, stages: Sequence[Stage], policy: StagePolicy) -> None:
        """Make better stages from now on."""
        from aionn.runtime.staging.measuring import Target
        from aionn.runtime.staging.stages import Staging

        names = tuple(stage.name for stage in stages)
        request = self.kept_model.request.without_deadline()
        live = partial(_live, weakref.ref(self.kept_model))
        target = Target(self.session.devices, self.compiled, live, request, _trial_runs(self.trials), names)
        self.staging = Staging(target, stages, policy)
        self.session.tasks.start_soon(self.staging.work, name="stages")

    def new_model(self) -> NewModel:
        """Return what an app's new version of the model needs to take over."""
        from aionn.runtime.staging.swapping import NewModel

        return NewModel(self.kept_model, self.staging, self.begin_stages, _trial_runs(self.trials), self._last_inputs, self.bursts.static)

    def _last_inputs(self) -> list[Inputs]:
        """Return the inputs of the last execution on each burst."""
        found = [self.kept.last_inputs, *(burst.executor.frames.last_inputs() for burst in self.bursts)]
        return [inputs for inputs in found if inputs is not None]


def _roles(kept_model: KeptModel, arguments: Arguments, inputs: Iterable[str], outputs: Iterable[str]) -> ModelRoles:
    return roles_of(kept_model.model, arguments.outputs, inputs, outputs)


async def _live(kept_model: weakref.ref[KeptModel]) -> Serving:
    found = kept_model()
    if found is None:
        raise CallerError("the app has dropped this compilation")
    return await found.live()


def _trial_runs(executor: Executor) -> Run:
    """Return what runs inputs on one prepared model, beside what serves."""

    async def run(serving: Serving, inputs: Inputs, deadline_ns: int | None) -> Outputs:
        call = Call(inputs, {}, CallOptions(deadline_ns=deadline_ns), inputs)
        return await execution_of(executor, fixed_route(serving), call).run()

    return run


class Compilation(AsyncClosed):
    """A model prepared on a device. Made by `Runtime.compile`; freed by `aclose`, with the runtime, or when collected.

    Attributes:
        model: what was compiled; after `Runtime.swap` the new model.
        outcomes: one `CacheOutcome` per step of the plan; of the last preparation, if a driver had to be started anew.
        preference, priority, threads, instances: as they were chosen. `threads` and `instances` are None where the engine chooses.

    Examples:
        >>> compilation = await runtime.compile(model, devices=("onnxruntime",))
        >>> outputs = await compilation.compute({"x": np.ones((1, 16), np.float32)}, timeout_s=10)
        >>> outputs["y"].shape, outputs.device
        ((1, 16), 'onnxruntime')
    """

    def __init__(self, parts: CompilationParts) -> None:
        self._parts = parts
        options = parts.kept_model.request.options
        self.preference: ExecutionPreference = options.preference
        self.priority: Priority = options.priority
        self.threads: int | None = None if options.at_most else options.threads
        self.instances: int | None = options.instances or None

    def __repr__(self) -> str:
        return f"Compilation(device={self.device!r}, outcomes={self.outcomes!r})"

    async def aclose(self) -> None:
        """Close its bursts and let the driver free the model, which it does once executions in flight are over.

        Calls of `compute` that wait end with `CallerError`. Those that the driver has are given 2 s to be answered.
        A busy driver is given 2 s for each burst and 2 s for the model. It frees the rest later. If the caller is cancelled, the driver is
        asked to free everything, and the call does not wait for that.
        """
        await self._parts.aclose()

    @property
    def model(self) -> PooledModel:
        return self._parts.kept_model.model

    @property
    def outcomes(self) -> tuple[CacheOutcome, ...]:
        return self._parts.kept_model.outcomes

    @property
    def plan(self) -> tuple[Step, ...]:
        """The steps of the plan, in the order in which they run: `.device, .nodes, .inputs, .outputs`.

        A model that one device runs whole is one step. If it came from a cache, its graph is read now for the names of its nodes, which
        blocks for some milliseconds. With mode "jit" there are no steps before the first execution.

        Raises:
            CallerError: the model's file is broken, or has changed since.
        """
        return self._parts.kept_model.plan

    @property
    def device(self) -> str:
        """Name of the device that runs the next execution. While nothing is compiled yet, that of the first candidate."""
        return self._parts.kept_model.device

    @property
    def runs_on(self) -> str:
        """What computes it, read back from the engine, as in "CUDAExecutionProvider (120 nodes), CPUExecutionProvider (3 nodes)".

        Empty while nothing is compiled, and if the engine does not say it.
        """
        serving = self._parts.kept_model.compiled.serving
        return "" if serving is None else serving.prepared.runs_on

    @property
    def batching(self) -> BatchingState | None:
        """Whether the driver joins requests, why not, and what it has measured. None without `compile(batch=)`."""
        if self._parts.kept_model.request.options.batching is None:
            return None
        kept_model = self._parts.kept_model
        serving = kept_model.compiled.serving
        rows = None if serving is None else serving.prepared.rows
        if serving is None or rows is None:
            why = "the model is not compiled yet" if serving is None else f"device {self.device!r} joins no requests"
            if kept_model.joined_deaths >= MOST_JOINED_DEATHS:
                why = f"{kept_model.joined_deaths} drivers died within joined runs of this model"
            return BatchingState(False, why, {}, 1, {})
        runs = serving.prepared.joined_runs()
        reason = "a joined run differed from one of its rows alone; the log has more" if runs is not None and runs.off else rows.reason
        row_ms = {1 << size: row_ns / 1e6 for size, row_ns in enumerate(() if runs is None else runs.size_row_ns) if row_ns}
        most = 1 if runs is None else runs.most
        why = reason
        if not why and most == 1 and len(row_ms) > 1:
            why = "; ".join(f"a row took {ms:.3g} ms in runs of {size}" for size, ms in row_ms.items())
        return BatchingState(not reason, why, dict(rows.inputs), most, row_ms)

    def statistics(self) -> dict[str, Any]:
        """Return what the driver has run for the bursts of this compilation with `batch=`, since it prepared the model.

        `runs` counts engine runs, `rows` the requests' rows in them, and `rows_per_run` is their ratio. `by_rows` counts runs by their
        rows: 1, 2, 4 and so on, each up to the next one. All are 0 without `batch=`.
        """
        serving = self._parts.kept_model.compiled.serving
        runs = None if serving is None else serving.prepared.joined_runs()
        if runs is None:
            return {"runs": 0, "rows": 0, "rows_per_run": 0.0, "by_rows": {}}
        by_rows = {1 << size: count for size, count in enumerate(runs.size_runs) if count}
        return {"runs": runs.runs, "rows": runs.rows, "rows_per_run": runs.rows / max(1, runs.runs), "by_rows": by_rows}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One `aionn.Stage` each (state, reason, times), from quick to best, as they are now; empty outside mode "staged"."""
        staging = self._parts.staging
        return () if staging is None else staging.stages

    async def wait_for_stage(self, name: str, timeout_s: float | None = None) -> None:
        """Return when that stage serves, has served, or is not needed because a better one is stored.

        The stage is made at once, whatever the policy says about use. It is compared on inputs of the app's executions. Before the first
        one, it is compared on made-up inputs. A model that cannot run these is compared after its next execution. To compare, the model is
        prepared again if its driver has died, as for an execution.

        Raises:
            CallerError: there is no such stage.
            StageRejected: it will not serve; `.reason` says why.
            DeadlineError: it is not decided after `timeout_s` seconds.
        """
        staging = self._parts.staging
        if staging is None:
            raise CallerError("this compilation has no stages; compile the model with mode='staged'")
        await self._parts.wait_for_stage(staging, name, timeout_s)

    async def allocate(
        self,
        *,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        shape: tuple[int, ...] | None = None,
        timeout_s: float | None = None,
    ) -> DeviceMemory:
        """Allocate memory in the driver that may stand for those inputs and outputs of this model (a memory domain).

        Args:
            inputs: names; all inputs and outputs have one element type, and shapes that fit each other.
            outputs: the same for outputs.
            shape: to fill in what the operands leave open.
            timeout_s: seconds after which the call ends with `DeadlineError`.

        Returns:
            Uninitialized memory: fill it by `copy_from`, `reset`, or an execution that writes it.

        Raises:
            CallerError: the names, types or shapes do not go together.
            MemoryAllocationError: the driver cannot have that memory now.
            DeadlineError: it was not allocated in time.
            DriverDiedError, DriverHungError: the driver is gone.

        NNAPI: ANeuralNetworksMemory_createFromDesc.
        """
        self._parts.check_frames("device memory")
        roles = DeviceRoles([self._parts.roles(inputs, outputs)], shape)
        deadline_ns = deadline_of(timeout_s)
        with ending_by(deadline_ns, "the device memory was not allocated"):
            return await allocate([self._parts.kept_model], roles, deadline_ns)

    async def warm_up(self, runs: int = 2, *, inputs: Mapping[str, Any] | None = None) -> None:
        """Run the model before the app does, so that the app's first execution is as quick as the later ones.

        No statistics, no estimate and no stage counts these runs. With mode "jit" the model is compiled first.

        Args:
            runs: how often each instance runs.
            inputs: as for `compute`. None: random numbers from 0 to below 1, always the same, with 1 for open dimensions.

        Raises:
            CallerError: `runs` is not a whole number of at least 1; or inputs cannot be made up, because an input has no shape in the model
                or takes texts, sequences, maps or optionals; or the model does not run on made-up inputs.
            ExecutionError, DriverDiedError, DriverHungError: as for `compute`.
        """
        from aionn.runtime.executing.warming import warm_up  # few apps ask for it

        await warm_up(self._parts.kept_model, self._parts.arguments, runs, inputs)

    @property
    def name(self) -> str:
        """How health, metrics, traces and logs show the compilation: as it was named, or by its model's file."""
        return self._parts.kept_model.record.name

    def burst(self, *, depth: int = 8, anticipate: bool = False, name: str | None = None, warm: bool = False) -> Burst:
        """Return a stream of executions to the driver: `async with compilation.burst() as burst`.

        Args:
            depth: the most requests that may be in flight at once. Further callers wait, in order.
            anticipate: let the driver run the model once shortly before it expects a request, so that the request finds warm caches and
                an awake CPU. For streams of short runs with a rhythm. It takes some per cent of a core, and results are the same. Where it
                cannot help, it does nothing: see docs/explanation/the-burst.md.
            name: of the burst in `aionn top`, metrics, traces and logs. None: it is counted with the other bursts of the compilation.
            warm: run the model once on made-up inputs when the burst is opened, as `warm_up` does.

        Raises:
            CallerError: `depth` is not a whole number of at least 1, or the model has strings, sequences, maps or optionals, which only
                `compute` takes.
        """
        self._parts.check_frames("a burst")
        depth = checked_count("burst: depth", depth, 1)
        connection = self._parts.bursts.new(depth, bool(anticipate), checked_name("burst", name))
        if not warm:
            return burst_over(connection)
        from aionn.runtime.executing.warming import warm_up  # few bursts ask for it

        runs_once = partial(warm_up, self._parts.kept_model, self._parts.arguments, 1)
        return burst_over(connection, runs_once)

    def blocking(self, *, anticipate: bool = False, name: str | None = None) -> BlockingBurst:
        """Return a burst for a thread without an event loop: `with compilation.blocking() as burst: burst.compute(...)`.

        Any thread may make and use it. One thread at a time may use each, so open one for each thread. A call waits without the GIL and
        without the runtime's loop. Only the start of a driver and the preparation of the model need the loop.

        Args:
            anticipate: as for `burst`.
            name: as for `burst`.

        Raises:
            CallerError: as `burst`.
        """
        from aionn.runtime.streaming.blocking_runtime import blocking_burst  # most apps have a loop

        self._parts.check_frames("a blocking burst")
        return blocking_burst(self._parts.bursts, bool(anticipate), checked_name("blocking", name))

    def recurrent(
        self,
        states: Mapping[str, str],
        *,
        snapshot_every: int = 32,
        initial: Mapping[str, NDArray[Any]] | None = None,
        name: str | None = None,
    ) -> RecurrentStream:
        """Return a stream whose state stays in the driver and survives the driver's end: `async with compilation.recurrent(...) as stream`.

        Args:
            states: for each input that is a state, the output that is its successor, as in `{"state": "stateN"}`.
            snapshot_every: the app copies the state out of the driver after so many frames, and keeps the inputs of the frames since.
                After the end of a driver, at most so many frames are computed again.
            initial: what a state begins with, by the name of the input. Those left out are zeros.
            name: as for `burst`.

        Raises:
            CallerError: the names, types or shapes do not fit the model, or a state with an open shape has nothing to begin with. Or
                `snapshot_every` is not a whole number of at least 1.
        """
        from aionn.runtime.streaming.recovering import (
            KeptState,  # most apps have no recurrent model
            RecurrentStream,
        )

        parts = self._parts
        parts.check_frames("a recurrent stream")
        name = checked_name("recurrent", name)
        state = KeptState(parts.kept_model, parts.roles, states, initial, name)
        every = checked_count("recurrent: snapshot_every", snapshot_every, 1)
        return RecurrentStream(parts.bursts.new(2, name=name), state, every)

    async def compute(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Mapping[str, Any] | None = None,
        measure_timing: bool = False,
        timeout_s: float | None = None,
        retry: int | Retries = 0,
    ) -> Outputs:
        """Run the model once. Several tasks may call at once, and requests go in order.

        The first call opens a connection to the driver. It is kept until no call has come for 10 to 20 s. At most 16 calls are with the
        driver at once. Further calls wait in order and take no shared memory while they wait.

        Args:
            inputs: one array per model input, by name. Shapes and dtypes as `Model.inputs` says. For an input whose type is an
                `aionn.hal.ValueType`: a list for a sequence, a dict for a map, None for an absent optional.
            outputs: where outputs are to be written instead, by name, as for `Burst.compute`.
            measure_timing: fill `.timing` of the result.
            timeout_s: as for `Burst.compute`.
            retry: as for `Burst.compute`.

        Returns:
            One array per output, by name, owned by the caller; or a list, a dict or None, as for inputs.

        Raises:
            CallerError: a name, shape or dtype does not fit; nothing was sent.
            DeadlineError: no answer in time.
            DeviceBusyError: too many calls wait (`Batching.max_waiting`); nothing was sent.
            ExecutionError: the driver answered that it failed.
            MemoryAllocationError: there is no memory for arrays of these shapes.
            DriverDiedError, DriverHungError: the driver is gone; the next call starts a new one. `DeviceMemoryLostError` as for
                `Burst.compute`.

        NNAPI: ANeuralNetworksExecution_compute.
        """
        if retry:
            return await retried(self.compute, inputs, outputs, measure_timing, timeout_s, retry)
        kept, admission = self._parts.kept, self._parts.bursts.admission
        if admission is None:
            return await kept.compute(inputs, outputs, measure_timing, timeout_s)
        return await admission.run(partial(kept.compute, inputs, outputs, measure_timing, timeout_s), timeout_s, kept.ended)

    def start(
        self,
        inputs: Mapping[str, Any],
        *,
        after: Iterable[Event | int | HasFileno] = (),
        outputs: Mapping[str, Any] | None = None,
        measure_timing: bool = False,
        timeout_s: float | None = None,
    ) -> Event:
        """Start an execution that begins when everything in `after` is done. Returns its event at once.

        An execution that depends on one of the same driver is with the driver at once and begins when that one ends, without this loop.
        Starts are independent of each other, except for `after`. One that waits may delay later ones of its compilation. At most 64 may be
        pending. Arrays are copied now, so the app may change them at once.

        Args:
            inputs: as for `compute`. Memory that an execution in `after` writes is read when that one is done.
            after: events of any compilation, and descriptors of the app's (eventfds, pipes, sockets), which must become readable. The
                descriptors are duplicated. An event that fails makes this execution fail; a descriptor only says "done".
            outputs: where outputs are to be written instead, by name. An `aionn.Memory` may be an input of the next `start` at once. Its
                size must be that of the output, and where the model leaves the shape open, give `memory.shaped(shape)`.
            measure_timing: fill `.timing` of the result, from the end of the dependencies on, and `Event.since_launch`.
            timeout_s: the event fails with `DeadlineError` after so many seconds, also while it waits.

        Raises:
            CallerError: an argument does not fit, or 64 executions are pending; nothing was sent.
            DeviceBusyError: too many executions wait (`Batching.max_waiting`); nothing was sent.
            MemoryAllocationError: there is no memory or no file descriptor left for the arguments.

        All other errors are raised by `await event`. They are those of `compute`.

        NNAPI: ANeuralNetworksExecution_startComputeWithDependencies.
        """
        self._parts.check_frames("start")
        return self._parts.starts.start(inputs, after, outputs, measure_timing, timeout_s)


async def allocate_for(
    session: Session,
    inputs: Sequence[tuple[Compilation, str]],
    outputs: Sequence[tuple[Compilation, str]],
    shape: tuple[int, ...] | None,
    timeout_s: float | None,
) -> DeviceMemory:
    """See `Runtime.allocate`."""
    named: dict[CompilationParts, tuple[list[str], list[str]]] = {}
    for what, pairs in (("inputs", inputs), ("outputs", outputs)):
        for pair in _pairs(what, pairs):
            parts = pair[0]._parts
            if parts.session is not session:
                raise CallerError(f"{what}: a compilation belongs to another runtime; give compilations of this one")
            named.setdefault(parts, ([], []))[what == "outputs"].append(pair[1])
    roles = DeviceRoles([parts.roles(*names) for parts, names in named.items()], shape)
    deadline_ns = deadline_of(timeout_s)
    with ending_by(deadline_ns, "the device memory was not allocated"):
        return await allocate([parts.kept_model for parts in named], roles, deadline_ns)


def _pairs(what: str, pairs: Any) -> Sequence[tuple[Compilation, str]]:
    if isinstance(pairs, str | Mapping) or not isinstance(pairs, Sequence):
        raise CallerError(f"{what}={pairs!r}: give pairs of a compilation and a name, as in {what}=[(compilation, 'state')]")
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Compilation) and isinstance(pair[1], str)):
            raise CallerError(f"{what}: {pair!r} is not a pair of a compilation and a name, as in (compilation, 'state')")
    return pairs


def parts_of(compilation: Compilation) -> CompilationParts:
    """Return the parts behind a compilation, for the runtime."""
    return compilation._parts
