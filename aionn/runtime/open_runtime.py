"""`OpenRuntime`: what an open runtime owns. It compiles models, and closes everything.

It owns the tasks, the devices, the cache stores and the compilations. A compilation that the app drops is collected. What the app keeps of
it, such as a burst, is closed through its compiled model. `Asked` is one call of `Runtime.compile`.

`Runtime` makes it once everything that it needs is imported.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from aionn import trace
from aionn.caching.store import CacheStore
from aionn.errors import CallerError, DeadlineError, refuse_coroutine
from aionn.events import Event
from aionn.hal.batching import Batching
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import PooledModel, known_token
from aionn.hal.types import CACHE_TOKEN_BYTES, MAX_INSTANCES, MAX_THREADS, ExecutionPreference, Priority
from aionn.hal.values import outside_frames
from aionn.loopless import checked_count, checked_name, checked_seconds, deadline_of, seconds_until
from aionn.runtime.compilation import Compilation, CompilationParts
from aionn.runtime.health import HealthPolicy
from aionn.runtime.health_watch import HealthWatch
from aionn.runtime.preparing.compile_acts import CacheChoice, CompileRequest, digested, read
from aionn.runtime.preparing.options import with_options
from aionn.runtime.preparing.plan import checked_names, checked_stages, prepare_on_best
from aionn.runtime.preparing.preparation import check_kept
from aionn.runtime.processes.devices import Devices, attach, end_retired
from aionn.runtime.processes.spawning import GRACE_S, KILL_S, Settings
from aionn.runtime.processes.template import end_idle, leave_template
from aionn.runtime.record import READING, CompilationRecord, Progress, Record, Unwatched, checked_on_event, current
from aionn.runtime.session import Session
from aionn.runtime.tracing import begin_environment, end_environment, write_environment
from aionn.tasks import OwnedTasks, bounded_shield, end_threads

if TYPE_CHECKING:  # most apps make no stages
    from aionn.runtime.staging.stage import StagePolicy

CLOSE_STORES_S = 5.0
"""A cache directory on a disk that hangs must not hold up the app's end."""

CLOSE_S = GRACE_S + KILL_S + CLOSE_STORES_S
"""What closing a runtime may take."""

_PATH_MAX = 4096
"""The kernel takes no path of as many bytes."""

_PREFERENCES = {member.name.lower(): member for member in ExecutionPreference}
_PRIORITIES = {member.name.lower(): member for member in Priority}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `Runtime.compile`, as the app gave them."""

    model: PooledModel
    devices: Sequence[str] | None
    preference: str
    priority: str
    threads: int | None
    instances: int | None
    cache_dir: str | Path | None
    cache_required: bool
    token: bytes | None
    mode: str
    stages: Sequence[str] | None
    stage_policy: StagePolicy | None
    options: Mapping[str, Mapping[str, object]] | None
    batch: Batching | None
    idle_s: float | None
    timeout_s: float | None
    name: str | None
    required: bool
    on_event: Callable[[Event], object] | None

    def request(self, opened: OpenRuntime) -> CompileRequest:
        """Check the arguments, and return what is asked for without engine options and cache.

        Raises:
            CallerError, DeviceUnavailableError: as `Runtime.compile`.
        """
        self._check_modes()
        options = self._prepare_options(opened.devices.settings.threads)
        name, on_event = self._shown_name(), checked_on_event(self.on_event)
        names = checked_names(opened.devices, self.devices)
        if self.stages is not None:
            names = checked_stages(opened.devices, self.stages)
        record = CompilationRecord(opened.session.record, name, bool(self.required), on_event, options.priority)
        return CompileRequest(self.model, options, record, names, None, checked_seconds("idle_s", self.idle_s))

    def _prepare_options(self, most: int) -> PrepareOptions:
        if not isinstance(self.preference, str) or self.preference not in _PREFERENCES:
            raise CallerError(f"preference {self.preference!r}: it is one of {sorted(_PREFERENCES)}")
        if not isinstance(self.priority, str) or self.priority not in _PRIORITIES:
            raise CallerError(f"priority {self.priority!r}: it is one of {sorted(_PRIORITIES)}")
        asked = 0 if self.instances is None else checked_count("compile: instances", self.instances, 1, MAX_INSTANCES)
        instances = asked or 1
        chosen = None if self.threads is None else checked_count("compile: threads", self.threads, 1, MAX_THREADS)
        wanted = (chosen or 1) * instances
        if most and wanted > most:
            raise CallerError(
                f"compile: threads={chosen} with instances={instances} needs {wanted} engine threads, but this runtime allows {most}; "
                f"ask for fewer, or allow more with Runtime(threads=)"
            )
        return PrepareOptions(
            _PREFERENCES[self.preference],
            _PRIORITIES[self.priority],
            deadline_of(self.timeout_s),
            threads=most // instances if chosen is None else chosen,
            at_most=chosen is None,
            instances=asked,
            batching=self._checked_batch(),
        )

    def _checked_batch(self) -> Batching | None:
        batch: Any = self.batch
        if batch is not None and not isinstance(batch, Batching):
            raise CallerError(f"compile: batch of type {type(batch).__name__}; give an aionn.Batching, or None to run each request alone")
        return batch

    def _shown_name(self) -> str:
        """Return how it is shown: by the name that the app gave, the model's file without its suffix, or the model's token."""
        name, model = checked_name("compile", self.name), self.model
        return name or Path(getattr(model, "name", "")).stem or known_token(model).hex()[:16] or "model"

    def _check_modes(self) -> None:
        model: Any = self.model
        token: Any = self.token
        policy: Any = self.stage_policy
        mode, stages, cache_dir = self.mode, self.stages, self.cache_dir
        if not isinstance(model, PooledModel):
            refuse_coroutine(model, "the model to compile")
            raise CallerError(f"compile takes an aionn.Model, not {type(model).__name__}; open one with await aionn.Model.load(path)")
        if mode not in ("eager", "jit", "staged"):
            raise CallerError(f"mode {mode!r}: it is one of 'eager', 'jit', 'staged'")
        if (stages is not None) != (mode == "staged"):
            raise CallerError(f"stages={stages!r} with mode={mode!r}: give stages with mode='staged', and with no other mode")
        if policy is not None:
            from aionn.runtime.staging.stage import StagePolicy

            if mode != "staged":
                raise CallerError(f"stage_policy with mode={mode!r}: only mode='staged' makes stages; leave stage_policy out")
            if not isinstance(policy, StagePolicy):
                raise CallerError(f"stage_policy of type {type(policy).__name__}: give an aionn.StagePolicy, or None for its defaults")
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
        path = b"" if cache_dir is None else os.fsencode(cache_dir)
        if b"\0" in path or len(path) >= _PATH_MAX:
            why = "holds a NUL byte" if b"\0" in path else f"has {len(path)} bytes, and a path has at most {_PATH_MAX - 1}"
            raise CallerError(f"cache_dir {why}; give a directory, or None for no caching")
        if cache_dir is None and self.cache_required:
            raise CallerError("cache_required=True without cache_dir; give the folder where the compilation is kept")
        if mode == "staged" and self.devices is not None:
            raise CallerError(f"devices={self.devices!r} with mode='staged': the stages name the devices; leave devices out")


class OpenRuntime:
    """What an open runtime owns. `open` must follow, and `aclose` or the end of the loop after it.

    Attributes:
        devices: every device that the runtime knows.
        session: what the parts of the runtime need from it.
        compilations: those that live.
        health: judges whether the runtime can do the app's work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: Settings, name: str, policy: HealthPolicy) -> None:
        self._tasks = OwnedTasks(self._close, "runtime")
        self._traced = begin_environment()
        self._record = Record(loop, name)
        self.devices = Devices(self._tasks, settings, self._record)
        self.session = Session(loop, self._tasks, self.devices, self._record)
        self.devices.check_use = self.session.check_open
        self.health = HealthWatch(self.session, policy)
        self.compilations: weakref.WeakSet[CompilationParts] = weakref.WeakSet()
        self._stores: dict[str, CacheStore] = {}
        self._record.each_beat.append(weakref.WeakMethod(self._beat))

    async def open(self) -> None:
        """Attach to the service if one is asked for, and start the runtime's own task.

        Raises:
            DeviceUnavailableError: as `Runtime.open`.
        """
        try:
            await attach(self.devices)
            await self._tasks.open()
        except BaseException:
            if self.devices.service is not None:
                self.devices.service.end()
            self._record.end()
            leave_template(self.devices)
            if self._traced is not None:
                end_environment(self._traced)
            raise

    async def compile(self, asked: Asked) -> Compilation:
        """Prepare the model now, or at its first use with mode "jit". Return its compilation.

        Raises: as `Runtime.compile`.
        """
        request = asked.request(self)
        first = next(iter(self.devices.installed if request.candidates is None else request.candidates), "")
        progress = None if asked.mode == "jit" else Progress(request.record, first, cause="first")
        about = trace.about(model=request.record.name)
        deadline_ns = request.options.deadline_ns
        parts: CompilationParts | None = None
        with progress or Unwatched(request.record.name), about, trace.span("compile", preference=request.options.preference.name.lower()):
            # Inside, so that listeners get the deadline as the reason.
            with nullcontext() if deadline_ns is None else anyio.move_on_after(seconds_until(deadline_ns)):
                request = await self._completed(asked, request)
                if progress is None:
                    await read(self.devices, request.model)  # the first execution is laid out before it is compiled
                    parts = CompilationParts(self.session, request)
                elif asked.mode == "staged":
                    parts = await _staged(self.session, request, asked.stage_policy, progress)
                else:
                    found = check_kept(request, await prepare_on_best(self.devices, request))
                    progress.outcomes = found[1]
                    parts = CompilationParts(self.session, request, found)
            if parts is None:
                raise DeadlineError(f"the model was not prepared within {asked.timeout_s} s; the compile has been cancelled")
            self.compilations.add(parts)
            self.health.watch(parts)
        return Compilation(parts)

    async def _completed(self, asked: Asked, request: CompileRequest) -> CompileRequest:
        """Return what is asked for with engine options and cache, for which files are read."""
        if asked.options is not None:
            options = await with_options(self.devices, request.options, asked.options, request.candidates)
            request = msgspec.structs.replace(request, options=options)
        if asked.cache_dir is None:
            return request
        token = asked.token
        cache = self.cache(asked.cache_dir, token or b"", bool(asked.cache_required))
        request = msgspec.structs.replace(request, cache=cache)
        if cache.required and (fault := await cache.store.fault()) is not None:
            raise CallerError(request.unkept(fault))
        if token is None:
            if not known_token(request.model):
                current.get().enter(next(iter(request.candidates or self.devices.installed), ""), READING)
            token = await digested(self.devices, request.model)
        return msgspec.structs.replace(request, cache=msgspec.structs.replace(cache, token=token))

    def cache(self, cache_dir: str | Path, token: bytes, required: bool = False) -> CacheChoice:
        """Return where a compilation is kept."""
        path = os.path.abspath(cache_dir)
        store = self._stores.get(path)
        if store is None:
            store = self._stores[path] = CacheStore(path)
        return CacheChoice(store, token, required=required)

    def _beat(self) -> None:
        self._show_caches()
        end_retired(self.devices)
        end_idle()

    def _show_caches(self) -> None:
        for path, store in self._stores.items():
            usage = store.usage
            self._record.cache_holds(path, usage.held_bytes, usage.entries, usage.evicted)

    async def aclose(self) -> None:
        """Close everything; see `Runtime.aclose`."""
        self.session.close()
        if not self._record.ended:
            self.health.beat()
        await self._tasks.aclose(CLOSE_S)

    async def _close(self) -> None:
        """Close everything, as the last act of the runtime's own task. It ends in bounded time, also when that task is cancelled."""
        self.session.close()
        # First, or a stage would try to go on with devices that end.
        for compiled in list(self.session.models):
            compiled.cancel()
        self._record.drivers_end()
        try:
            await self.devices.aclose()
        finally:
            for parts in list(self.compilations):
                parts.end()
            for compiled in list(self.session.models):
                compiled.end()
            self._show_caches()
            self._record.end()
            if self._traced is not None:
                await write_environment(self._traced)
            # Side by side: no store waits for another one's disk before it ends the calls that wait in it.
            try:
                with bounded_shield(CLOSE_STORES_S):
                    async with anyio.create_task_group() as closing:
                        for store in self._stores.values():
                            closing.start_soon(store.aclose)
            finally:
                end_threads()


async def _staged(session: Session, request: CompileRequest, policy: StagePolicy | None, progress: Progress) -> CompilationParts:
    """Prepare the stage that serves from the start, and make better ones. Return the parts of its compilation."""
    from aionn.runtime.staging.stage import StagePolicy
    from aionn.runtime.staging.stages import prepare_first, stages_of

    await digested(session.devices, request.model)  # what the comparisons of stages are kept under
    policy, stages = policy or StagePolicy(), stages_of(request.candidates or (), request.record)
    found = check_kept(request, await prepare_first(session.devices, stages, request, policy))
    progress.outcomes = found[1]
    if outside_frames(request.model):
        from aionn.runtime.executing.control import staged_refusal

        found[0].release()
        raise staged_refusal(request.model)
    serving = next(stage.name for stage in stages if stage.state == "serving")
    parts = CompilationParts(session, msgspec.structs.replace(request, stage=serving), found)
    parts.begin_stages(stages, policy)
    return parts
