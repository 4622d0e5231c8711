"""`Runtime`: owns every task, every driver process and all memory; leaves nothing behind.

A runtime belongs to the event loop it was opened in. Its tasks live in a separate task (`OwnedTasks`), so any task of that loop
may close it. Closing ends calls that still wait with `CallerError`, and every driver process, in bounded time. A loop that ends closes
the runtimes that were left open in it. A child of `os.fork` can close a runtime of its parent, which does nothing.

`open` starts a driver process before it imports what an open runtime needs. So this module imports nothing heavy, and its methods
import what they use.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeVar

from aionn.engines.installed import with_descriptors
from aionn.errors import CallerError
from aionn.loopless import AsyncOnly, checked_count, checked_name, checked_seconds, deadline_of, is_ours, running_loop
from aionn.runtime.processes.spawning import (
    DEFAULT_HANG_S,
    Settings,
    checked_driver_env,
    checked_engine_needs,
    checked_sandbox,
    checked_start,
    checked_state_dir,
    end_early,
    spawn_early,
)
from aionn.tasks import ending_by

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from aionn.events import Event
    from aionn.hal.batching import Batching
    from aionn.hal.model import PooledModel
    from aionn.needs import Needs
    from aionn.runtime.compilation import Compilation
    from aionn.runtime.executing.device_memory import DeviceMemory
    from aionn.runtime.health import Health, HealthPolicy
    from aionn.runtime.model import Model as AppModel
    from aionn.runtime.open_runtime import OpenRuntime
    from aionn.runtime.processes.devices import Device
    from aionn.runtime.record import EventStream
    from aionn.runtime.staging.stage import StagePolicy


TO_OPEN, TO_PREPARE, TO_COMPUTE = "aionn.runtime.open_runtime", "aionn.runtime.asked", "aionn.runtime.compilation"
"""What an open runtime needs, what prepares models, and what computes with them. `open` imports all of it while a driver starts. It does so
in the loop's thread, because two threads cannot import NumPy at once."""


def import_needed(*modules: str) -> None:
    """Import modules and what they need. All that stays, so looking for garbage in it meanwhile is a waste of time.

    Raises:
        MemoryAllocationError: this process has no free file descriptor to read modules with.
    """
    if modules[-1] in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        with with_descriptors("the import of what a runtime needs"), _short_spins():
            for module in modules:
                import_module(module)
    finally:
        if not gc.get_freeze_count():  # what the app has frozen stays frozen
            gc.freeze()  # with `unfreeze`, all that exists counts as old, so the next collection does not look through it (8 ms)
            gc.unfreeze()
        if collects:
            gc.enable()


@contextmanager
def _short_spins() -> Iterator[None]:
    """Let NumPy's BLAS, if it is loaded in the body, spin for 2^20 cycles and not for 2^26 before its idle threads sleep.

    It spins once right after it is loaded, and would take a CPU for 30 ms from the driver that starts just then. Later it costs the app
    nothing that can be measured. An app that imports NumPy first, or sets the variable, keeps its own setting.
    """
    name = "OPENBLAS_THREAD_TIMEOUT"
    if "numpy" in sys.modules or name in os.environ:
        yield
        return
    os.environ[name] = "20"
    try:
        yield
    finally:
        os.environ.pop(name, None)


T = TypeVar("T")
Preference = Literal["fast_single_answer", "sustained_speed", "low_power"]
PriorityName = Literal["low", "medium", "high"]
Mode = Literal["eager", "jit", "staged"]


class Runtime(AsyncOnly):
    """Where models run, in an asyncio or uvloop loop. Use it in `async with`, or `open` it and `aclose` it.

    Args:
        state_dir: folder in which drivers keep the digests of what they stored, private to this account and made if it is missing. It
            must live as long as the cache: where only the cache survives, nothing in it can be trusted. None: the user's state folder
            (`$XDG_STATE_HOME/aionn`, else `~/.local/state/aionn`). It must not be a folder from which Python imports.
        hang_s: a driver process that makes no progress for so many seconds is killed, and its calls end with `DriverHungError`.
            A long execution that computes is progress, unless it takes more than 20 times as long as nearly all executions of its model.
            None: it is logged, and never killed.
        threads: the most engine threads that one compilation may have in its driver process. Several compilations in one driver add up.
            None: as many as the CPUs that the process may use, by its affinity and the container's quota.
        start: names of devices whose driver processes start when the runtime opens, while the app imports and reads. () starts none.
            None: the first installed device. A driver that no `compile` asks for within 10 seconds ends again. A device that cannot
            start is logged, and the first `compile` that needs it raises the error.
        name: of the runtime in `aionn top`, metrics and traces. None: the name of the program.
        health_policy: an `aionn.HealthPolicy`, which says what `health` counts as degraded. None: only what always does.
        sandbox: how much of its rights a driver gives away before it sees a model (`docs/security.md`). "auto": as much as this kernel
            allows; `Device.sandbox` and `aionn devices` show it. "require": a device that cannot be confined raises
            `DeviceUnavailableError`. "off": drivers keep the app's rights. None: the variable `AIONN_SANDBOX` decides, else "auto".
        driver_env: environment variables for drivers, by name. They beat the app's. A confined driver gets no others of the app than those
            that Python, its libraries and engines are known to read.
        engine_needs: what the sandbox must allow, as `aionn.hal.Needs` by the name of a device, as in `compile(devices=)`. It takes the
            place of what the engine's package states in its `aionn-engine.toml`.
        template: whether drivers after the first one are copies of a process that has imported what drivers need, where that is possible.
            They are ready in a fraction of the time. They share the layout of their addresses (`docs/security.md`). False: each driver
            is started by itself.
        service: use the drivers of a service (`aionn serve`), which several apps share, by the path of its socket. "auto": of the
            service of this user if one listens when the runtime opens, else drivers that the app starts. "off": drivers that the app
            starts. None: the variable `AIONN_SERVICE` decides, else "off". The service decides about `state_dir` and `template` then, and
            `hang_s` says when this app gives up; see docs/how-to/service.md.

    Raises:
        CallerError: an argument is not as described; or `start` names a device that is not installed.

    Attributes:
        name: by which `aionn top`, metrics and traces know the runtime. It does not change.

    Examples:
        >>> async with aionn.Runtime() as runtime:
        ...     compilation = await runtime.compile(await runtime.load("model.onnx"))
        ...     outputs = await compilation.compute({"x": x})
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        hang_s: float | None = DEFAULT_HANG_S,
        state_dir: str | os.PathLike[str] | None = None,
        start: Sequence[str] | None = None,
        name: str | None = None,
        health_policy: HealthPolicy | None = None,
        sandbox: str | None = None,
        driver_env: Mapping[str, str] | None = None,
        engine_needs: Mapping[str, Needs] | None = None,
        template: bool = True,
        service: str | os.PathLike[str] | None = None,
    ) -> None:
        self.name = checked_name("Runtime", name) or _program()
        self._health_policy = health_policy
        if health_policy is not None:
            from aionn.runtime.health import checked_policy

            checked_policy(health_policy)
        most = 0
        if threads is not None:
            from aionn.hal.types import MAX_THREADS

            most = checked_count("Runtime: threads", threads, 1, MAX_THREADS)
        confined = checked_sandbox(sandbox), checked_driver_env(driver_env), checked_engine_needs(engine_needs)
        self._settings = Settings(
            checked_state_dir(state_dir), checked_seconds("hang_s", hang_s), most, *confined, template, *_checked_service(service)
        )
        self._start = checked_start(start)
        self._owned: OpenRuntime | None = None

    async def __aenter__(self) -> Runtime:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Open the runtime in this event loop; `aclose` must follow. A runtime is opened once.

        The first opening in a process that starts a driver imports NumPy and most of aionn while the driver starts, which holds the loop
        for about 0.1 s. Otherwise the first `compile` does.

        Raises:
            CallerError: it has been opened before, or no asyncio or uvloop loop runs.
            DeviceUnavailableError: no service listens where `service` names one.
        """
        if self._owned is not None:
            raise CallerError("this runtime has been opened already; make a new aionn.Runtime() to open another one")
        loop = running_loop()
        is_ours(loop)  # noted, before there can be a fork
        early = {} if _is_served(self._settings) else spawn_early(self._start, self._settings)
        try:
            with with_descriptors("the opening of a runtime"):
                import_needed(*(TO_PREPARE, TO_COMPUTE) if early else (TO_OPEN,))
            from aionn.runtime.health import checked_policy
            from aionn.runtime.open_runtime import OpenRuntime

            self._owned = OpenRuntime(loop, self._settings, self.name, checked_policy(self._health_policy))
            await self._owned.open()
            self._owned.session.check_open()  # it may have been closed meanwhile
            self._owned.devices.start_early(self._start, early)
        finally:
            end_early(early)

    async def aclose(self) -> None:
        """Close the runtime: calls that still wait end with `CallerError`, and driver processes end.

        Call it from any task of the runtime's loop, and as often as you like: each call returns when the runtime is closed. A caller that
        is cancelled with `asyncio.Task.cancel` returns at once, and the closing goes on.

        Raises:
            CallerError: the runtime belongs to another event loop.
        """
        opened = self._owned
        if opened is None or opened.session.inherited:
            return
        if running_loop() is not opened.session.loop:
            raise CallerError("this runtime belongs to another event loop; close it in the loop that opened it")
        await opened.aclose()

    @property
    def _opened(self) -> OpenRuntime:
        """What the runtime owns while it is open.

        Raises:
            CallerError: it has not been opened, or was closed; or this is another process or another event loop.
        """
        if self._owned is None:
            raise CallerError("the runtime is not open; use it inside `async with aionn.Runtime() as runtime`")
        self._owned.session.check_open()
        return self._owned

    @property
    def devices(self) -> list[Device]:
        """Every device this runtime knows, best first: the installed ones and those asked for by class."""
        return self._opened.devices.known

    def events(self) -> EventStream:
        """Return a stream of what happens in the runtime from now on: compiles, drivers, stages, refused cache entries, dropped frames.

        At most 256 events wait for the stream to be read. Then the oldest is dropped, and `lost` of the stream counts it. The stream ends
        when the runtime is closed. `aionn.events` has the types.

        Raises:
            CallerError: the runtime is not open, or belongs to another event loop.

        Examples:
            >>> async for event in runtime.events():
            ...     if isinstance(event, aionn.events.DriverEnded) and event.cause != "closed":
            ...         print(f"the driver of {event.device} ended: {event.cause}")
        """
        from aionn.runtime.record import EventStream

        return EventStream(self._opened.session.record)

    async def compile(
        self,
        model: PooledModel,
        *,
        devices: Sequence[str] | None = None,
        preference: Preference = "fast_single_answer",
        priority: PriorityName = "medium",
        threads: int | None = None,
        instances: int | None = None,
        cache_dir: str | Path | None = None,
        cache_required: bool = False,
        token: bytes | None = None,
        mode: Mode = "eager",
        stages: Sequence[str] | None = None,
        stage_policy: StagePolicy | None = None,
        options: Mapping[str, Mapping[str, object]] | None = None,
        batch: Batching | None = None,
        idle_s: float | None = None,
        timeout_s: float | None = None,
        name: str | None = None,
        required: bool = True,
        on_event: Callable[[Event], object] | None = None,
    ) -> Compilation:
        """Prepare a model on a device, in the device's driver process.

        Args:
            model: from `runtime.load`, `Model.load`, `Model.from_onnx` or `Model.from_bytes`.
            devices: names of the devices that may be used, best first, or None for every installed device. A model that no device can
                run whole is cut over several: see docs/how-to/several-devices.md. With None, the next device is tried if one fails to
                prepare the model, and a CPU device if an execution fails, with a warning in the log. Explicit devices forbid any fallback.
                "package.module:Class" names an engine that is not installed as an entry point, and "onnxruntime:cuda" a provider of an
                engine.
            preference: "sustained_speed" for streams, "low_power" never stays awake waiting.
            priority: "high" goes before the others in the same driver. "low" lives in another driver process, which gets only CPU time
                that no other process wants.
            threads: how many engine threads one run may use. None: the engine chooses, up to `Runtime(threads=)`; with "low_power" it is
                one thread.
            instances: how many runs may go on beside each other, over one copy of the weights. Many callers gain from several
                instances with one thread each; a single caller gains from several threads. None: the engine chooses. ONNX Runtime
                takes as many as CPUs, at most 4, for a tiny model, which has one thread; else it takes one, and with `batch=`, too.
            cache_dir: folder where compilations are kept, made if it is missing, or None for no caching.
            cache_required: raise `CallerError` if `cache_dir` cannot keep the compilation, instead of compiling at each start. In mode
                "jit" the first execution raises what is seen only then, and in mode "staged" a better stage is rejected. Later, as after
                a driver's death, the cache is not required. A device that never caches raises nothing.
            token: 32 bytes, unique to the model within the app, only with `cache_dir`. None: the model's own token, for which a loaded
                model is digested first. With another token, it is digested only before something is stored.
            mode: "eager" compiles now. "jit" compiles at the first execution, once for all callers; `timeout_s` does not count then.
                "staged" serves from the best of `stages` that is stored, else from the first one. It makes the better ones in the
                background, as `stage_policy` says.
            stages: devices from quick to best, only with mode "staged", and in place of `devices`.
            stage_policy: when better stages are made, and what they must show before they serve. Only with mode "staged". None: the
                defaults of `aionn.StagePolicy`.
            options: options of engines, by the name of the device: `{"onnxruntime:cuda": {"device_id": 1}}`. Each is a text, a number,
                True or False, or the path of a file. They are part of the cache key, files by their content. See docs/how-to/providers.md.
            batch: join requests of several callers into one run, where the driver measures that it pays. None: each request runs alone. See
                docs/how-to/joining.md. It is part of the cache key.
            idle_s: give the driver's memory back after so many seconds without use, or up to a quarter more. A driver process that holds
                nothing else ends then. The next use loads the model again from `cache_dir`, or compiles it again without one. Executions,
                leased frames and open device memories are use. An open burst alone is not. None: never. See docs/how-to/idle-memory.md.
            timeout_s: seconds after which the call ends with `DeadlineError` and the compile is cancelled.
            name: of the compilation in health, metrics, traces and logs. None: the model's name without its suffix. Several may share one.
            required: whether the app cannot do its work without it. `Runtime.health` is ready once all required compilations serve.
            on_event: called in the loop with each event of this compilation, as `Runtime.events` yields them. It must return soon. Its
                first error is logged and changes nothing.

        Returns:
            The compilation: `compute`, `burst`, `outcomes`.

        Raises:
            CallerError: an argument is wrong, or `threads` times `instances` is more than `Runtime(threads=)`; or the file of a loaded
                model is broken, or was written to since; or the cache cannot be used although it is required.
            DeviceUnavailableError: a device asked for by name is not there.
            CompilationError: the model cannot be prepared; `.node` and `.reason` where known.
            DeadlineError: it took longer than `timeout_s`.
            DriverDiedError, DriverHungError: the driver went away meanwhile.
        """
        opened = self._opened
        import_needed(TO_PREPARE, TO_COMPUTE)
        from aionn.runtime.asked import Asked

        asked = Asked(
            model=model,
            devices=devices,
            preference=preference,
            priority=priority,
            threads=threads,
            instances=instances,
            cache_dir=cache_dir,
            cache_required=cache_required,
            token=token,
            mode=mode,
            stages=stages,
            stage_policy=stage_policy,
            options=options,
            batch=batch,
            idle_s=idle_s,
            timeout_s=timeout_s,
            name=name,
            required=required,
            on_event=on_event,
        )
        return await asked.compile(opened)

    def health(self) -> Health:
        """Return whether the runtime can do the app's work now. It waits for nothing, and any thread may call it, at any time.

        It is live unless only a restart of the process helps. It is ready while calls are answered: then all required compilations serve.
        See docs/reference/health.md.

        Examples:
            >>> health = runtime.health()
            >>> print(health.ready, health)
        """
        opened = self._owned
        if opened is None:
            from aionn.runtime.health import not_open

            return not_open()
        return opened.health.read()

    async def load(self, path: str | os.PathLike[str]) -> AppModel:
        """Open an ONNX model, and read nothing yet, as `aionn.Model.load` does. The model may outlive the runtime.

        Raises:
            CallerError: `path` is not a readable file with at least one byte; or the runtime is not open.
        """
        from aionn.runtime.model import Model as AppModel

        _ = self._opened  # raises unless the runtime is open
        return await AppModel.load(path)

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
            inputs: pairs of a compilation and a name. All lie in one driver process, have one element type, and shapes that fit.
            outputs: the same for outputs.
            shape: to fill in what the operands leave open.
            timeout_s: seconds after which the call ends with `DeadlineError`.

        Raises:
            CallerError: a compilation is of another runtime, or lies in another driver process; or the names, types or shapes do not
                go together.
            MemoryAllocationError, DeadlineError, DriverDiedError, DriverHungError: as `Compilation.allocate`.

        Examples:
            >>> hidden = await runtime.allocate(outputs=[(encoder, "hidden")], inputs=[(decoder, "hidden")])
            >>> await encoder.compute({"text": text}, outputs={"hidden": hidden})
            >>> outputs = await decoder.compute({"hidden": hidden})
        """
        from aionn.runtime.compilation import allocate_for

        return await allocate_for(self._opened.session, inputs, outputs, shape, timeout_s)

    async def swap(self, compilation: Compilation, model: PooledModel, *, timeout_s: float | None = None) -> None:
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

        After an error the model before goes on serving.
        """
        from aionn import trace
        from aionn.runtime.compilation import Compilation, parts_of
        from aionn.runtime.staging.swapping import swap_model

        session = self._opened.session
        if not isinstance(compilation, Compilation) or (parts := parts_of(compilation)).session is not session:
            found = "one of another runtime" if isinstance(compilation, Compilation) else type(compilation).__name__
            raise CallerError(f"swap takes a compilation of this runtime, not {found}; write runtime.swap(compilation, model)")
        about = trace.about(model=parts.kept_model.record.name)
        deadline_ns = deadline_of(timeout_s)
        with about, trace.span("swap"), parts.compiled.use.hold(), ending_by(deadline_ns, "the new model was not swapped in"):
            await swap_model(parts.new_model(), model, timeout_s)


def opened_of(runtime: Runtime) -> OpenRuntime | None:
    """Return what an open runtime owns, for packages above. None before it is opened."""
    return runtime._owned


def _checked_service(service: object) -> tuple[str, bool]:
    if service is None and "AIONN_SERVICE" not in os.environ:
        return "", False
    from aionn.remote.attaching import checked_service  # most apps start their drivers

    return checked_service(service)


def _is_served(settings: Settings) -> bool:
    """Return whether the service will have drivers for this app, so that none must be started early."""
    if not settings.service:
        return False
    from aionn.remote.attaching import is_socket

    return not settings.may_lack_service or is_socket(settings.service)


def _program() -> str:
    """Return the name of this program. That of `python -m package` is the package's."""
    path = sys.argv[0] if sys.argv else ""
    return os.path.basename(os.path.dirname(path) if os.path.basename(path) == "__main__.py" else path)
