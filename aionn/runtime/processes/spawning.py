"""Start the process of a driver. Only this file starts processes.

A driver finds in its environment which process started it (`APP_PID`). So `aionn doctor` recognises one that has lost its app.

A driver is started by posix_spawn and exec, so nothing of the app's loop or threads is copied into it.

`Runtime.open` spawns a driver before it imports what a runtime needs. So this module imports nothing heavy.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from aionn.caching.private_folder import user_state_directory
from aionn.errors import CallerError, DeviceUnavailableError
from aionn.runtime.processes.surroundings import driver_environment
from aionn.tasks import leave_in_child

DEFAULT_HANG_S = 10.0

USUAL, WHEN_IDLE = "0", "idle"
"""How the system schedules a driver process: like the app, or only where no other process wants the CPU (SCHED_IDLE)."""

_SOCKET_FD = 3


GRACE_S = 2.0
"""How long a driver whose socket has ended may take to free its device. Then it is killed."""

KILL_S = 5.0
"""How long to wait for a killed process: the kernel may be busy freeing its memory. The process is then left to init."""

ABORT_S = 1.0
"""How long to wait for a killed process where closing is cancelled. The loop stands still meanwhile."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for all driver processes of a runtime.

    Attributes:
        state_dir: where drivers keep their records. If empty, the records are in the user's state directory.
        hang_s: as for `Runtime`.
        threads: the most engine threads of a driver process. 0 for as many as the CPUs that the process may use.
        sandbox: how much confines a driver (`sandbox.report.LEVELS`, or "strict").
        environment: variables that drivers get beyond those that every driver gets.
    """

    state_dir: str = ""
    hang_s: float | None = DEFAULT_HANG_S
    threads: int = 0
    sandbox: str = "off"
    environment: Mapping[str, str] = field(default_factory=dict)


def checked_state_dir(state_dir: object) -> str:
    """Return `Runtime(state_dir=)` as an absolute path, or an empty text for None.

    Raises:
        CallerError: it is not a path.
    """
    if state_dir is None:
        return ""
    if not isinstance(state_dir, str | os.PathLike) or not (path := os.fspath(state_dir)) or not isinstance(path, str) or "\0" in path:
        raise CallerError(f"state_dir={state_dir!r}: give the path of a folder, or None for the user's state folder")
    return os.path.abspath(path)


APP_PID = "AIONN_APP_PID"
"""The variable in the environment of a driver with the number of its app, as the app itself knows it."""


def start_python(code: str, stdin_fd: int, stdout_fd: int) -> int:
    """Start this Python with a few lines of code, for `aionn doctor`. Returns the pid. The caller must wait for the process.

    Raises:
        OSError: it cannot be started.
    """
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-S", "-c", code],
        dict(os.environ),
        file_actions=[(os.POSIX_SPAWN_DUP2, stdin_fd, 0), (os.POSIX_SPAWN_DUP2, stdout_fd, 1)],
    )


class Spawned:
    """A driver process that was just started. Its owner takes the pidfd and the socket over, or calls `end`.

    Attributes:
        pid: its number.
        pidfd: a descriptor of the process. -1 once it was taken over or closed.
        sock: the app's end of the control socket.
        home: "package.module:Class" of its engine, or an empty text.
        started_ns: by CLOCK_MONOTONIC.
    """

    def __init__(self, name: str, home: str, schedule: str, settings: Settings) -> None:
        """Start the process. `schedule` and `home` are as for `DriverProcess`.

        Raises:
            DeviceUnavailableError: the process cannot be started. Nothing of it is left.
        """
        self.home = home
        self.started_ns = time.monotonic_ns()
        try:
            self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                try:
                    self.pid, self.pidfd = _spawn(f"{name}={home}" if home else name, name, theirs, schedule, settings)
                except BaseException:
                    self.sock.close()
                    raise
        except OSError as error:
            raise DeviceUnavailableError(
                name, f"device {name!r} cannot start: its driver process ({sys.executable}) was not made: {error.strerror}"
            ) from error
        leave_in_child(self)

    def take_over(self) -> tuple[int, socket.socket]:
        """Give the pidfd and the socket to the caller, who must close them and wait for the process."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd, self.sock

    def end(self) -> None:
        """Kill the process and wait for its end, unless it was taken over. A process that does not end is left to the system."""
        if self.pidfd < 0:
            return
        pidfd, sock = self.take_over()
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            (waiting := select.poll()).register(pidfd, select.POLLIN)
            waiting.poll(ABORT_S * 1000)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            pass  # the app has reaped the process
        finally:
            os.close(pidfd)
            sock.close()

    def leave(self) -> None:
        """Close the descriptors in a child of fork: the process is the parent's."""
        if self.pidfd >= 0:
            pidfd, sock = self.take_over()
            os.close(pidfd)
            sock.close()


def _spawn(engine: str, name: str, theirs: socket.socket, schedule: str, settings: Settings) -> tuple[int, int]:
    """Start `python -m aionn.driver ENGINE`. Returns the pid and the pidfd.

    The child has the socket as descriptor 3, no stdin, and prints to the app's stderr. `schedule` is as for `DriverProcess`.

    Raises:
        OSError: the process cannot be started. Nothing of it is left.
        DeviceUnavailableError: this app has no Python to start the driver with.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        found = "is the app itself (it is frozen)" if sys.executable else "is not set"
        raise DeviceUnavailableError(
            name, f"device {name!r} cannot start: sys.executable {found}; set it to a Python that has aionn installed"
        )
    # A number above the child's numbers, so that each dup2 really duplicates and clears close-on-exec.
    high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 10)
    try:
        pid = os.posix_spawn(
            sys.executable,
            [
                *(sys.executable, "-P", "-m", "aionn.driver", engine, str(_SOCKET_FD), schedule),
                *(settings.state_dir or os.path.abspath(user_state_directory()), settings.sandbox),
            ],
            {**driver_environment(settings.sandbox, settings.threads, settings.environment), APP_PID: str(os.getpid())},
            file_actions=[
                *([] if _has_stderr() else [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]),
                (os.POSIX_SPAWN_DUP2, 2, 1),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, high, _SOCKET_FD),
            ],
            # The app handles a signal to the process group. The driver unblocks signals once it ignores those.
            setsigmask=signal.valid_signals(),
            setsigdef=[signal.SIGPIPE, signal.SIGCHLD],
        )
    finally:
        os.close(high)
    try:
        return pid, os.pidfd_open(pid)
    except BaseException:
        # The child has not been waited for yet, so no other process can have its number.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _has_stderr() -> bool:
    """Return whether descriptor 2 is the app's stderr. In a daemon it is closed, or another file has got its number."""
    try:
        return os.get_inheritable(2)
    except OSError:
        return False
