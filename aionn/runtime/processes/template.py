"""The app's side of the template of drivers: a copy of the first driver that makes further ones in a few milliseconds.

There is at most one for each thread of the app that opens runtimes, because the kernel ends drivers with the thread whose children they
are. It serves all runtimes of that thread, and ends with the last of them.

A driver from a template is a child of the app like any other. The template's own number and that of each driver stand in a page which app
and template share before the process runs. So no process is unknown to the app, even if the template dies in the act.

Only what is as it was when the template began can be had from it: environment, folder, rights, limits, schedule. Otherwise the driver is
started by exec.

`Runtime.open` uses this module before it imports what a runtime needs. So it imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from aionn.errors import CallerError
from aionn.loopless import is_readable, leave_in_child, running_loop
from aionn.remote.orders import LEARNS, MADE, NUMBER_OF_LAST, OWN_NUMBER, PAGE_BYTES, READY, encode_order, may_differ

logger = logging.getLogger("aionn.driver")

_ANSWER_S = 0.5
"""How long the loop waits for a template to copy itself, which takes 1 to 5 ms. Then the template is ended."""

ABORT_S = 1.0
"""How long to wait for a killed process where nothing may be awaited. The loop stands still meanwhile."""

_FEW_FILES = 128
"""A process that may open so few files has none to spare for a template."""

_IDLE_S = 10.0
"""A template ends when no driver of its thread was alive or asked for in this time."""

_RIGHTS = ("Umask", "Uid", "Gid", "Groups", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")
"""Lines of /proc/self/status that a child takes over."""


def surroundings(environment: Mapping[str, str]) -> tuple[object, ...] | None:
    """Return what a driver takes over from this process, apart from what a template can change. None: it cannot be found out."""
    try:
        with open("/proc/thread-self/status", encoding="utf-8", errors="replace") as status:
            rights = [line for line in status if line.partition(":")[0] in _RIGHTS]
        with open("/proc/self/cgroup", "rb") as cgroup:
            group = cgroup.read()
        limits = [resource.getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
        schedule = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        variables = {name: value for name, value in environment.items() if not may_differ(name)}
        return sys.executable, variables, os.getcwd(), rights, group, limits, schedule
    except OSError:
        return None


def end_child(pidfd: int) -> None:
    """Kill a child process, wait for its end for at most `ABORT_S`, and close its pidfd. One that does not end is left to the system."""
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        is_readable(pidfd, ABORT_S)
        with suppress(ChildProcessError):  # the app has reaped it
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    finally:
        os.close(pidfd)


class Template:
    """A template, from the start of the driver that leaves it. Use it in the thread that made it.

    Attributes:
        theirs: a socket and a page for the driver that leaves the template. `given` must follow.
        pid: its number. 0 as long as there is no template yet, and after its end.
        why: why there is no template, if it was asked for and could not be had.
        used_s: when a driver was last alive or asked for, by time.monotonic.
    """

    def __init__(self, found: tuple[object, ...]) -> None:
        """Make what app and template share. `found`: of `surroundings`.

        Raises:
            OSError: this process has no free descriptor.
        """
        self._found = found
        self._page = os.memfd_create("aionn-template", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._page, PAGE_BYTES)
            self._orders, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except BaseException:
            os.close(self._page)
            raise
        self.pid, self.why = 0, ""
        self.used_s = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        leave_in_child(self)

    @property
    def theirs(self) -> tuple[int, int]:
        return self._theirs.fileno(), self._page

    def given(self) -> None:
        """Close this side's copy of the driver's socket. Call it when the driver was started, or could not be."""
        self._theirs.close()

    @property
    def ended(self) -> bool:
        """Whether the template has ended, or could not be left."""
        return self._page < 0

    def watch(self) -> None:
        """Notice the template's end from now on in the running loop. Without one, the next use of the template notices it."""
        self.unwatch()
        with suppress(CallerError):
            self._loop = running_loop()
            self._loop.add_reader(self._orders, self.look)

    def unwatch(self) -> None:
        """Notice nothing any more."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._orders)

    def look(self) -> None:
        """Note what the template has said."""
        if self.ended:
            return
        try:
            said = self._orders.recv(PAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said == READY:
            self.pid = self._number(OWN_NUMBER)
        else:
            self.why = said.decode(errors="replace") or "it has ended"
            logger.info("drivers are started one by one from now on, without a template: %s", self.why)
            self.end()

    def order(self, arguments: Sequence[str], environment: Mapping[str, str], given: Sequence[int]) -> int:
        """Let the template make a driver. Returns its number, or 0 where the driver must be started in another way.

        Args:
            arguments: of its command line.
            environment: its whole environment.
            given: its control socket, the pipe for its output, and its counter.
        """
        self.look()
        self.used_s = time.monotonic()
        if not self.pid or self._found != surroundings(environment):
            return 0
        os.pwrite(self._page, bytes(4), NUMBER_OF_LAST)
        said = b""
        with suppress(OSError):
            variables = {name: value for name, value in environment.items() if may_differ(name)}
            socket.send_fds(self._orders, [encode_order(arguments, variables)], given)
            if is_readable(self._orders.fileno(), _ANSWER_S):
                said = self._orders.recv(PAGE_BYTES)
        if said not in (b"", MADE, LEARNS):
            return 0  # the system has no room for another process
        if said == LEARNS:
            self.pid = 0  # until it is ready again, so that no start waits for its imports
        if said:
            return self._number(NUMBER_OF_LAST)
        self.why = "it did not answer"
        return self.end()

    def _number(self, at: int) -> int:
        return int.from_bytes(os.pread(self._page, 4, at), "little")

    def end(self) -> int:
        """Kill the template and wait for its end. Idempotent. The driver that was to leave it must have ended, or have left it.

        Returns the number of the driver that it has made last, or 0.
        """
        if self.ended:
            return 0
        self.unwatch()
        if pid := self._number(OWN_NUMBER):
            with suppress(OSError):  # the app has reaped it
                end_child(os.pidfd_open(pid))
        last = self._number(NUMBER_OF_LAST)  # final, because the template has ended
        os.close(self._page)
        self._page, self.pid = -1, 0
        self._theirs.close()
        self._orders.close()
        return last

    def leave(self) -> None:
        """Close the descriptors in a child of fork: the template is the parent's."""
        if not self.ended:
            os.close(self._page)
            self._page, self.pid, self._loop = -1, 0, None
            self._theirs.close()
            self._orders.close()


class User(Protocol):
    """A runtime's devices."""

    @property
    def has_drivers(self) -> bool:
        """Whether a driver process of the runtime is alive."""
        ...


class _Here(threading.local):
    """What a thread has: its last template, and who may still use it. A user that is dropped counts no more."""

    def __init__(self) -> None:
        self.template: Template | None = None
        self.users: weakref.WeakSet[User] = weakref.WeakSet()


_here = _Here()


def template_of_thread() -> Template | None:
    """Return this thread's template, or None."""
    template = _here.template
    if template is None:
        return None
    template.look()
    return None if template.ended else template


def why_none() -> str:
    """Return why this thread has no template, or an empty text."""
    if template_of_thread() is not None:
        return ""
    return "no driver has left one" if _here.template is None else _here.template.why


def new_template(environment: Mapping[str, str]) -> Template | None:
    """Return a template that the next driver is to leave. None: this thread has one, or it cannot be had."""
    few = resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _FEW_FILES
    if few or template_of_thread() is not None or (found := surroundings(environment)) is None:
        return None
    try:
        template = _here.template = Template(found)
    except OSError:
        return None  # the start of the driver will say what is missing
    template.watch()
    return template


def use_template(user: User) -> None:
    """Keep this thread's template for one more runtime, until `leave_template`."""
    _here.users.add(user)
    if (template := template_of_thread()) is not None:
        template.watch()


def leave_template(user: User) -> None:
    """Keep it no more for this runtime. When the runtime's drivers have ended, `end_unused` must follow."""
    _here.users.discard(user)


def end_unused() -> None:
    """End this thread's template if no runtime of the thread is open."""
    template = _here.template
    if template is not None and not _here.users:
        _here.template = None
        template.end()


def end_idle() -> None:
    """End this thread's template if no driver was alive or asked for in `_IDLE_S`. The next driver leaves another one."""
    template = _here.template
    if template is None or not template.pid:
        return
    if any(user.has_drivers for user in _here.users):
        template.used_s = time.monotonic()
    elif time.monotonic() - template.used_s > _IDLE_S:
        _here.template = None
        template.end()
