"""`Holder`: the base of a Ray Serve deployment whose replicas hold models in an `aionn.Runtime`.

A replica opens a runtime when Serve constructs it, and closes the runtime when Serve stops it. The runtime's drivers end with the thread
that has started them. Serve constructs a replica and runs its calls in one thread, which lives as long as the replica's process.

Invariants
    `_held` has an item for each model of the deployment, from the constructor on.
    Only one `reconfigure` at a time changes models (`_upgrading`).

Serve awaits the destructor of a holder, and Python calls it when the object is collected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, Literal, Protocol

import anyio

import aionn
from aionn.errors import AionnError, CallerError
from aionn.loopless import checked_count, deadline_of, time_left
from aionn.ray.held import HeldModel, first_devices
from aionn.ray.models import ModelSpec, checked_specs, upgraded_specs
from aionn.ray.needed import assigned_threads
from aionn.runtime.executing.retrying import Retries
from aionn.runtime.streaming.stream import each
from aionn.tasks import bounded_shield, ending_by, ungrouped

logger = logging.getLogger("aionn.ray")

GRACEFUL_SHUTDOWN_S = 20.0
"""Serve kills a replica that has not stopped by then (`graceful_shutdown_timeout_s`)."""

CLOSE_S = GRACEFUL_SHUTDOWN_S - 2.0
_PROGRESS_S = 10.0


class Holder:
    """The base of a Ray Serve deployment whose replicas hold models in an `aionn.Runtime`. Methods of a subclass are the app's.

    Serve awaits the constructor, which returns when all required models serve. A constructor of a subclass is
    `async def __init__`, and begins with `await super().__init__()`.

    Args:
        models: by name, an `aionn.ray.ModelSpec` or the path of an ONNX file. None: the class attribute `models`.
        retry_stateless: how often a call without state is made again after its driver has died.
        runtime: arguments of `aionn.Runtime`, by name. `threads` is the number of CPUs that Ray has assigned to the replica, at least 1,
            unless it is given here. Outside of an actor of Ray, such as in a test, it is None. `start` is the first device of each
            required model, unless it is given here.
        failed_upgrade: what happens when `reconfigure` fails in a replica. The models before go on serving in either case. "raise": the
            error goes to Serve, which shows it in the deployment's status, stops this replica, and ends the update. "keep": the replica
            logs the error and stays, and Serve does not learn of the error. `reconfigure` at the start of a replica always raises.

    Raises:
        ImportError: Ray is not installed.
        CallerError: an argument is wrong, or a model's digest is not that of its specification.
        AionnError: as `aionn.Runtime.compile`, for a required model.

    Examples:
        >>> @serve.deployment(**aionn.ray.serve_options())
        ... class Voice(aionn.ray.Holder):
        ...     models = {"vad": aionn.ray.ModelSpec("/models/vad.onnx")}
    """

    models: ClassVar[Mapping[str, Any]] = {}
    _least_models: ClassVar[int] = 1
    _closed = True  # before there is a runtime, there is nothing to close

    async def __init__(  # type: ignore[misc]  # Serve awaits a constructor
        self,
        models: Mapping[str, Any] | None = None,
        *,
        retry_stateless: int = 1,
        runtime: Mapping[str, Any] | None = None,
        failed_upgrade: Literal["raise", "keep"] = "raise",
    ) -> None:
        self._runtime: aionn.Runtime | None = None
        self._deployed = checked_specs(type(self).models if models is None else models, self._least_models)
        self._retries = checked_count("Holder: retry_stateless", retry_stateless, 0)
        if failed_upgrade not in ("raise", "keep"):
            raise CallerError(f"Holder: failed_upgrade={failed_upgrade!r}; give 'raise' or 'keep'")
        self._keeps = failed_upgrade == "keep"
        self._started = False  # set by the first health check, because Serve makes none before a replica has started
        self._upgrading = asyncio.Lock()
        given = dict(runtime or {})
        if "threads" not in given:
            given["threads"] = assigned_threads()
        if "start" not in given:
            given["start"] = first_devices(self._deployed.values())
        self._runtime = aionn.Runtime(**given)
        self._held = {name: HeldModel(name, spec, self._runtime) for name, spec in self._deployed.items()}
        self._closed = False
        try:
            await self._runtime.open()
            await self._start()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the runtime, within 18 seconds. May be called again. Serve awaits it as `__del__` before it stops the replica's process."""
        await self._close_runtime(CLOSE_S)

    async def _close_runtime(self, most_s: float) -> None:
        runtime = getattr(self, "_runtime", None)  # a subclass may have failed before this constructor
        if runtime is None:
            return
        self._closed = True
        for held in self._held.values():
            held.close()
        with bounded_shield(most_s) as limit:
            await runtime.aclose()
        if limit.cancelled_caught:
            logger.warning("the replica did not close its runtime within %g s; its drivers end with its process", most_s)

    @property
    def closed(self) -> bool:
        """Whether there is nothing to close."""
        return self._closed

    # --- starting ----------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Return when all required models serve. The others are compiled in the background."""
        required = [held for held in self._held.values() if held.spec.required]
        with ungrouped():
            async with anyio.create_task_group() as logging_tasks:
                logging_tasks.start_soon(self._log_progress)
                with ungrouped():
                    async with anyio.create_task_group() as tasks:
                        for held in required:
                            tasks.start_soon(held.compile)
                logging_tasks.cancel_scope.cancel()
        for held in self._held.values():
            if not held.spec.required:
                held.compile_in_background()

    async def _log_progress(self) -> None:
        began = time.monotonic()
        while True:
            await anyio.sleep(_PROGRESS_S)
            logger.info("the replica has been starting for %.0f s: %s", time.monotonic() - began, self.runtime.health())

    # --- what serves -------------------------------------------------------------------------------------------------------

    @property
    def runtime(self) -> aionn.Runtime:
        """The replica's runtime, which is open."""
        assert self._runtime is not None
        return self._runtime

    async def compilation(self, model: str | None = None) -> aionn.Compilation:
        """Return the compilation of a model. Wait for it if it is still being compiled.

        Args:
            model: its name. None: the only model of the deployment.

        Raises:
            CallerError: the deployment has no such model, or has several and none is named.
            AionnError: the model could not be compiled. A later call tries again, 1 s after the first failure, and at most 60 s after
                further ones. Calls in between raise the same error at once.
        """
        return await self._named(model).serving()

    async def infer(self, inputs: Inputs, model: str | None = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Run a model once: `await handle.infer.remote({"x": x})`. A call is made again after its driver has died (`retry_stateless`).

        Args:
            inputs: as for `aionn.Burst.compute`.
            model: as for `compilation`.
            timeout_s: seconds after which the call ends with `DeadlineError`, also while it waits for a model.

        Returns:
            One array per output, by name, as `aionn.Burst.compute` returns them.

        Raises:
            AionnError: as `aionn.Burst.compute`. Serve hands it on to the caller, where `except aionn.CallerError` catches it.
        """
        held = self._named(model)
        deadline_ns = deadline_of(timeout_s)
        if held.compilation is None:
            with ending_by(deadline_ns, f"model {held.name!r} was not compiled"):
                await held.serving()
        assert held.compilation is not None
        call = held.compilation.compute if held.burst is None else held.burst.compute
        return dict(await call(inputs, timeout_s=time_left(deadline_ns), retry=Retries(self._retries, held.count_retry)))

    async def stream(
        self,
        frames: Iterable[Inputs] | AsyncIterable[Inputs],
        model: str | None = None,
        *,
        states: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Run a model on each frame of a stream, in order, over a burst of the stream: `handle.options(stream=True).stream.remote(frames)`.

        Args:
            frames: inputs for `aionn.Burst.compute`, one dict each. A caller in another process gives a list. A method of the replica
                gives what it receives, from a WebSocket for example.
            model: as for `compilation`.
            states: for a model with state, the output that follows each state, as in `{"state": "stateN"}`. The state stays in the driver
                and survives the driver's death (`aionn.Compilation.recurrent`). None: each frame is a call without state, as with `infer`.

        Yields:
            One array per output, by name.

        Raises:
            AionnError: as `aionn.Burst.compute`. The stream is over then.
        """
        held = self._named(model)
        compilation = await held.serving()
        results = compute_stream(compilation, frames, states, retries=Retries(self._retries, held.count_retry))
        async with aclosing(results):
            async for outputs in results:
                yield outputs

    async def describe(self) -> dict[str, dict[str, Any]]:
        """Return what the replica serves, by the name of the model.

        Each model has its `digest`, its `device` and `retried`, the number of calls that were made again after a driver's death. The digest
        is empty until the model serves.
        """
        return {
            held.name: {
                "digest": held.digest,
                "device": "" if held.compilation is None else held.compilation.device,
                "retried": held.retried,
            }
            for held in self._held.values()
        }

    def _named(self, model: str | None) -> HeldModel:
        if model is None and len(self._held) == 1:
            return next(iter(self._held.values()))
        held = None if model is None else self._held.get(model)
        if held is None:
            asked = "name one of its models" if model is None else f"this deployment has no model {model!r}"
            raise CallerError(f"{asked}; they are {', '.join(map(repr, self._held))}")
        return held

    # --- what Serve calls --------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Return if the replica can work, or will be able to without a restart. Serve calls this, and replaces a replica that raises.

        A replica that compiles, or whose driver has died, is healthy. See `aionn.Runtime.health`.

        Raises:
            RuntimeError: a driver is hung, the event loop stands still, or the runtime is closed.
        """
        health = self.runtime.health()
        if not health.live:
            raise RuntimeError(str(health))
        self._started = True

    async def reconfigure(self, user_config: Any) -> None:
        """Swap other models in, in place, between two executions. Serve calls this with the deployment's `user_config`.

        Open streams go on, and no frame is lost. Either all models of the config serve afterwards, or the ones before. A model that is not
        required and does not serve yet is compiled in its new version, in the background, also if the version before cannot be compiled. A
        compile in the background goes on if the config does not change the contents of its model.

        Args:
            user_config: `{"models": {"vad": {"source": "/models/vad-2.onnx", "digest": "3f..."}}}`. A model that is not named
                is the one of the deployment's `ModelSpec`, so what a replica serves does not depend on earlier configs.

        Raises:
            CallerError: the config has another form, a digest is not that of its file, or a model has other inputs or outputs than the one
                before. A model with other inputs or outputs needs a rolling update of Serve.
            CompilationError, DeadlineError, DriverDiedError, DriverHungError: as `aionn.Runtime.swap`.
        """
        try:
            named = upgraded_specs(user_config, self._deployed)
            async with self._upgrading:
                changed = {name: spec for name, spec in self._deployed.items() if self._held[name].spec != spec}
                await self._swap_all(changed | named)
        except Exception as error:
            if not self._keeps or not self._started:
                raise
            logger.error("the replica keeps the models that it had, because an upgrade failed: %s: %s", type(error).__name__, error)

    async def _swap_all(self, specs: Mapping[str, ModelSpec]) -> None:
        """Swap all these models in. If one fails, swap those back that were changed, and raise its error."""
        changed: list[tuple[HeldModel, Callable[[], Awaitable[object]]]] = []
        try:
            for name, spec in specs.items():
                held = self._held[name]
                if (back := await held.change(spec)) is not None:
                    changed.append((held, back))
        except BaseException:
            for held, back in reversed(changed):
                try:
                    await back()
                except AionnError as error:
                    logger.error("model %r: %s goes on, because the way back failed: %s", held.name, held.digest, error)
            raise


class _ClosedOnce(Protocol):
    @property
    def closed(self) -> bool: ...

    async def aclose(self) -> None: ...


class Destructor:
    """`Holder.__del__`, which is `aclose` while the holder is open.

    Python calls `__del__` without awaiting it, and would warn of a coroutine. So the destructor of a closed holder makes no coroutine.
    """

    def __get__(self, holder: _ClosedOnce | None, owner: type[_ClosedOnce]) -> Callable[..., Awaitable[None]]:
        if holder is None:
            return owner.aclose
        return _nothing if holder.closed else holder.aclose


class _EndedAtOnce:
    def __await__(self) -> Generator[None, None, None]:
        yield from ()


def _nothing() -> _EndedAtOnce:
    return _EndedAtOnce()


Inputs = Mapping[str, Any]


async def compute_stream(
    compilation: aionn.Compilation,
    frames: Iterable[Inputs] | AsyncIterable[Inputs],
    states: Mapping[str, str] | None,
    *,
    retries: Retries,
) -> AsyncGenerator[dict[str, Any], None]:
    """Run a model on each frame, in order.

    Args:
        states: as for `aionn.Compilation.recurrent`. None: each frame is a call without state.
        retries: for calls without state.

    Yields:
        One array per output, by name.

    Raises:
        AionnError: as `aionn.Burst.compute`. The stream is over then.
    """
    if states is not None:
        async with compilation.recurrent(states, name=compilation.name) as kept:
            async for frame in each(frames):
                yield dict(await kept.compute(frame))
        return
    async with compilation.burst(name=compilation.name) as burst:
        async for frame in each(frames):
            yield dict(await burst.compute(frame, retry=retries))


Holder.__del__ = Destructor()  # type: ignore[attr-defined]
