"""`Models`: the models of one web app. Each is compiled in a task while the server serves, again after errors that may pass.

An error of a compile ends neither the app nor the other models. It is logged once per attempt, and `Runtime.health` has it as a reason.
So the app is live and not ready.

    it may pass      a driver died or was hung, a deadline, too little memory: tried again after 1 s, later after 2, 4, ... at most 60 s
    it will not      the file or an option is wrong, no device can run the model, a defect: not tried again

Invariants
    The tasks belong to the runtime, and end with it or with `end`.
    `burst` and `compilation` of a model are set together, without an await in between.

`lifespan` opens a runtime for a web app, and has its models compiled while the server serves.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

import aionn
from aionn.errors import AionnError, CallerError, DeadlineError, DriverDiedError, DriverHungError, MemoryAllocationError
from aionn.errors import again as fresh
from aionn.hal.values import outside_frames
from aionn.runtime.record import expecting
from aionn.runtime.runtime import opened_of

logger = logging.getLogger("aionn.asgi")

ModelSpec = str | os.PathLike[str] | aionn.Model | tuple[str | os.PathLike[str] | aionn.Model, Mapping[str, Any]]
"""A model's path, or a loaded model. Options of `Runtime.compile` may follow it."""

_MAY_PASS = (DeadlineError, DriverDiedError, DriverHungError, MemoryAllocationError)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(slots=True)
class WantedModel:
    """A model that an app wants.

    Attributes:
        name: by which the app asks for it. source: its path, or the model. options: of `Runtime.compile`.
        compilation, burst: what serves; None until then. `burst` stays None for a model whose values no burst takes.
        failure: why the last attempt failed. Else empty.
    """

    name: str
    source: str | os.PathLike[str] | aionn.Model
    options: Mapping[str, Any] = field(default_factory=dict)
    compilation: aionn.Compilation | None = None
    burst: aionn.Burst | None = None
    failure: str = ""


def checked_models(models: Mapping[str, ModelSpec]) -> list[WantedModel]:
    """Return what `lifespan(models=)` asks for.

    Raises:
        CallerError: a name is not a text, a value is not a path, a model, or a pair of one and options; or an option does not exist.
    """
    if not isinstance(models, Mapping):
        raise CallerError(f"lifespan: models={models!r}; give paths by name, as in models={{'detector': 'detector.onnx'}}")
    known = {name for name, one in inspect.signature(aionn.Runtime.compile).parameters.items() if one.kind is one.KEYWORD_ONLY} - {"name"}
    found = []
    for name, given in models.items():
        source, options = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
        if not isinstance(name, str) or not isinstance(source, str | os.PathLike | aionn.Model) or not isinstance(options, Mapping):
            raise CallerError(
                f"lifespan: model {name!r} is {given!r}; give a path, or a path and options: ('m.onnx', {{'cache_dir': 'c'}})"
            )
        if unknown := sorted(set(options) - known):
            raise CallerError(f"lifespan: model {name!r} has the option {unknown[0]!r}, which Runtime.compile does not have")
        found.append(WantedModel(name, source, dict(options)))
    return found


class Models:
    """The models of one app, in an open runtime.

    Attributes:
        runtime: the app's. `Runtime.health` says how its models do.
    """

    def __init__(self, runtime: aionn.Runtime, wanted: list[WantedModel]) -> None:
        opened = opened_of(runtime)
        assert opened is not None
        self.runtime = runtime
        self._session = opened.session
        self._wanted = {one.name: one for one in wanted}
        self._decided = {one.name: anyio.Event() for one in wanted}
        self._hopeless: dict[str, Exception] = {}
        self._scope = anyio.CancelScope()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models, also of those that do not serve yet."""
        return tuple(self._wanted)

    def __contains__(self, name: object) -> bool:
        """Return whether the app has a model of that name, which may not serve yet."""
        return name in self._wanted

    def start(self) -> None:
        """Have all models compiled in the background."""
        self._session.tasks.start_soon(self._work, name="models of a web app")

    def end(self) -> None:
        """End what is not compiled yet."""
        self._scope.cancel()

    def wanted(self, name: str) -> WantedModel:
        """Return the model of that name, which may not serve yet.

        Raises:
            CallerError: the app has no such model.
        """
        found = self._wanted.get(name)
        if found is None:
            names = ", ".join(map(repr, self._wanted)) or "none"
            raise CallerError(f"this app has no model {name!r}; the models given to aionn.asgi.lifespan are {names}")
        return found

    async def wait(self) -> None:
        """Return when all models serve that the app requires.

        Raises:
            Exception: what will not pass by itself, of the first required model that has such an error. Usually an `AionnError`.
        """
        for name, wanted in self._wanted.items():
            if wanted.options.get("required", True):
                await self._decided[name].wait()
                if name in self._hopeless:
                    raise self._hopeless[name]

    async def _work(self) -> None:
        with self._scope:
            async with anyio.create_task_group() as tasks:
                for wanted in self._wanted.values():
                    tasks.start_soon(self._prepare, wanted)

    async def _prepare(self, wanted: WantedModel) -> None:
        """Compile a model, and try again after an error that may pass. Stays, so that health shows the failure, after one that will not."""
        pause_s = _FIRST_PAUSE_S
        with expecting(self._session.record, wanted.name, bool(wanted.options.get("required", True))) as shown:
            while (error := await self._attempt(wanted)) is not None:
                if not self._session.is_open:
                    return
                again = isinstance(error, _MAY_PASS)
                what_next = f"tried again in {pause_s:g} s" if again else "not tried again"
                wanted.failure = f"{_described(error)}; {what_next}"
                shown.failed(wanted.failure)
                logger.error("model %r of the web app was not compiled, and is %s: %s", wanted.name, what_next, _described(error))
                if not again:
                    # Without its tracebacks, whose frames hold files and models.
                    self._hopeless[wanted.name] = fresh(error).with_traceback(None)
                    self._decided[wanted.name].set()
                    await anyio.sleep_forever()
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _attempt(self, wanted: WantedModel) -> Exception | None:
        """Compile a model once. Returns the error if that failed."""
        try:
            source = wanted.source
            model = source if isinstance(source, aionn.Model) else await self.runtime.load(source)
            compilation = await self.runtime.compile(model, name=wanted.name, **wanted.options)
            burst: aionn.Burst | None = None
            if not outside_frames(model):  # else only `compute` takes its values
                burst = await compilation.burst(name=wanted.name).__aenter__()
        except Exception as error:
            if not isinstance(error, AionnError):
                logger.exception("compiling model %r of the web app failed by a defect", wanted.name)
            return error
        wanted.compilation, wanted.burst, wanted.failure = compilation, burst, ""
        self._decided[wanted.name].set()
        return None


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, AionnError) else f"{type(error).__name__}: {error}"


Lifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]


def lifespan(models: Mapping[str, ModelSpec], **options: Any) -> Lifespan:
    """Return a lifespan for `FastAPI(lifespan=)` or `Starlette(lifespan=)`.

    At the start it opens a runtime, and begins to compile the models in tasks, without waiting for them. So the server answers at once:
    /livez with 200, and requests for a model with 503 until the model serves. At the end it closes the runtime, also in the midst of a
    compile. Each worker process of the server has a runtime and drivers.

    Args:
        models: by name a path, an `aionn.Model`, or a pair of one of them and options of `Runtime.compile`:
            `{"detector": ("detector.onnx", {"cache_dir": "cache", "required": False})}`.
        options: of `aionn.Runtime`, such as `threads=2`.

    Raises:
        CallerError: an argument is wrong. Errors of a compile are not raised: they are logged, and `Runtime.health` has them.

    The lifespan yields a state with the key "aionn". A lifespan of the app's own may enter it and add to it:

        @asynccontextmanager
        async def own(app):
            async with aionn.asgi.lifespan(models={"detector": "detector.onnx"})(app) as state:
                yield {**state, "database": database}
    """
    checked_models(models)
    aionn.Runtime(**options)  # its errors come here, not when the server starts

    @asynccontextmanager
    async def live(_app: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with aionn.Runtime(**options) as runtime:
            served = Models(runtime, checked_models(models))
            served.start()
            try:
                yield {"aionn": served}
            finally:
                served.end()

    return live
