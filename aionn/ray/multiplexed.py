"""`MultiplexedHolder`: the base of a Ray Serve deployment of many models, of which each replica keeps a few open.

A request names its model by Serve's `multiplexed_model_id`. Two tables know the models of a replica, and they see the same requests.

    Serve's table   (`serve.multiplexed`) says which models the replica has. Serve sends a request to a replica that has its model.
    `ModelLeases`        opens and closes compilations. A request holds a lease on its compilation until it has its outputs.

Serve's table holds the names of models only. Serve drops a model that requests still use, or wait for, and calls its `__del__` then, in a
thread if it is not a coroutine. A name has no `__del__`, so Serve's drop closes nothing. Serve loads one model at a time, under a lock. Its
loader here returns at once, so a request never waits under that lock. A request that did could wait for a place which a request behind
the lock holds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import aionn
from aionn.errors import CallerError, DriverDiedError
from aionn.loopless import checked_seconds, deadline_of, time_left
from aionn.ray.held import HeldModel
from aionn.ray.holder import CLOSE_S, Holder, Inputs, compute_stream
from aionn.ray.leases import ModelLeases
from aionn.ray.models import ModelSpec, checked_specs, compile_model
from aionn.ray.needed import needed_ray
from aionn.runtime.executing.retrying import Retries
from aionn.tasks import bounded_shield, ending_by

ModelsById = Mapping[str, Any] | Callable[[str], ModelSpec]

_LEASES_END_S, _MODELS_END_S = 5.0, 8.0
"""Serve closes a replica after its requests have ended. A request can be left only if Serve has stopped waiting for it."""


@dataclass(slots=True, eq=False)
class _OpenModel:
    """A model that is open. `retried`: how many calls were made again, because their driver had died."""

    compilation: aionn.Compilation
    digest: str
    retried: int = 0

    async def aclose(self) -> None:
        await self.compilation.aclose()

    def count_retry(self) -> None:
        self.retried += 1


class MultiplexedHolder(Holder):
    """The base of a Ray Serve deployment of many models. Each replica keeps at most `max_models` of them compiled.

    A call names its model: `handle.options(multiplexed_model_id="fr").infer.remote({"x": x})`. Serve sends the call to a replica that
    has the model, if one has it. The replica compiles the model if it must. For that it closes the compilation that was used least
    recently, after the calls that use it. If all compilations are in use, the call waits. A compile goes on if the calls that wait for it
    end, and the next call uses it. A compile that fails is the error of the calls that wait for it, and the next call tries again.

    Args:
        multiplexed: the models. A dict by id, of `aionn.ray.ModelSpec` or paths of ONNX files. Or a function that gets an id and returns
            the `ModelSpec`, or raises `aionn.CallerError` for an unknown id. The function must return at once. It is called for each call
            whose model is not open. None: the class attribute `multiplexed`.
        max_models: how many of these models a replica has compiled at once. Those that it is compiling or closing count.
        idle_s: as for `aionn.Runtime.compile`, for each of these models. A model that is not used for so long gives the memory of its
            driver back, and keeps its place. None: as the `ModelSpec` says.
        models: as for `Holder`: models that each replica always serves. They are called by name (`infer(inputs, "vad")`), and do not count.
            None: the class attribute `models`, which may be empty here.
        arguments: further arguments of `Holder`.

    Raises:
        ImportError: Ray is not installed.
        CallerError, AionnError: as `Holder`.

    Examples:
        >>> @serve.deployment(**aionn.ray.serve_options())
        ... class Translator(aionn.ray.MultiplexedHolder):
        ...     multiplexed = {"fr": aionn.ray.ModelSpec("/models/fr.onnx"), "de": aionn.ray.ModelSpec("/models/de.onnx")}
    """

    multiplexed: ClassVar[ModelsById] = {}
    _least_models = 0

    async def __init__(  # type: ignore[misc]  # Serve awaits a constructor
        self,
        multiplexed: ModelsById | None = None,
        *,
        max_models: int = 4,
        idle_s: float | None = None,
        models: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self._ids = checked_ids(type(self).multiplexed if multiplexed is None else multiplexed)
        self._idle_s = checked_seconds("idle_s", idle_s)
        self._leases: ModelLeases[_OpenModel] = ModelLeases(self._open, max_models)
        self._has = _serves_table(max_models)
        await super().__init__(models, **arguments)

    async def aclose(self) -> None:
        """Close the models after the calls that use them, or after 5 s, and then the runtime, as `Holder.aclose` does.

        The runtime is closed also if the caller is cancelled, or if a model is not closed within 8 s.
        """
        leases: ModelLeases[_OpenModel] | None = getattr(self, "_leases", None)  # the constructor may have failed before
        try:
            if leases is not None:
                with bounded_shield(_MODELS_END_S):
                    await leases.aclose(_LEASES_END_S)
        finally:
            await self._close_runtime(CLOSE_S - _MODELS_END_S)

    # --- what serves -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def leased(self, model_id: str | None = None) -> AsyncIterator[aionn.Compilation]:
        """Keep a model compiled for the body, for methods of a subclass: `async with self.leased() as compilation`.

        Use the compilation in the body only. Lease one model at a time: calls that wait for a second one could wait for each other.

        Args:
            model_id: None: the one that the call to the replica names.

        Raises:
            CallerError: the call names no model, or the deployment does not have it, or the replica is being closed.
            AionnError: the model could not be compiled.
        """
        called = self._called_id() if model_id is None else model_id
        if not called:  # the replica always serves a model, too, but none to lease
            raise _not_by_id()
        async with self._leased(called) as opened:
            yield opened.compilation

    async def infer(self, inputs: Inputs, model: str | None = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Run the model that the call names by `multiplexed_model_id`, once. A call is made again after its driver has died.

        Args:
            inputs: as for `aionn.Burst.compute`.
            model: name of a model that each replica serves, as for `Holder.infer`. None: the model that the call names.
            timeout_s: seconds after which the call ends with `DeadlineError`, also while it waits for a model. A compile goes on.

        Returns:
            One array per output, by name.

        Raises:
            AionnError: as `leased` and `Holder.infer`.
        """
        model_id = None if model is not None else self._called_id()
        if not model_id:
            return await super().infer(inputs, model, timeout_s=timeout_s)
        deadline_ns = deadline_of(timeout_s)
        async with AsyncExitStack() as stack:
            with ending_by(deadline_ns, f"model {model_id!r} was not compiled"):
                opened = await stack.enter_async_context(self._leased(model_id))
            retries = Retries(self._retries, opened.count_retry)
            outputs = await opened.compilation.compute(inputs, timeout_s=time_left(deadline_ns), retry=retries)
        return dict(outputs)

    async def stream(
        self,
        frames: Iterable[Inputs] | AsyncIterable[Inputs],
        model: str | None = None,
        *,
        states: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Run the model that the call names by `multiplexed_model_id` on each frame of a stream. The model stays open meanwhile.

        Args:
            frames: as for `Holder.stream`.
            model: as for `infer`.
            states: as for `Holder.stream`.

        Yields:
            One array per output, by name.

        Raises:
            AionnError: as `leased` and `Holder.stream`.
        """
        model_id = None if model is not None else self._called_id()
        async with AsyncExitStack() as stack:
            if model_id:
                opened = await stack.enter_async_context(self._leased(model_id))
                results = compute_stream(opened.compilation, frames, states, retries=Retries(self._retries, opened.count_retry))
            else:
                results = super().stream(frames, model, states=states)
            async for outputs in await stack.enter_async_context(aclosing(results)):
                yield outputs

    async def open_models(self) -> dict[str, dict[str, Any]]:
        """Return the models that are open in this replica, by id, as `describe` does for the others. The least recently used is first."""
        return {
            model_id: {"digest": opened.digest, "device": opened.compilation.device, "retried": opened.retried}
            for model_id, opened in self._leases.open_models.items()
        }

    # --- models ------------------------------------------------------------------------------------------------------------

    def _called_id(self) -> str:
        """Return the id that the call names. It is empty if the call names none, and the replica always serves a model.

        Raises:
            CallerError: the call names none, and there is no such model.
        """
        needed_ray()
        from ray import serve

        model_id: str = serve.get_multiplexed_model_id()
        if not model_id and not self._deployed:
            raise _not_by_id()
        return model_id

    def _named(self, model: str | None) -> HeldModel:
        if not self._held:
            raise _not_by_id() if model is None else _not_by_id(f"this deployment has no model {model!r} that is called by name")
        return super()._named(model)

    @asynccontextmanager
    async def _leased(self, model_id: str) -> AsyncIterator[_OpenModel]:
        if model_id not in self._leases:
            self._spec(model_id)  # an unknown model must not cost another one its place
        if self._has is not None:
            await self._has(model_id)
        async with self._leases.lease(model_id) as opened:
            yield opened

    def _spec(self, model_id: str) -> ModelSpec:
        if callable(self._ids):
            spec = self._ids(model_id)
            if not isinstance(spec, ModelSpec):
                raise CallerError(f"the function for multiplexed models returned {spec!r} for {model_id!r}; return an aionn.ray.ModelSpec")
            return spec
        found: ModelSpec | None = self._ids.get(model_id)
        if found is None:
            raise CallerError(f"this deployment has no model {model_id!r} among its {len(self._ids)} multiplexed models")
        return found

    async def _open(self, model_id: str) -> _OpenModel:
        """Compile a model, and again if a driver dies meanwhile, as `infer` does."""
        options: dict[str, Any] = {"required": False}  # a model that cannot be compiled does not make the replica unready
        if self._idle_s is not None:
            options["idle_s"] = self._idle_s
        left = self._retries
        while True:
            try:
                return _OpenModel(*await compile_model(self.runtime, model_id, self._spec(model_id), **options))
            except DriverDiedError:
                if not left:
                    raise
                left -= 1


def _not_by_id(found: str = "the call names no model") -> CallerError:
    return CallerError(f"{found}; call handle.options(multiplexed_model_id=...)")


def checked_ids(multiplexed: object) -> ModelsById:
    """Return multiplexed models as `MultiplexedHolder` takes them, with a `ModelSpec` for each path.

    Raises:
        CallerError: it is neither a function nor a dict of models by id.
    """
    return multiplexed if callable(multiplexed) else checked_specs(multiplexed)


def _serves_table(max_models: int) -> Callable[[str], Awaitable[object]] | None:
    """Return what notes in Serve's table that the replica has a model. Returns None outside of a replica."""
    needed_ray()
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return None

    async def named(model_id: str) -> str:
        return model_id

    noted: Callable[[str], Awaitable[object]] = serve.multiplexed(max_num_models_per_replica=max_models)(named)
    return noted
