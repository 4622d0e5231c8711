"""`HeldModel`: one model of a replica, from its specification to what serves.

Invariants
    `compilation`, `digest` and `spec` are set together, without an await in between: the model that serves is that of `spec`.
    While nothing serves, `spec` is what the next attempt compiles.
    At most one attempt runs at a time, in the task `_attempt`. `_compiling` is what it compiles, from the moment when its file is open.
    After an attempt that has failed, none begins until `_again_at`. Calls get that attempt's error meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import aionn
from aionn.errors import CallerError, again
from aionn.hal.model import PooledModel
from aionn.hal.values import outside_frames
from aionn.ray.models import ModelSpec, compile_model, open_model
from aionn.runtime.processes.spawning import checked_start

logger = logging.getLogger("aionn.ray")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""How long the next attempt waits after the first one has failed, and at most. Each failure doubles the pause."""


@dataclass(slots=True)
class _Compiling:
    """What an attempt compiles. `spec` may change to another one of the same contents."""

    spec: ModelSpec
    model: aionn.Model


class HeldModel:
    """A model of a replica, in an open runtime.

    Attributes:
        spec: of the model that serves, or of the one that the next attempt compiles.
        compilation, burst: what serves. `burst` stays None for a model whose values no burst takes, such as texts.
        digest: of the model that serves, as 64 hexadecimal digits. Empty before.
        retried: how many calls were made again, because their driver had died.
    """

    def __init__(self, name: str, spec: ModelSpec, runtime: aionn.Runtime) -> None:
        self.name = name
        self.spec = spec
        self.compilation: aionn.Compilation | None = None
        self.burst: aionn.Burst | None = None
        self.digest = ""
        self.retried = 0
        self._runtime = runtime
        self._attempt: asyncio.Task[None] | None = None
        self._compiling: _Compiling | None = None
        self._failure: Exception | None = None
        self._pause_s = FIRST_PAUSE_S
        self._again_at = 0.0
        self._closed = False

    def count_retry(self) -> None:
        """Count a call that is made again."""
        self.retried += 1

    def close(self) -> None:
        """End an attempt that runs. The runtime closes the rest."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        self.compilation = self.burst = None  # a compilation keeps the model's file open

    # --- compiling ---------------------------------------------------------------------------------------------------------

    async def compile(self) -> None:
        """Compile the model, warm it up and open its burst. The model serves from then on.

        Raises:
            CallerError: the file is missing, is broken, or has another digest than the specification says.
            AionnError: as `aionn.Runtime.compile`.
        """
        spec = self.spec
        compiling = self._compiling = _Compiling(spec, await open_model(self.name, spec))
        try:
            compilation, digest = await compile_model(self._runtime, self.name, spec, model=compiling.model)
            burst: aionn.Burst | None = None
            if not outside_frames(compilation.model):
                try:
                    burst = await compilation.burst(name=self.name).__aenter__()  # the runtime closes it
                except BaseException:
                    await compilation.aclose()  # or each attempt would leave one behind
                    raise
            self.spec, self.digest, self.burst, self.compilation = compiling.spec, digest, burst, compilation
        finally:
            self._compiling = None

    def compile_in_background(self) -> asyncio.Task[None]:
        """Begin an attempt, unless one runs. Calls that need the model wait for it."""
        if self._attempt is None or self._attempt.done():
            self._attempt = asyncio.create_task(self._try(), name=f"compile {self.name}")
        return self._attempt

    async def _try(self) -> None:
        try:
            await self.compile()
        except Exception as error:
            self._failure = error.with_traceback(None)  # its frames hold the model
            self._again_at = time.monotonic() + self._pause_s
            what = f"{type(error).__name__}: {error}"
            logger.error("model %r was not compiled, and is not tried again for %g s: %s", self.name, self._pause_s, what)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def serving(self) -> aionn.Compilation:
        """Return what serves. If nothing does yet, wait for the attempt that runs, or for a new one.

        Raises:
            CallerError: the replica was closed.
            AionnError: the attempt has failed, or the last one has failed a short time ago.
        """
        while self.compilation is None:
            if self._closed:
                raise CallerError("the replica was closed")
            idle = self._attempt is None or self._attempt.done()
            if idle and self._failure is not None and time.monotonic() < self._again_at:
                raise again(self._failure)
            attempt = self.compile_in_background()
            await asyncio.wait([attempt])  # the attempt goes on if this call ends
            # An attempt that was cancelled has made way for another version, so the call waits for that one.
            # One that has succeeded while the replica was closed leaves no failure and no compilation.
            if self.compilation is None and attempt is self._attempt and not attempt.cancelled() and self._failure is not None:
                raise again(self._failure)
        return self.compilation

    # --- upgrades ----------------------------------------------------------------------------------------------------------

    async def change(self, spec: ModelSpec) -> Callable[[], Awaitable[object]] | None:
        """Swap another version in, between two executions. If nothing serves yet, only have the other version compiled in the background.

        An attempt that compiles the same contents goes on.

        Returns:
            A function for the way back. None: there is nothing to go back from, because that version serves already.

        Raises:
            CallerError: the file has another digest than `spec` says, or the model has other inputs or outputs than the one that serves.
            CompilationError, DeadlineError, DriverDiedError, DriverHungError: as `aionn.Runtime.swap`.
        """
        model = await open_model(self.name, spec)
        digest = (await model.digest()).hex()
        before = self.spec
        if self.compilation is None and await self._goes_on(spec, digest):
            return partial(self._rename, before)
        if self.compilation is None and await self._restart(spec):
            return partial(self._take_back, before)
        if digest == self.digest:
            self.spec = spec
            return None
        compilation = await self.serving()
        back = partial(self._swap, self.spec, self.digest, compilation.model)
        await self._swap(spec, digest, model)
        return back

    async def _take_back(self, spec: ModelSpec) -> None:
        """Go back to a version that did not serve, so its file may be missing. If the other version serves by now, swap."""
        if self.compilation is not None or not await self._restart(spec):
            await self.change(spec)

    async def _goes_on(self, spec: ModelSpec, digest: str) -> bool:
        """Return whether the attempt that runs compiles the contents of that digest. It goes on for `spec` then."""
        compiling = self._compiling
        if compiling is None or self._is_ending():
            return False
        try:
            found = (await compiling.model.digest()).hex()
        except CallerError:  # its file was written over, so the attempt is of no use
            return False
        if found != digest or compiling is not self._compiling or self._is_ending():
            return False
        await self._rename(spec)
        return True

    def _is_ending(self) -> bool:
        """Return whether the attempt was cancelled, and its driver may still have to end."""
        return self._attempt is not None and self._attempt.cancelling() > 0

    async def _rename(self, spec: ModelSpec) -> None:
        """Note another specification of the same contents."""
        self.spec = spec
        if self._compiling is not None:
            self._compiling.spec = spec

    async def _restart(self, spec: ModelSpec) -> bool:
        """Compile another version, in place of one that does not serve. Returns False if that one serves after all."""
        before, self.spec = self.spec, spec
        if self._attempt is not None and not self._attempt.done():
            self._attempt.cancel()
            try:
                await asyncio.wait([self._attempt])
            except BaseException:  # the upgrade was cancelled
                self.spec = before
                raise
            if self.compilation is not None:  # it was too late to cancel it
                return False
        self._failure, self._pause_s = None, FIRST_PAUSE_S
        self.compile_in_background()
        return True

    async def _swap(self, spec: ModelSpec, digest: str, model: PooledModel) -> None:
        compilation = await self.serving()
        began = time.monotonic()
        await self._runtime.swap(compilation, model)
        logger.info("model %r: %s serves in place of %s, after %.1f s", self.name, digest, self.digest, time.monotonic() - began)
        self.spec, self.digest = spec, digest


def first_devices(specs: Iterable[ModelSpec]) -> tuple[str, ...] | None:
    """Return the devices that serve required models first, so that their drivers start while the replica imports and reads.

    Returns:
        None if a model leaves its device to the runtime, which starts the driver of the first installed one then. A device that this node
        does not have is left out, because the compile says so. So is one whose models have a driver of low priority.
    """
    found: list[str] = []
    for spec in specs:
        if not spec.required or spec.options.get("priority") == "low":
            continue
        devices = spec.devices if spec.stages is None else spec.stages
        if not devices:
            return None
        with suppress(CallerError):
            found += checked_start(tuple(devices)[:1])
    return tuple(dict.fromkeys(found))
