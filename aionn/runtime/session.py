"""`Session`: what the parts of an open runtime need from it.

A part gets the session, never the runtime. So no part can reach back to what made it.
"""

from __future__ import annotations

import asyncio
import os
import sys

from aionn.errors import CallerError
from aionn.pages import BEAT_S, Kind, close_page, open_page
from aionn.runtime.processes.devices import Devices
from aionn.tasks import OwnedTasks, running_loop


class Session:
    """One opening of a runtime.

    Attributes:
        loop: the event loop that the runtime was opened in. It is used in no other.
        tasks: the group that owns every task of the runtime.
        devices: every device that the runtime knows.
        page: the statistics page of this process.
        slot: what the page shows of this runtime.
    """

    __slots__ = ("_beat", "_open", "_pid", "_shown", "devices", "loop", "page", "slot", "tasks")

    def __init__(self, loop: asyncio.AbstractEventLoop, tasks: OwnedTasks, devices: Devices) -> None:
        self.loop = loop
        self.tasks = tasks
        self.devices = devices
        self._pid = os.getpid()
        self._open = True
        self.page = open_page()
        self.slot = self.page.slot(Kind.RUNTIME, os.path.basename(sys.argv[0]) if sys.argv else "")
        self._shown = True
        self._beat_on()

    @property
    def inherited(self) -> bool:
        """Whether this process is a child, by `os.fork`, of the one that opened the runtime. A child may touch nothing of it."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Refuse new work from now on."""
        self._open = False

    def leave_page(self) -> None:
        """Show nothing of this runtime any longer. Its compilations have ended. Idempotent."""
        self._beat.cancel()
        if self._shown:
            self._shown = False
            self.page.free(self.slot)
            close_page(self.page)

    def _beat_on(self) -> None:
        """Write the loop's heartbeat, now and from now on."""
        self.page.beat(self.slot)
        self._beat: asyncio.TimerHandle = self.loop.call_later(BEAT_S, self._beat_on)

    def check_open(self) -> None:
        """Return if new work may begin.

        Raises:
            CallerError: the runtime was closed, or this is another process or another event loop.
        """
        if self.inherited:
            raise CallerError("this runtime belongs to the process that opened it, of which this one is a child; open one in this process")
        if not self._open:
            failure = self.tasks.failure
            if failure is not None:
                raise CallerError(f"the runtime was ended by an internal error ({type(failure).__name__}); open a new one") from failure
            raise CallerError("the runtime is not open; use it inside `async with aionn.Runtime() as runtime`")
        if running_loop() is not self.loop:
            raise CallerError("this runtime belongs to another event loop; a runtime is used in the loop that opened it")

    def check_loop(self) -> None:
        """Check as `check_open` does, for what may still be done after the runtime was closed, such as closing."""
        if self._open:
            self.check_open()
