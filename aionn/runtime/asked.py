"""One call of `Runtime.compile`: its arguments, and the model that is prepared as they say.

A service prepares models and computes nothing, so this imports nothing that computes, and no NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from msgspec.structs import replace

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
from aionn.runtime.open_runtime import OpenRuntime
from aionn.runtime.preparing.compile_acts import CacheChoice, CompileRequest, digested, read
from aionn.runtime.preparing.options import with_options
from aionn.runtime.preparing.plan import checked_names, checked_stages, prepare_on_best
from aionn.runtime.preparing.preparation import Found, check_kept
from aionn.runtime.record import READING, CompilationRecord, Progress, Unwatched, checked_on_event, current
from aionn.runtime.session import Session

if TYPE_CHECKING:  # most apps make no stages, and a service computes nothing
    from aionn.runtime.compilation import Compilation
    from aionn.runtime.staging.stage import Stage, StagePolicy

_PATH_MAX = 4096
"""The kernel takes no path of as many bytes."""

_PREFERENCES = {member.name.lower(): member for member in ExecutionPreference}
_PRIORITIES = {member.name.lower(): member for member in Priority}


AsPrepared = tuple[CompileRequest, Found | None, Sequence["Stage"], "StagePolicy | None"]
"""What was asked for; what serves, or None where the first use prepares it; and in mode "staged" the stages, and how they are made."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `Runtime.compile`, as the app gave them, with the same defaults."""

    model: PooledModel
    devices: Sequence[str] | None = None
    preference: str = "fast_single_answer"
    priority: str = "medium"
    threads: int | None = None
    instances: int | None = None
    cache_dir: str | Path | None = None
    cache_required: bool = False
    token: bytes | None = None
    mode: str = "eager"
    stages: Sequence[str] | None = None
    stage_policy: StagePolicy | None = None
    options: Mapping[str, Mapping[str, object]] | None = None
    batch: Batching | None = None
    idle_s: float | None = None
    timeout_s: float | None = None
    name: str | None = None
    required: bool = True
    on_event: Callable[[Event], object] | None = None

    async def compile(self, opened: OpenRuntime) -> Compilation:
        """Prepare the model now, or at its first use with mode "jit". Return its compilation.

        Raises: as `Runtime.compile`.
        """
        from aionn.runtime.compilation import Compilation, CompilationParts

        request, found, stages, policy = await self.prepare(opened)
        parts = CompilationParts(opened.session, request, found)
        if policy is not None:
            parts.begin_stages(stages, policy)
        opened.compilations.add(parts)
        opened.health.watch(parts.kept_model, parts if stages else None)
        return Compilation(parts)

    async def prepare(self, opened: OpenRuntime) -> AsPrepared:
        """Prepare the model, unless its first use does that (mode "jit"). The caller owns it.

        Raises: as `Runtime.compile`.
        """
        request = self._request(opened)
        first = next(iter(opened.devices.installed if request.candidates is None else request.candidates), "")
        progress = None if self.mode == "jit" else Progress(request.record, first, cause="first")
        about = trace.about(model=request.record.name)
        deadline_ns = request.options.deadline_ns
        prepared: AsPrepared | None = None
        with progress or Unwatched(request.record.name), about, trace.span("compile", preference=request.options.preference.name.lower()):
            # Inside, so that listeners get the deadline as the reason.
            with nullcontext() if deadline_ns is None else anyio.move_on_after(seconds_until(deadline_ns)):
                request = await self._completed(request, opened)
                if progress is None:
                    await read(opened.devices, request.model)  # the first execution is laid out before it is compiled
                    prepared = request, None, (), None
                elif self.mode == "staged":
                    prepared = await _staged(opened.session, request, self.stage_policy, progress)
                else:
                    found = check_kept(request, await prepare_on_best(opened.devices, request))
                    progress.outcomes = found[1]
                    prepared = request, found, (), None
            if prepared is None:
                raise DeadlineError(f"the model was not prepared within {self.timeout_s} s; the compile has been cancelled")
        return prepared

    async def _completed(self, request: CompileRequest, opened: OpenRuntime) -> CompileRequest:
        """Return what is asked for with engine options and cache, for which files are read."""
        if self.options is not None:
            request = replace(request, options=await with_options(opened.devices, request.options, self.options, request.candidates))
        if self.cache_dir is None:
            return request
        token = self.token
        cache = CacheChoice(store_at(opened, self.cache_dir), token or b"", required=bool(self.cache_required))
        request = replace(request, cache=cache)
        if cache.required and (fault := await cache.store.fault()) is not None:
            raise CallerError(request.unkept(fault))
        if token is None:
            if not known_token(request.model):
                current.get().enter(next(iter(request.candidates or opened.devices.installed), ""), READING)
            token = await digested(opened.devices, request.model)
        return replace(request, cache=replace(cache, token=token))

    def _request(self, opened: OpenRuntime) -> CompileRequest:
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


def store_at(opened: OpenRuntime, cache_dir: str | os.PathLike[str]) -> CacheStore:
    """Return where compilations are kept."""
    path = os.path.abspath(cache_dir)
    if path not in opened.stores:
        opened.stores[path] = CacheStore(path)
    return opened.stores[path]


async def _staged(session: Session, request: CompileRequest, policy: StagePolicy | None, progress: Progress) -> AsPrepared:
    """Prepare the stage that serves from the start."""
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
    return replace(request, stage=serving), found, stages, policy
