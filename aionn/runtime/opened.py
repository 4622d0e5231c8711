"""`Opened`: one opening of a runtime. It owns the tasks, the devices, the cache stores and the compilations, and closes them.

A compilation that the app drops is collected. What the app keeps of it, such as a burst, is closed through its compiled model.

`Runtime` makes it once everything that it needs is imported.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from pathlib import Path

import anyio

from aionn.caching.store import CacheStore
from aionn.runtime.checkup import HealthWatch
from aionn.runtime.health import HealthPolicy
from aionn.runtime.parts import CompilationParts
from aionn.runtime.preparing.request import CacheChoice
from aionn.runtime.processes.devices import Devices
from aionn.runtime.processes.spawning import GRACE_S, KILL_S, Settings
from aionn.runtime.reports import Reports
from aionn.runtime.session import Session
from aionn.runtime.traced import begin_environment, end_environment, write_environment
from aionn.tasks import OwnedTasks, bounded_shield, end_threads

CLOSE_STORES_S = 5.0
"""A cache directory on a disk that hangs must not hold up the app's end."""

CLOSE_S = GRACE_S + KILL_S + CLOSE_STORES_S
"""What closing a runtime may take."""


class Opened:
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
        self._reports = Reports(loop, name)
        self.devices = Devices(self._tasks, settings, self._reports)
        self.session = Session(loop, self._tasks, self.devices, self._reports)
        self.devices.check_use = self.session.check_open
        self.health = HealthWatch(self.session, policy)
        self.compilations: weakref.WeakSet[CompilationParts] = weakref.WeakSet()
        self._stores: dict[str, CacheStore] = {}
        self._reports.each_beat.append(weakref.WeakMethod(self._show_caches))

    async def open(self) -> None:
        """Start the runtime's own task."""
        try:
            await self._tasks.open()
        except BaseException:
            self._reports.end()
            if self._traced is not None:
                end_environment(self._traced)
            raise

    def check(self) -> Opened:
        """Return this.

        Raises:
            CallerError: the runtime was closed, or this is another process or another event loop.
        """
        self.session.check_open()
        return self

    def add(self, parts: CompilationParts) -> None:
        """Own a compilation that was made."""
        self.compilations.add(parts)
        self.health.watch(parts)

    def cache(self, cache_dir: str | Path, token: bytes, required: bool = False) -> CacheChoice:
        """Return where a compilation is kept."""
        path = os.path.abspath(cache_dir)
        store = self._stores.get(path)
        if store is None:
            store = self._stores[path] = CacheStore(path)
        return CacheChoice(store, token, required=required)

    def _show_caches(self) -> None:
        for path, store in self._stores.items():
            usage = store.usage
            self._reports.cache_holds(path, usage.held_bytes, usage.entries, usage.evicted)

    async def aclose(self) -> None:
        """Close everything; see `Runtime.aclose`."""
        self.session.close()
        if not self._reports.events.ended:
            self.health.beat()
        await self._tasks.aclose(CLOSE_S)

    async def _close(self) -> None:
        """Close everything, as the last act of the runtime's own task. It ends in bounded time, also when that task is cancelled."""
        self.session.close()
        # First, or a stage would try to go on with devices that end.
        for compiled in list(self.session.models):
            compiled.abandon()
        self._reports.drivers_end()
        try:
            await self.devices.aclose()
        finally:
            for parts in list(self.compilations):
                parts.end()
            for compiled in list(self.session.models):
                compiled.end()
            self._show_caches()
            self._reports.end()
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
