"""`Plans`: how models were cut over several devices, as a cache directory keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aionn.caching.store.background import BackgroundWork
from aionn.caching.store.threads import run_in_thread

__all__ = ["Plans"]


class Plans:
    """The plans of one store, by their scopes (`History`)."""

    def __init__(self, background: BackgroundWork, with_index: Callable[..., Any]) -> None:
        self._background = background
        self._with_index = with_index

    async def get(self, scope: bytes) -> bytes | None:
        """Return the plan that is kept under that scope, or None."""
        found: bytes | None = await self._background.ask(self._with_index, lambda index: index.history.plan(scope))
        return found

    async def keep(self, scope: bytes, body: bytes) -> None:
        """Keep a plan, if the directory can be written to."""
        await run_in_thread(self._with_index, lambda index: index.history.keep_plan(scope, body))
