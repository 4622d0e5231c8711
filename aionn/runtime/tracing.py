"""What connects an open runtime to traces: recordings of this process, tracers from outside, and `AIONN_TRACE`.

A recording reads the statistics page of this process, which exists while a runtime is open (`PageSource`). A tracer of another process
reads the page by itself. It sees what this process's Python code reports only if that is written as trace records, too. The
heartbeat looks for such a tracer, once a second (`OutsideTracer`).

Invariant
    All runtimes of a process share one `PageSource`, so that no frame is recorded twice.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from aionn import trace
from aionn.pages.app_page import AppPage
from aionn.pages.layout import LayoutError

if TYPE_CHECKING:
    from aionn.pages.record_reader import CollectingThread

logger = logging.getLogger("aionn.trace")

VARIABLE = "AIONN_TRACE"

WRITE_S = 30.0
"""Closing a runtime waits so long for the file of `AIONN_TRACE`."""


class PageSource:
    """Reads this process's page and those of its drivers, for each recording. Satisfies `trace.FrameSource`."""

    def __init__(self) -> None:
        self.users = 0
        self._threads: dict[trace.Recording, CollectingThread] = {}

    def begin(self, recording: trace.Recording) -> None:
        """See `trace.FrameSource`. Without a page there is nothing to read."""
        from aionn.pages.finding import find_page
        from aionn.pages.record_reader import CollectingThread

        try:
            page = find_page(os.getpid(), "app")
            if page is not None:
                self._threads[recording] = CollectingThread(page)
        except (OSError, LayoutError, RuntimeError) as error:
            logger.warning("frames are missing in a recording, because the statistics page cannot be read: %s", error)

    def end(self, recording: trace.Recording) -> None:
        """See `trace.FrameSource`."""
        thread = self._threads.pop(recording, None)
        if thread is not None:
            recording.pending.append(thread.end())

    def look(self) -> None:
        """Read what there is, before drivers end."""
        for thread in list(self._threads.values()):
            thread.look()


_changing = threading.Lock()
_source: PageSource | None = None


def share_source() -> PageSource:
    """Let recordings read the page, which has just been opened. `leave_source` must follow, before the page is closed."""
    global _source
    with _changing:
        first = _source is None
        source = _source = _source or PageSource()
        source.users += 1
    if first:
        trace.add_source(source)
    return source


def leave_source(source: PageSource) -> None:
    """End what `share_source` began."""
    global _source
    with _changing:
        source.users -= 1
        last = not source.users
        if last:
            _source = None
    if last:
        trace.remove_source(source)


class OutsideTracer:
    """Writes what Python code of this process reports as trace records, while another process asks for records."""

    def __init__(self, page: AppPage) -> None:
        self._page = page
        self._listening = ExitStack()
        self._listens = False

    def beat(self) -> None:
        """Begin or end, as the page says."""
        wanted = self._page.traced_until_ns > time.monotonic_ns()
        if wanted and not self._listens:
            self._listening.enter_context(trace.listen(self._page.write_event))
        elif self._listens and not wanted:
            self._listening.close()
        self._listens = wanted

    def end(self) -> None:
        """Stop listening. Idempotent."""
        self._listening.close()
        self._listens = False


class EnvironmentTrace:
    """The recording that `AIONN_TRACE` asks for: from the first opening of a runtime to the last closing, all over again after that."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.users = 0
        self._open = ExitStack()
        self._recording = self._open.enter_context(trace.record())

    def end(self) -> None:
        """End the recording."""
        self._open.close()

    def write(self) -> None:
        """Write the file. The log has the reason if that fails."""
        try:
            self._recording.write_chrome(self.path)
        except OSError as error:
            logger.warning("the trace that %s asks for cannot be written to %s: %s; name another file", VARIABLE, self.path, error)


_environment: EnvironmentTrace | None = None
_written = 0


def begin_environment() -> EnvironmentTrace | None:
    """Return the recording that `AIONN_TRACE` asks for, or None. `end_environment` must follow."""
    global _environment
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    with _changing:
        if _environment is None:
            _environment = EnvironmentTrace(_path_of(path, _written))
        _environment.users += 1
        return _environment


def end_environment(recording: EnvironmentTrace) -> bool:
    """End it if this was its last user. Returns whether its file is to be written."""
    global _environment, _written
    with _changing:
        recording.users -= 1
        if recording.users:
            return False
        _environment = None
        _written += 1
    recording.end()
    return True


def _path_of(path: str, written: int) -> str:
    """Return the file for this process, whose recordings before have been written. "{pid}" stands for its number."""
    path = path.replace("{pid}", str(os.getpid()))
    if not written:
        return path
    ending = next((ending for ending in (".json.gz", ".json", ".gz") if path.endswith(ending)), "")
    return f"{path.removesuffix(ending)}.{written + 1}{ending}"


async def write_environment(recording: EnvironmentTrace) -> None:
    """End the recording, and write its file if this was its last user. Takes at most `WRITE_S`."""
    if not end_environment(recording):
        return
    import anyio
    import anyio.to_thread

    from aionn.tasks import bounded_shield

    with bounded_shield(WRITE_S) as scope:
        await anyio.to_thread.run_sync(partial(recording.write), abandon_on_cancel=True)
    if scope.cancelled_caught:
        logger.warning("the trace that %s asks for was not written to %s within %s s", VARIABLE, recording.path, WRITE_S)
