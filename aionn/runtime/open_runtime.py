"""`OpenRuntime`: what an open runtime owns. It closes everything.

It owns the tasks, the devices, the cache stores and the compilations. A compilation that the app drops is collected. What the app keeps of
it, such as a burst, is closed through its compiled model.

A process may have open runtimes and compile nothing, as a service without apps. So what compiles is imported when it is needed.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

import anyio

from aionn.runtime.health import HealthPolicy
from aionn.runtime.health_watch import HealthWatch
from aionn.runtime.processes.devices import Devices, attach, end_retired
from aionn.runtime.processes.spawning import GRACE_S, KILL_S, Settings
from aionn.runtime.processes.template import end_idle, leave_template
from aionn.runtime.record import Record
from aionn.runtime.session import Session
from aionn.runtime.tracing import begin_environment, end_environment, write_environment
from aionn.tasks import OwnedTasks, bounded_shield, end_threads

if TYPE_CHECKING:
    from aionn.caching.store import CacheStore
    from aionn.runtime.compilation import CompilationParts

CLOSE_STORES_S = 5.0
"""A cache directory on a disk that hangs must not hold up the app's end."""

CLOSE_S = GRACE_S + KILL_S + CLOSE_STORES_S
"""What closing a runtime may take."""


class OpenRuntime:
    """What an open runtime owns. `open` must follow, and `aclose` or the end of the loop after it.

    Attributes:
        devices: every device that the runtime knows.
        session: what the parts of the runtime need from it.
        compilations: those that live.
        stores: where compilations are kept, by folder.
        health: judges whether the runtime can do the app's work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: Settings, name: str, policy: HealthPolicy) -> None:
        self._tasks = OwnedTasks(self._close, "runtime")
        self._traced = begin_environment()
        self._record = Record(loop, name)
        self.devices = Devices(self._tasks, settings, self._record)
        self.session = Session(loop, self._tasks, self.devices, self._record)
        self.devices.check_use = self.session.check_open
        self.health = HealthWatch(self.session, policy)
        self.compilations: weakref.WeakSet[CompilationParts] = weakref.WeakSet()
        self.stores: dict[str, CacheStore] = {}
        self._record.each_beat.append(weakref.WeakMethod(self._beat))

    async def open(self) -> None:
        """Attach to the service if one is asked for, and start the runtime's own task.

        Raises:
            DeviceUnavailableError: as `Runtime.open`.
        """
        try:
            await attach(self.devices)
            await self._tasks.open()
        except BaseException:
            if self.devices.service is not None:
                self.devices.service.end()
            self._record.end()
            leave_template(self.devices)
            if self._traced is not None:
                end_environment(self._traced)
            raise

    def _beat(self) -> None:
        self._show_caches()
        end_retired(self.devices)
        end_idle()

    def _show_caches(self) -> None:
        for path, store in self.stores.items():
            usage = store.usage
            self._record.cache_holds(path, usage.held_bytes, usage.entries, usage.evicted)

    async def aclose(self) -> None:
        """Close everything; see `Runtime.aclose`."""
        self.session.close()
        if not self._record.ended:
            self.health.beat()
        await self._tasks.aclose(CLOSE_S)

    async def _close(self) -> None:
        """Close everything, as the last act of the runtime's own task. It ends in bounded time, also when that task is cancelled."""
        self.session.close()
        # First, or a stage would try to go on with devices that end.
        for compiled in list(self.session.models):
            compiled.cancel()
        self._record.drivers_end()
        try:
            await self.devices.aclose()
        finally:
            for parts in list(self.compilations):
                parts.end()
            for compiled in list(self.session.models):
                compiled.end()
            self._show_caches()
            self._record.end()
            if self._traced is not None:
                await write_environment(self._traced)
            # Side by side: no store waits for another one's disk before it ends the calls that wait in it.
            try:
                with bounded_shield(CLOSE_STORES_S):
                    async with anyio.create_task_group() as closing:
                        for store in self.stores.values():
                            closing.start_soon(store.aclose)
            finally:
                end_threads()
