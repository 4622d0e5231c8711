"""`Runtime`: owns every task, every driver process and all memory; leaves nothing behind.

A runtime belongs to the event loop it was opened in. Its tasks live in a separate task (`OwnedTasks`), so any task of that loop
may close it. Closing ends calls that still wait with `CallerError`, and every driver process, in bounded time. A loop that ends closes
the runtimes that were left open in it. A child of `os.fork` can close a runtime of its parent, which does nothing.

`open` starts a driver process before it imports what an open runtime needs. So this module imports nothing heavy, and its methods
import what they use.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar

from aionn.errors import CallerError, DeadlineError
from aionn.runtime.imports import import_needed
from aionn.runtime.processes.early import checked_start, end_early, spawn_early
from aionn.runtime.processes.spawning import DEFAULT_HANG_S, GRACE_S, KILL_S, Settings, checked_state_dir
from aionn.tasks import (
    OwnedTasks,
    bounded_shield,
    checked_count,
    checked_seconds,
    deadline_of,
    ending_by,
    is_ours,
    running_loop,
    seconds_until,
)

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from aionn.caching.store import CacheStore
    from aionn.hal.model import Model
    from aionn.runtime.compilation import Compilation
    from aionn.runtime.executing.device_memory import DeviceMemory
    from aionn.runtime.model import Model as AppModel
    from aionn.runtime.parts import CompilationParts
    from aionn.runtime.preparing.cached import CacheChoice
    from aionn.runtime.processes.devices import Device, Devices
    from aionn.runtime.session import Session
    from aionn.runtime.staging.stage import StagePolicy

CLOSE_STORES_S = 5.0
"""A cache directory on a disk that hangs must not hold up the app's end."""

CLOSE_S = GRACE_S + KILL_S + CLOSE_STORES_S
"""What closing a runtime may take."""

T = TypeVar("T")
Preference = Literal["fast_single_answer", "sustained_speed", "low_power"]
PriorityName = Literal["low", "medium", "high"]
Mode = Literal["eager", "jit", "staged"]


class Runtime:
    """Where models run, in an asyncio or uvloop loop. Use it in `async with`, or `open` it and `aclose` it.

    Args:
        state_dir: folder in which drivers keep the digests of what they stored, private to this account and made if it is missing. It
            must live as long as the cache: where only the cache survives, nothing in it can be trusted. None: the user's state folder
            (`$XDG_STATE_HOME/aionn`, else `~/.local/state/aionn`).
        hang_s: a driver process that makes no progress for so many seconds is killed, and its calls end with `DriverHungError`.
            A long execution that computes is progress, unless it takes more than 20 times as long as nearly all executions of its model.
            None: it is logged, and never killed.
        threads: the most engine threads that one compilation may have in its driver process. Several compilations in one driver add up.
            None: as many as the CPUs that the process may use, by its affinity and the container's quota.
        start: names of devices whose driver processes start when the runtime opens, while the app imports and reads. () starts none.
            None: the first installed device. A driver that no `compile` asks for within 10 seconds ends again. A device that cannot
            start is logged, and the first `compile` that needs it raises the error.

    Raises:
        CallerError: `hang_s` or `threads` is not a positive number; or `start` names a device that is not installed.

    Attributes:
        stage_policy: a `StagePolicy`. It says when better stages are made, and what they must show, for later calls of `compile` with
            mode "staged". Example: `runtime.stage_policy = aionn.StagePolicy(executions=100, min_gain=0.2)`.

    Example:
        >>> async with aionn.Runtime() as runtime:
        ...     compilation = await runtime.compile(await runtime.load("model.onnx"))
        ...     outputs = await compilation.compute({"input": x})
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        hang_s: float | None = DEFAULT_HANG_S,
        state_dir: str | os.PathLike[str] | None = None,
        start: Sequence[str] | None = None,
    ) -> None:
        most = 0
        if threads is not None:
            from aionn.hal.types import MAX_THREADS

            most = checked_count("Runtime: threads", threads, 1, MAX_THREADS)
        self._settings = Settings(checked_state_dir(state_dir), checked_seconds("hang_s", hang_s), most)
        self._start = checked_start(start)
        self._session: Session | None = None
        self._devices: Devices
        self._tasks: OwnedTasks
        self._stores: dict[str, CacheStore] = {}
        self._compilations: weakref.WeakSet[CompilationParts] = weakref.WeakSet()

    @cached_property
    def stage_policy(self) -> StagePolicy:
        """When better stages are made. Assign another one to change it."""
        from aionn.runtime.staging.stage import StagePolicy

        return StagePolicy()

    async def __aenter__(self) -> Runtime:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Open the runtime in this event loop; `aclose` must follow. A runtime is opened once.

        The first opening in a process imports NumPy and most of aionn, which holds the loop for about 0.1 s.

        Raises:
            CallerError: it has been opened before, or no asyncio or uvloop loop runs.
        """
        if self._session is not None:
            raise CallerError("this runtime has been opened already; make a new aionn.Runtime() to open another one")
        loop = running_loop()
        is_ours(loop)  # noted, before there can be a fork
        early = spawn_early(self._start, self._settings)
        try:
            import_needed()
            await self._open(loop)
            self._opened()  # it may have been closed meanwhile
            self._devices.start_early(self._start, early)
        finally:
            end_early(early)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        from aionn.runtime.processes.devices import Devices
        from aionn.runtime.session import Session

        self._tasks = OwnedTasks(self._close, "runtime")
        self._devices = Devices(self._tasks, self._settings)
        self._session = Session(loop, self._tasks, self._devices)
        self._devices.check_use = self._session.check_open
        try:
            await self._tasks.open()
        except BaseException:
            self._session.leave_page()
            raise

    async def aclose(self) -> None:
        """Close the runtime: calls that still wait end with `CallerError`, and driver processes end.

        Call it from any task of the runtime's loop, and as often as you like: each call returns when the runtime is closed. A caller that
        is cancelled with `asyncio.Task.cancel` returns at once, and the closing goes on.

        Raises:
            CallerError: the runtime belongs to another event loop.
        """
        session = self._session
        if session is None or session.inherited:
            return
        if running_loop() is not session.loop:
            raise CallerError("this runtime belongs to another event loop; close it in the loop that opened it")
        session.close()
        await self._tasks.aclose(CLOSE_S)

    async def _close(self) -> None:
        """Close everything, as the last act of the runtime's own task. It ends in bounded time, also when that task is cancelled."""
        if self._session is not None:
            self._session.close()
        # First, or a stage would try to go on with devices that end.
        for parts in list(self._compilations):
            parts.compiled.abandon()
        try:
            await self._devices.aclose()
        finally:
            for parts in list(self._compilations):
                parts.end()
            if self._session is not None:
                self._session.leave_page()
            # Side by side: no store waits for another one's disk before it ends the calls that wait in it.
            import anyio

            with bounded_shield(CLOSE_STORES_S):
                async with anyio.create_task_group() as closing:
                    for store in self._stores.values():
                        closing.start_soon(store.aclose)

    def _opened(self) -> Session:
        """Return the session.

        Raises:
            CallerError: the runtime is not open, or this is another process or another event loop.
        """
        if self._session is None:
            raise CallerError("the runtime is not open; use it inside `async with aionn.Runtime() as runtime`")
        self._session.check_open()
        return self._session

    @property
    def devices(self) -> list[Device]:
        """Every device this runtime knows, best first: the installed ones and those asked for by class."""
        self._opened()
        return self._devices.known

    async def compile(
        self,
        model: Model,
        *,
        devices: Sequence[str] | None = None,
        preference: Preference = "fast_single_answer",
        priority: PriorityName = "medium",
        threads: int | None = None,
        instances: int = 1,
        cache_dir: str | Path | None = None,
        token: bytes | None = None,
        mode: Mode = "eager",
        stages: Sequence[str] | None = None,
        options: Mapping[str, Mapping[str, object]] | None = None,
        idle_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Compilation:
        """Prepare a model on a device, in the device's driver process.

        Args:
            model: from `runtime.load`, `Model.load`, `Model.from_onnx` or `Model.from_bytes`.
            devices: names of the devices that may be used, best first, or None for every installed device. A model that no device can
                run whole is cut over several: see docs/drivers.md. With None, the next device is tried if one fails to prepare the model,
                and a CPU device if an execution fails, with a warning in the log. Explicit devices forbid any fallback.
                "package.module:Class" names an engine that is not installed as an entry point, and "onnxruntime:cuda" a provider of an
                engine.
            preference: "sustained_speed" for streams, "low_power" never stays awake waiting.
            priority: "high" goes before the others in the same driver. "low" lives in another driver process, which gets only CPU time
                that no other process wants.
            threads: how many engine threads one run may use. None: the engine chooses, up to `Runtime(threads=)`; with "low_power" it is
                one thread.
            instances: how many runs may go on beside each other, over one copy of the weights. Many callers gain from several
                instances with one thread each; a single caller gains from several threads.
            cache_dir: folder where compilations are kept, made if it is missing, or None for no caching.
            token: 32 bytes, unique to the model within the app, only with `cache_dir`. None: the model's own token, for which a loaded
                model is digested first. With another token, it is digested only before something is stored.
            mode: "eager" compiles now. "jit" compiles at the first execution, once for all callers; `timeout_s` does not count then.
                "staged" serves from the best of `stages` that is stored, else from the first one. It makes the better ones in the
                background, as `stage_policy` says.
            stages: devices from quick to best, only with mode "staged", and in place of `devices`.
            options: options of engines, by the name of the device: `{"onnxruntime:cuda": {"device_id": 1}}`. Each is a text, a number,
                True or False, or the path of a file. They are part of the cache key, files by their content. See docs/drivers.md.
            idle_s: give the driver's memory back after so many seconds without use, or up to a quarter more. A driver process that holds
                nothing else ends then. The next use loads the model again from `cache_dir`, or compiles it again without one. Executions,
                leased frames and open device memories are use. An open burst alone is not. None: never. See docs/drivers.md.
            timeout_s: seconds after which the call ends with `DeadlineError` and the compile is cancelled.

        Returns:
            The compilation: `compute`, `burst`, `outcomes`.

        Raises:
            CallerError: an argument is wrong, or `threads` times `instances` is more than `Runtime(threads=)`; or the file of a loaded
                model is broken, or was written to since.
            DeviceUnavailableError: a device asked for by name is not there.
            CompilationError: the model cannot be prepared; `.node` and `.reason` where known.
            DeadlineError: it took longer than `timeout_s`.
            DriverDiedError, DriverHungError: the driver went away meanwhile.
        """
        from aionn import trace
        from aionn.runtime.asked import check_modes, options_of, with_threads
        from aionn.runtime.compilation import Compilation
        from aionn.runtime.parts import compiled_parts, staged_parts
        from aionn.runtime.preparing.options import with_options
        from aionn.runtime.preparing.plan import checked_names
        from aionn.runtime.preparing.reading import digested
        from aionn.runtime.preparing.renewal import Order

        session = self._opened()
        prepare_options = with_threads(options_of(preference, priority, timeout_s), threads, instances, self._settings.threads)
        check_modes(model, cache_dir, token, mode, stages, devices)
        idle = checked_seconds("idle_s", idle_s)
        names = checked_names(self._devices, devices)

        async def compiled() -> CompilationParts:
            candidates = names if stages is None else stages
            complete = await with_options(self._devices, prepare_options, options, candidates)
            own = await digested(session.tasks, model) if cache_dir is not None and token is None else token
            order = Order(complete, candidates, self._cache(cache_dir, own), idle)
            if stages is not None:
                return await staged_parts(session, model, order, stages, self.stage_policy)
            return await compiled_parts(session, model, order, mode == "jit")

        with trace.span("compile", preference=preference):
            parts = await _within(timeout_s, prepare_options.deadline_ns, compiled())
        self._compilations.add(parts)
        return Compilation(parts)

    async def load(self, path: str | os.PathLike[str]) -> AppModel:
        """Open an ONNX model, and read nothing yet, as `aionn.Model.load` does. The model may outlive the runtime.

        Raises:
            CallerError: `path` is not a readable file with at least one byte; or the runtime is not open.
        """
        from aionn.runtime.model import Model as AppModel

        self._opened()
        return await AppModel.load(path)

    def _cache(self, cache_dir: str | Path | None, token: bytes | None) -> CacheChoice | None:
        if cache_dir is None or token is None:
            return None
        from aionn.caching.store import CacheStore
        from aionn.runtime.preparing.cached import CacheChoice

        path = os.path.abspath(cache_dir)
        store = self._stores.get(path)
        if store is None:
            store = self._stores[path] = CacheStore(path)
        return CacheChoice(store, token)

    async def allocate(
        self,
        *,
        inputs: Sequence[tuple[Compilation, str]] = (),
        outputs: Sequence[tuple[Compilation, str]] = (),
        shape: tuple[int, ...] | None = None,
        timeout_s: float | None = None,
    ) -> DeviceMemory:
        """Allocate memory in a driver that stands for inputs and outputs of several compilations, as `Compilation.allocate` does for one.

        So what one model has written is read by another one, and no byte goes through the app: an encoder's output by its decoder, for
        example. A swap of one of the compilations moves the memory for all of them, within their driver.

        Args:
            inputs, outputs: pairs of a compilation and a name. All lie in one driver process, have one element type, and shapes that fit.
            shape: to fill in what the operands leave open.
            timeout_s: seconds after which the call ends with `DeadlineError`.

        Raises:
            CallerError: a compilation is of another runtime, or lies in another driver process; or the names, types or shapes do not
                go together.
            MemoryAllocationError, DeadlineError, DriverDiedError, DriverHungError: as `Compilation.allocate`.

        Example:
            >>> hidden = await runtime.allocate(outputs=[(encoder, "hidden")], inputs=[(decoder, "hidden")])
            >>> await encoder.compute({"text": text}, outputs={"hidden": hidden})
            >>> outputs = await decoder.compute({"hidden": hidden})
        """
        from aionn.runtime.compilation import allocate_for

        return await allocate_for(self._opened(), inputs, outputs, shape, timeout_s)

    async def swap(self, compilation: Compilation, model: Model, *, timeout_s: float | None = None) -> None:
        """Let another model take over a compilation and its open bursts, between two executions: the app's own new version.

        The new model is compiled in the background on the device that serves now, kept in the same cache, and tried once. Then it is
        swapped in: the old model computes every execution before the swap, and the new model every execution after it. Stages begin anew.

        Args:
            compilation: of this runtime.
            model: with the same inputs and outputs: names, order, types, dimensions.
            timeout_s: seconds after which the call ends with `DeadlineError`.

        Raises:
            CallerError: it is not a model, or it has other inputs or outputs.
            CompilationError: it cannot be prepared, or cannot run.
            DeadlineError, DriverDiedError, DriverHungError: as for `compile`.
            In all cases the model before goes on serving.
        """
        from aionn import trace
        from aionn.runtime.compilation import Compilation, parts_of
        from aionn.runtime.staging.swapping import swap_model

        session = self._opened()
        if not isinstance(compilation, Compilation) or (parts := parts_of(compilation)).session is not session:
            raise CallerError("swap takes a compilation of this runtime")
        with trace.span("swap"), parts.compiled.use.hold(), ending_by(deadline_of(timeout_s), "the new model was not swapped in"):
            await swap_model(parts.new_model(), model, timeout_s)


async def _within(timeout_s: float | None, deadline_ns: int | None, work: Awaitable[T]) -> T:
    import anyio

    with anyio.move_on_after(seconds_until(deadline_ns)):
        return await work
    raise DeadlineError(f"the model was not prepared within {timeout_s} s; the compile has been cancelled")
