"""`Targets`: the models behind the names of the protocol, each with a burst that all its requests share.

A call without state is made again in the next driver after its driver has died, so a client meets latency and not an error. A request that
kills every driver must end, so a call is made again `retry_stateless` times at most.

Invariant
    The burst of a name belongs to the name's present compilation (`_Kept.of`), and is opened anew when the app gives the name another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.requests import HTTPConnection

import aionn
from aionn.asgi.open_inference.incoming import AwaitedBodies
from aionn.asgi.open_inference.refusals import RequestRefusal
from aionn.asgi.open_inference.tensors import ModelRequest
from aionn.asgi.requests import RETRY_AFTER_S
from aionn.asgi.requests import models as models_of
from aionn.asgi.served import Models
from aionn.errors import CallerError
from aionn.hal.model import PooledModel
from aionn.hal.values import outside_frames
from aionn.loopless import time_left
from aionn.memo import Memo
from aionn.runtime.executing.retrying import Retries

VERSION = "1"
"""The only version of each model. `Runtime.swap` replaces a model without giving it another one."""

Given = Models | Mapping[str, aionn.Compilation] | None


@dataclass(slots=True)
class Counts:
    """What the server has counted of one model's requests. Times are in nanoseconds.

    Attributes:
        read_ns, call_ns, write_ns: parts of `success_ns`: until all inputs were there, until the model had answered, and the rest.
        last_ms: when the last request came, in milliseconds since 1970; 0 before the first.
    """

    succeeded: int = 0
    failed: int = 0
    success_ns: int = 0
    fail_ns: int = 0
    read_ns: int = 0
    call_ns: int = 0
    write_ns: int = 0
    retried: int = 0
    last_ms: int = 0


@dataclass(slots=True)
class ServedModel:
    """A model that serves.

    Attributes:
        burst: for its requests; None if no burst takes its values.
        asked: what earlier requests asked for, by the bytes of their JSON.
        streaming: bounds how many requests write into a frame while their body arrives.
        arrivals: the bodies that are waited for.
        retries: how often a call is made again after its driver has died.
    """

    name: str
    compilation: aionn.Compilation
    burst: aionn.Burst | None
    counts: Counts
    asked: Memo[bytes, ModelRequest]
    streaming: anyio.CapacityLimiter
    retries: int
    arrivals: AwaitedBodies = field(default_factory=AwaitedBodies)

    def compute(self, inputs: Mapping[str, Any] | aionn.Frame, timing: bool, deadline_ns: int | None) -> Coroutine[Any, Any, aionn.Outputs]:
        """Run the model once. Errors are those of `Burst.compute`.

        Args:
            timing: whether to measure how long the model takes.
            deadline_ns: when the client does not want the answer any more, in nanoseconds of CLOCK_MONOTONIC.
        """
        call = self.compilation.compute if self.burst is None else self.burst.compute
        retries = Retries(self.retries, self._count_retry)
        return call(inputs, measure_timing=timing, timeout_s=time_left(deadline_ns), retry=retries)

    def _count_retry(self) -> None:
        self.counts.retried += 1

    def statistics(self) -> dict[str, Any]:
        """Return what has been counted, in the form of Triton's statistics extension.

        A burst's executions and the driver's time come from the app's statistics page, and include those of other users of the burst.
        """
        counts = self.counts
        computed, busy_ns = counts.succeeded, counts.call_ns
        if self.burst is not None:
            page = self.burst.statistics()
            computed, busy_ns = page["computed"], page["driver_busy_ns"]
        done = counts.succeeded

        def spent(count: int, ns: int) -> dict[str, int]:
            return {"count": count, "ns": ns}

        return {
            "name": self.name,
            "version": VERSION,
            "last_inference": counts.last_ms,
            "inference_count": computed,
            "execution_count": computed,
            "inference_stats": {
                "success": spent(done, counts.success_ns),
                "fail": spent(counts.failed, counts.fail_ns),
                "queue": spent(done, max(0, counts.call_ns - busy_ns)),
                "compute_input": spent(done, counts.read_ns),
                "compute_infer": spent(computed, busy_ns),
                "compute_output": spent(done, counts.write_ns),
                "cache_hit": spent(0, 0),
                "cache_miss": spent(0, 0),
            },
            "batch_stats": [],
        }


@dataclass(slots=True)
class _Kept:
    """What is kept for one name.

    Attributes:
        target, model: the last target, and the model for which it was made. A swap gives a compilation another model.
        burst, of: the burst of an app's compilation, and that compilation. Bursts of `Models` are not kept here.
    """

    counts: Counts = field(default_factory=Counts)
    target: ServedModel | None = None
    model: PooledModel | None = None
    streaming: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(STREAMED))
    opening: anyio.Lock = field(default_factory=anyio.Lock)
    burst: aionn.Burst | None = None
    of: weakref.ref[aionn.Compilation] | None = None


_REMEMBERED = 64
"""Clients send the same JSON with each request, unless it has data or an identifier. So many are remembered per model."""

STREAMED = 4
"""So many requests for one model have a frame from the arrival of their body to their answer. Other bodies are put together first."""


class Targets:
    """The models that the routes serve.

    Args:
        given: the argument `models` of `oip`. None: the models of the app's lifespan.
        retries: as for `ServedModel`.
    """

    def __init__(self, runtime: aionn.Runtime | None, given: Given, retries: int) -> None:
        self._runtime = runtime
        self._given = given
        self._retries = retries
        self._kept: dict[str, _Kept] = {}

    def runtime(self, connection: HTTPConnection) -> aionn.Runtime:
        """Return the runtime of the models."""
        if self._runtime is not None:
            return self._runtime
        given = self._models(connection)
        assert isinstance(given, Models)
        return given.runtime

    def names(self, connection: HTTPConnection) -> list[str]:
        """Return the names of all models, also of those that do not serve yet."""
        given = self._models(connection)
        return list(given.names if isinstance(given, Models) else given)

    async def find(self, connection: HTTPConnection, name: str, version: str = VERSION) -> ServedModel:
        """Return the model of that name.

        Raises:
            Refusal: the server has no such model, or the model does not serve yet.
        """
        given = self._models(connection)
        if version != VERSION:
            raise RequestRefusal(404, f"this server has no model {name!r} in version {version!r}; its version is {VERSION!r}")
        if name not in given:
            raise RequestRefusal(404, f"this server has no model {name!r}")
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = _Kept()
        if isinstance(given, Models):
            wanted = given.wanted(name)
            if wanted.compilation is None:
                why = f" ({wanted.failure})" if wanted.failure else ""
                raise RequestRefusal(503, f"model {name!r} does not serve yet{why}; try again later", {"Retry-After": str(RETRY_AFTER_S)})
            compilation, burst = wanted.compilation, wanted.burst
        else:
            compilation = given[name]
            burst = await _burst_of(compilation, name, kept)
        target, model = kept.target, compilation.model
        if target is None or target.compilation is not compilation or target.burst is not burst or kept.model is not model:
            # The first request, a swapped model or another compilation. What was remembered of earlier requests may not fit this model.
            kept.model = model
            target = kept.target = ServedModel(name, compilation, burst, kept.counts, Memo(_REMEMBERED), kept.streaming, self._retries)
        return target

    async def serving(self, connection: HTTPConnection) -> list[ServedModel]:
        """Return the models that serve."""
        found: list[ServedModel] = []
        for name in self.names(connection):
            try:
                found.append(await self.find(connection, name))
            except RequestRefusal:
                continue
        return found

    def _models(self, connection: HTTPConnection) -> Models | Mapping[str, aionn.Compilation]:
        return models_of(connection) if self._given is None else self._given


async def _burst_of(compilation: aionn.Compilation, name: str, kept: _Kept) -> aionn.Burst | None:
    """Return the burst of a compilation, opened at its first request. Returns None if no burst takes the model's values."""
    if kept.of is None or kept.of() is not compilation:
        if outside_frames(compilation.model):
            return None
        async with kept.opening:
            if kept.of is None or kept.of() is not compilation:
                kept.burst = await compilation.burst(name=name).__aenter__()
                kept.of = weakref.ref(compilation)
    return kept.burst


def checked_targets(runtime: aionn.Runtime | None, models: Given, retries: int) -> Targets:
    """Return the models that `oip` was given.

    Raises:
        CallerError: they are not models, or the runtime is missing or not theirs.
    """
    if isinstance(models, Models):
        if runtime not in (None, models.runtime):
            raise CallerError("oip: the models belong to another runtime; leave out runtime")
        return Targets(models.runtime, models, retries)
    if models is None:
        if runtime is not None:
            raise CallerError("oip: a runtime without models; give models={'detector': compilation}, or neither of them")
        return Targets(None, None, retries)
    if not isinstance(models, Mapping):
        raise CallerError(f"oip: models={models!r}; give compilations by name, as in models={{'detector': compilation}}")
    if not isinstance(runtime, aionn.Runtime):
        raise CallerError("oip: models by name need their runtime; write oip(runtime, models)")
    for name, one in models.items():
        if not isinstance(name, str) or not isinstance(one, aionn.Compilation):
            raise CallerError(f"oip: model {name!r} is {one!r}; give a compilation, which runtime.compile returns")
        if not name or "/" in name:
            raise CallerError(f"oip: model {name!r} cannot be named in a path; give a name without '/'")
    return Targets(runtime, models, retries)
