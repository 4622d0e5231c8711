"""`Idling`: gives the driver's memory of a compilation back while the app does not use it (`compile(idle_s=)`).

A task looks at the compilation `LOOKS` times within `idle_s`. It compares counters that exist anyway, so an execution pays nothing.
After `LOOKS` looks in a row without a use, everything that the compilation has in its driver is freed: the links of open bursts, then
the prepared model. The `Serving` is marked `asleep`. From then on it is treated like one whose driver has died: the next use finds it
not alive, prepares the model again (`Renewal.live`), and bursts connect anew. Between the last look and the mark nothing is awaited,
so a use comes before all of it or after all of it.

A driver process in which nothing is left is ended, by the same task. While the compilation sleeps, the task looks for such processes.

What keeps a compilation awake
    Requests: an execution in flight or sent since the look before; calls that wait (`Gate`); a leased frame; a connection that is made.
    Acts: a swap, a stage in the making, a call that waits for a stage (`Use.hold`).
    State: a device memory that the app has not closed, because its contents would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from aionn import trace
from aionn.errors import AionnError
from aionn.hal.types import Priority
from aionn.runtime.serving.compiled_model import CompiledModel, Rest
from aionn.runtime.serving.serving import Serving
from aionn.runtime.session import Session

LOOKS = 4
"""So many looks in a row without a use end the service. The memory is given back after `idle_s` to 1.25 times `idle_s`."""

_LEAST_S = 0.005
"""The least time between two looks, so that a tiny `idle_s` does not keep the loop busy."""


class Idling:
    """Watches the use of one compilation. Between two looks its task holds no part of the compilation but `CompiledModel`."""

    def __init__(self, session: Session, compiled: CompiledModel, names: Sequence[str], priority: Priority) -> None:
        """`names`: of the devices that the app has chosen, if it has. Their drivers are ended when they are not needed."""
        self._session = session
        self._compiled = compiled
        self._names = names
        self._priority = priority
        self._seen: object = None
        self._quiet = 0

    async def watch(self, idle_s: float) -> None:
        """Look again and again, until the compilation is closed or collected."""
        over = self._compiled.use.over
        while True:
            with anyio.move_on_after(max(idle_s / LOOKS, _LEAST_S)):
                await over.wait()
            if over.is_set() or self._session.inherited:
                return
            await self._look()

    async def _look(self) -> None:
        serving = self._compiled.serving
        if serving is None or not (serving.asleep or self._fell_asleep(serving)):
            return
        await self._release(serving)
        from aionn.runtime.preparing.partition import device_names

        for name in {*device_names(serving.prepared), *self._names}:
            self._session.devices.end_unused(name, self._priority)

    def _fell_asleep(self, serving: Serving) -> bool:
        """Give the links of open bursts back if the compilation was not used for `LOOKS` looks. Returns whether it did so."""
        rests = self._rested()
        if rests is None:
            return False
        serving.asleep = True
        for rest in rests:
            rest.give_back()
        trace.count("compilation.idle", device=serving.device)
        return True

    def _rested(self) -> list[Rest] | None:
        """Return what can be given back, if the compilation was not used for `LOOKS` looks."""
        rests, compiled = self._compiled.rests(), self._compiled
        seen = None if rests is None else (compiled.use.touches, compiled.swaps, sum(rest.sent for rest in rests))
        self._quiet = 0 if seen is None or seen != self._seen else self._quiet + 1
        self._seen = seen
        return rests if self._quiet >= LOOKS else None

    async def _release(self, serving: Serving) -> None:
        """Let the driver free the model, if that is not done yet."""
        try:
            await serving.aclose()
        except AionnError as error:
            trace.count("compilation.release_failed", reason=str(error))  # the driver is gone, and the model with it
