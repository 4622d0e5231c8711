"""`Remembered`: what a cache directory keeps beside its entries, in the file of its index (`History`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from aionn.caching.measurements import StageMeasurement
from aionn.caching.outcomes import Refusal
from aionn.caching.store.background import BackgroundWork
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.index import Index
from aionn.tasks import run_in_thread

__all__ = ["Remembered"]

T = TypeVar("T")


class Remembered:
    """What one store remembers: how models were cut over several devices, what stages measured, and how often models are used."""

    def __init__(self, house: Housekeeping, background: BackgroundWork) -> None:
        self._house = house
        self._background = background

    def _with_index(self, act: Callable[[Index], T]) -> T | None:
        """Ask the index of the directory as it is now. Return None if either cannot be used. Blocking."""
        return None if isinstance(self._house.current(), Refusal) else self._house.with_index(act)

    async def plan(self, scope: bytes) -> bytes | None:
        """Return the plan that is kept under that scope, or None."""
        return await self._background.ask(self._with_index, lambda index: index.history.plan(scope))

    async def keep_plan(self, scope: bytes, body: bytes) -> None:
        """Keep a plan, if the directory can be written to."""
        await run_in_thread(self._with_index, lambda index: index.history.keep_plan(scope, body))

    async def measurements(self, scope: bytes | None = None) -> list[StageMeasurement]:
        """Return stage measurements, the newest first. Measurements that are too old are left out.

        Args:
            scope: see `History`. None stands for all scopes.
        """
        return await self._background.ask(self._with_index, lambda index: index.history.measurements(scope)) or []

    async def remember(self, scope: bytes, measurement: StageMeasurement) -> None:
        """Keep a stage measurement, if the directory can be written to."""
        await run_in_thread(self._with_index, lambda index: index.history.remember(scope, measurement))

    def remember_later(self, scope: bytes, measurement: StageMeasurement) -> None:
        """Keep a stage measurement as `remember` does, without waiting for the disk."""
        self._background.run_later(partial(self._with_index, lambda index: index.history.remember(scope, measurement)))

    async def use(self, model_digest: bytes, within_s: float) -> int:
        """Return how many executions of the model `count_use` has counted within that time."""
        return await self._background.ask(self._with_index, lambda index: index.history.use(model_digest, within_s)) or 0

    def count_use(self, model_digest: bytes, executions: int) -> None:
        """Add executions of the model, without waiting for the disk."""
        self._background.run_later(partial(self._with_index, lambda index: index.history.count_use(model_digest, executions)))
