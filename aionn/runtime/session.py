"""`Session`: what the parts of an open runtime need from it.

A part gets the session, never the runtime. So no part can reach back to what made it.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from asyncio import _get_running_loop  # as in `burst`
from typing import TYPE_CHECKING

from aionn.errors import CallerError
from aionn.loopless import running_loop
from aionn.runtime.processes.devices import Devices
from aionn.runtime.record import Record
from aionn.tasks import OwnedTasks

if TYPE_CHECKING:  # nothing is compiled yet when a runtime opens
    from aionn.runtime.serving.serving import CompiledModel


class Session:
    """One opening of a runtime.

    Attributes:
        loop: the event loop that the runtime was opened in. It is used in no other.
        tasks: the group that owns every task of the runtime.
        devices: every device that the runtime knows.
        record: what the runtime shows on the statistics page of this process, and as events.
        page: that page.
        models: the compiled models that live. A burst or a device memory that the app keeps may outlive its compilation, but not its model.
    """

    __slots__ = ("_open", "_pid", "devices", "loop", "models", "page", "record", "tasks")

    def __init__(self, loop: asyncio.AbstractEventLoop, tasks: OwnedTasks, devices: Devices, record: Record) -> None:
        self.loop = loop
        self.tasks = tasks
        self.devices = devices
        self.record = record
        self.page = record.page
        self.models: weakref.WeakSet[CompiledModel] = weakref.WeakSet()
        self._pid = os.getpid()
        self._open = True

    @property
    def inherited(self) -> bool:
        """Whether this process is a child, by `os.fork`, of the one that opened the runtime. A child may touch nothing of it."""
        return os.getpid() != self._pid

    @property
    def is_open(self) -> bool:
        """Whether new work may begin, as far as the runtime was not closed."""
        return self._open

    def close(self) -> None:
        """Refuse new work from now on."""
        self._open = False

    def check_open(self) -> None:
        """Return if new work may begin.

        Raises:
            CallerError: the runtime was closed, or this is another process or another event loop.
        """
        if _get_running_loop() is self.loop and self._open and os.getpid() == self._pid:
            return
        self.check_process()
        running_loop()  # raises if no loop runs
        raise CallerError("this runtime belongs to another event loop; a runtime is used in the loop that opened it")

    def check_process(self) -> None:
        """Check as `check_open` does, for what may be done in any thread."""
        if self._open and os.getpid() == self._pid:
            return
        if self.inherited:
            raise CallerError("this runtime belongs to the process that opened it, of which this one is a child; open one in this process")
        if not self._open:
            failure = self.tasks.failure
            if failure is not None:
                raise CallerError(f"the runtime was ended by an internal error ({type(failure).__name__}); open a new one") from failure
            raise CallerError("the runtime is not open; use it inside `async with aionn.Runtime() as runtime`")

    def check_loop(self) -> None:
        """Check as `check_open` does, for what may still be done after the runtime was closed, such as closing."""
        if self._open:
            self.check_open()
