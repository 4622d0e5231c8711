"""`Runtime`: owns every task, every driver process and all memory; leaves nothing behind.

A runtime belongs to the event loop it was opened in. Its tasks live in a separate task (`OwnedTasks`), so any task of that loop
may close it. Closing ends calls that still wait with `CallerError`, and every driver process, in bounded time. A loop that ends closes
the runtimes that were left open in it. A child of `os.fork` can close a runtime of its parent, which does nothing.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import anyio

from aionn import trace
from aionn.caching.store import CacheStore
from aionn.errors import CallerError, DeadlineError
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.hal.types import CACHE_TOKEN_BYTES, MAX_INSTANCES, MAX_THREADS, ExecutionPreference, Priority
from aionn.runtime.compilation import Compilation, parts_of
from aionn.runtime.model import Model as AppModel
from aionn.runtime.parts import CompilationParts
from aionn.runtime.preparing.cached import CacheChoice
from aionn.runtime.preparing.plan import prepare_on_best
from aionn.runtime.preparing.reading import digested, read
from aionn.runtime.preparing.renewal import Order
from aionn.runtime.processes.devices import Device, Devices
from aionn.runtime.processes.liveness import DEFAULT_HANG_S
from aionn.runtime.processes.process import GRACE_S, KILL_S
from aionn.runtime.processes.spawning import Settings
from aionn.runtime.session import Session
from aionn.runtime.staging.first import prepare_first
from aionn.runtime.staging.stage import StagePolicy
from aionn.runtime.staging.swapping import swap_model
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

    Raises:
        CallerError: `hang_s` or `threads` is not a positive number.

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
    ) -> None:
        most = 0 if threads is None else checked_count("Runtime: threads", threads, 1, MAX_THREADS)
        self._settings = Settings(_checked_state_dir(state_dir), checked_seconds("hang_s", hang_s), most)
        self._session: Session | None = None
        self._devices: Devices
        self._tasks: OwnedTasks
        self._stores: dict[str, CacheStore] = {}
        self.stage_policy = StagePolicy()
        self._compilations: weakref.WeakSet[CompilationParts] = weakref.WeakSet()

    async def __aenter__(self) -> Runtime:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Open the runtime in this event loop; `aclose` must follow. A runtime is opened once.

        Raises:
            CallerError: it has been opened before, or no asyncio or uvloop loop runs.
        """
        if self._session is not None:
            raise CallerError("this runtime has been opened already; make a new aionn.Runtime() to open another one")
        loop = running_loop()
        is_ours(loop)  # noted, before there can be a fork
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
        timeout_s: float | None = None,
    ) -> Compilation:
        """Prepare a model on a device, in the device's driver process.

        Args:
            model: from `runtime.load`, `Model.load` or `Model.from_onnx`.
            devices: names of the devices that may be used, best first, or None for every installed device. With None, the next device
                is tried if one fails to prepare the model, with a warning in the log. `compilation.device` is the one that it became.
                Explicit devices forbid any fallback. "package.module:Class" names an engine that is not installed as an entry point.
            preference: "sustained_speed" for streams, "low_power" never stays awake waiting.
            priority: "high" goes before the others in the same driver. "low" lives in another driver process, which gets only CPU time
                that no other process wants.
            threads: how many engine threads one run may use. None: the engine chooses, up to `Runtime(threads=)`; with "low_power" it is
                one thread.
            instances: how many runs may go on beside each other, over one copy of the weights. Many callers gain from several
                instances with one thread each; a single caller gains from several threads.
            cache_dir: where compilations are kept, or None for no caching.
            token: 32 bytes, unique to the model within the app, only with `cache_dir`. None: the model's own token, for which a loaded
                model is digested first. With another token, it is digested only before something is stored.
            mode: "eager" compiles now. "jit" compiles at the first execution, once for all callers; `timeout_s` does not count then.
                "staged" serves from the best of `stages` that is stored, else from the first one. It makes the better ones in the
                background, as `stage_policy` says.
            stages: devices from quick to best, only with mode "staged", and in place of `devices`.
            timeout_s: seconds after which the call ends with `DeadlineError` and the compile is cancelled.

        Returns:
            The compilation: `compute`, `burst`, `outcomes`.

        Raises:
            CallerError: an argument is wrong, or `threads` times `instances` is more than `Runtime(threads=)`.
            DeviceUnavailableError: a device asked for by name is not there.
            CompilationError: the model cannot be prepared; `.node` and `.reason` where known.
            DeadlineError: it took longer than `timeout_s`.
            DriverDiedError, DriverHungError: the driver went away meanwhile.
        """
        session = self._opened()
        options = _with_threads(_options(preference, priority, timeout_s), threads, instances, self._settings.threads)
        _check_modes(model, cache_dir, token, mode, stages, devices)
        names = self._named(devices) if mode == "jit" else devices

        async def compiled() -> CompilationParts:
            own = await digested(session.tasks, model) if cache_dir is not None and token is None else token
            order = Order(options, names if stages is None else stages, self._cache(cache_dir, own))
            if stages is not None:
                return await self._compile_staged(session, model, order, stages, self.stage_policy)
            return await self._compile(session, model, order, mode == "jit")

        with trace.span("compile", preference=preference):
            parts = await _within(timeout_s, options.deadline_ns, compiled())
        self._compilations.add(parts)
        return Compilation(parts)

    async def load(self, path: str | os.PathLike[str]) -> AppModel:
        """Open an ONNX model, as `aionn.Model.load` does. The model may outlive the runtime."""
        self._opened()
        return await AppModel.load(path)

    def _cache(self, cache_dir: str | Path | None, token: bytes | None) -> CacheChoice | None:
        if cache_dir is None or token is None:
            return None
        path = os.path.abspath(cache_dir)
        store = self._stores.get(path)
        if store is None:
            store = self._stores[path] = CacheStore(path)
        return CacheChoice(store, token)

    async def _compile(self, session: Session, model: Model, order: Order, later: bool) -> CompilationParts:
        if later:
            await read(session.tasks, model)  # the first execution is laid out before it is compiled
            return CompilationParts(session, model, order)
        first = await prepare_on_best(session.devices, model, order.candidates, order.options, order.cache)
        return CompilationParts(session, model, order, first)

    async def _compile_staged(
        self, session: Session, model: Model, order: Order, names: Sequence[str], policy: StagePolicy
    ) -> CompilationParts:
        await digested(session.tasks, model)  # what the comparisons of stages are kept under
        prepared, outcome, stages = await prepare_first(session.devices, model, names, order.options, order.cache, policy)
        parts = CompilationParts(session, model, order, (prepared, outcome))
        parts.begin_stages(stages, policy)
        return parts

    def _named(self, names: Sequence[str] | None) -> Sequence[str] | None:
        """Return the names after checking that each device is there."""
        if names is None:
            return None
        if isinstance(names, str) or not names:
            raise CallerError(f"devices={names!r}: give a sequence of device names, as in ('onnxruntime',), or None for every device")
        for name in names:
            self._devices.find(name)
        return tuple(names)

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
        session = self._opened()
        if not isinstance(compilation, Compilation) or (parts := parts_of(compilation)).session is not session:
            raise CallerError("swap takes a compilation of this runtime")
        with trace.span("swap"), ending_by(deadline_of(timeout_s), "the new model was not swapped in"):
            await swap_model(parts.new_model(), model, timeout_s)


def run(main: Callable[..., Awaitable[T]], *args: object) -> T:
    """Run an async function to its end on uvloop: `anyio.run(main, *args)` with the fast loop; its result or error is handed on.

    Where stdin, stdout or stderr is closed, as in some daemons, /dev/null takes its place. Otherwise a file of uvloop's may get one of
    those numbers, over which uvloop aborts the process.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    return anyio.run(main, *args, backend="asyncio", backend_options={"use_uvloop": True})


async def _within(timeout_s: float | None, deadline_ns: int | None, work: Awaitable[T]) -> T:
    with anyio.move_on_after(seconds_until(deadline_ns)):
        return await work
    raise DeadlineError(f"the model was not prepared within {timeout_s} s; the compile has been cancelled")


_PREFERENCES = {member.name.lower(): member for member in ExecutionPreference}
_PRIORITIES = {member.name.lower(): member for member in Priority}


def _options(preference: str, priority: str, timeout_s: float | None) -> PrepareOptions:
    if not isinstance(preference, str) or preference not in _PREFERENCES:
        raise CallerError(f"preference {preference!r}: it is one of {sorted(_PREFERENCES)}")
    if not isinstance(priority, str) or priority not in _PRIORITIES:
        raise CallerError(f"priority {priority!r}: it is one of {sorted(_PRIORITIES)}")
    return PrepareOptions(_PREFERENCES[preference], _PRIORITIES[priority], deadline_of(timeout_s))


def _with_threads(options: PrepareOptions, threads: int | None, instances: int, most: int) -> PrepareOptions:
    """Return the options with the threads of a run. `most` is the bound of the runtime, or 0.

    Raises:
        CallerError: a number is wrong, or they ask for more threads than `most`.
    """
    instances = checked_count("compile: instances", instances, 1, MAX_INSTANCES)
    chosen = None if threads is None else checked_count("compile: threads", threads, 1, MAX_THREADS)
    wanted = (chosen or 1) * instances
    if most and wanted > most:
        raise CallerError(
            f"compile: threads={chosen} with instances={instances} needs {wanted} engine threads, but this runtime allows {most}; "
            f"ask for fewer, or allow more with Runtime(threads=)"
        )
    if chosen is not None:
        return dataclasses.replace(options, threads=chosen, instances=instances)
    return dataclasses.replace(options, threads=most // instances, at_most=True, instances=instances)


def _checked_state_dir(state_dir: object) -> str:
    """Return it as an absolute path, or an empty text for None."""
    if state_dir is None:
        return ""
    if not isinstance(state_dir, str | os.PathLike) or not (path := os.fspath(state_dir)) or not isinstance(path, str) or "\0" in path:
        raise CallerError(f"state_dir={state_dir!r}: give the path of a folder, or None for the user's state folder")
    return os.path.abspath(path)


def _check_modes(
    model: Any,
    cache_dir: str | Path | None,
    token: bytes | None,
    mode: str,
    stages: Sequence[str] | None,
    devices: Sequence[str] | None,
) -> None:
    if not isinstance(model, Model):
        raise CallerError(f"compile takes an aionn.Model, not {type(model).__name__}; open one with await aionn.Model.load(path)")
    if mode not in ("eager", "jit", "staged"):
        raise CallerError(f"mode {mode!r}: it is one of 'eager', 'jit', 'staged'")
    if (stages is not None) != (mode == "staged"):
        raise CallerError(f"stages={stages!r} with mode={mode!r}: give stages with mode='staged', and with no other mode")
    if cache_dir is None and token is not None:
        raise CallerError("a token without cache_dir has no use; give both, or neither for no caching")
    if token is not None and not isinstance(token, bytes):
        raise CallerError(f"token of type {type(token).__name__}: a token is {CACHE_TOKEN_BYTES} bytes, as model.token")
    if token is not None and len(token) != CACHE_TOKEN_BYTES:
        raise CallerError(f"token of {len(token)} bytes: a token has {CACHE_TOKEN_BYTES}, as model.token")
    if not isinstance(cache_dir, str | os.PathLike | None):
        raise CallerError(f"cache_dir of type {type(cache_dir).__name__}: give a path, or None for no caching")
    if cache_dir is not None and not os.fspath(cache_dir):
        raise CallerError("cache_dir is an empty path; give a directory, or None for no caching")
    if mode == "staged" and devices is not None:
        raise CallerError(f"devices={devices!r} with mode='staged': the stages name the devices; leave devices out")
