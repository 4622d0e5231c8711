"""A child process, signalled and waited for through its pidfd, and what it prints.

Invariants
    A child is waited for (`waitid`) once, in `reap`. `exit_code` is set after it, unless the app reaped the child itself
    (SIGCHLD ignored, a stray `os.wait`).
    Signals go through the pidfd. The number of a process may belong to another process by now.
    `_pidfd` is -1 from the moment it is closed.
    What the child has printed was written to the app's stderr when `reap` returns.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from aionn.caching.export_folder import remove_folder
from aionn.runtime.processes.output import Output
from aionn.tasks import leave_in_child, running_loop


class Child:
    """A child process of this app.

    Attributes:
        pid: its number.
        exit_code: of the process that has ended, or minus the signal that ended it. None if it is not known.
    """

    def __init__(self, pid: int, pidfd: int, output: Output, exited: Callable[[], None], exports: str = "") -> None:
        """Take over the pidfd and the output. `exited` is called when the process has ended, until `reap` or `give_up` has been called.

        `exports` is the folder for temporary files that the process may have made. It is removed with the process.
        """
        self.pid = pid
        self.exit_code: int | None = None
        self._pidfd = pidfd
        self._exports = exports
        self._loop = running_loop()
        self._loop.add_reader(pidfd, exited)
        self._output = output
        output.forward()
        leave_in_child(self)

    @property
    def last_lines(self) -> str:
        """The last lines that it has printed so far, without control characters. May be empty."""
        return self._output.last_lines

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return  # the process has ended, and the loop will call `exited`

    def reap(self) -> bool:
        """Take the exit code of a process that has ended. Returns False while the process runs, and after the first time."""
        if self._pidfd < 0:
            return False
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if status is None:
                return False
            self.exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        except ChildProcessError:
            pass  # the app has reaped the process: the pidfd still says that the process has ended
        self.give_up()
        return True

    def block_until_ended(self, seconds: float) -> None:
        """Wait for the end in this thread. The loop stands still meanwhile."""
        if self._pidfd >= 0:
            (waiting := select.poll()).register(self._pidfd, select.POLLIN)
            waiting.poll(seconds * 1000)

    def give_up(self) -> None:
        """Close the pidfd and the output. A process that still runs is left to the system."""
        self._output.end()
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)
            remove_folder(self._exports)

    def leave(self) -> None:
        """Close the pidfd in a child of fork: the process is the parent's. The output leaves by itself."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
