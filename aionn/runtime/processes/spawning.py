"""Start the process of a driver. Only this file starts processes.

A driver is started by posix_spawn and exec, so nothing of the app's loop or threads is copied into it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
from dataclasses import dataclass

from aionn.errors import DeviceUnavailableError
from aionn.runtime.processes.liveness import DEFAULT_HANG_S

_SOCKET_FD = 3


_POOL_SIZES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
"""Variables that bound the thread pools of libraries which an engine's settings do not reach, such as NumPy's BLAS."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for all driver processes of a runtime.

    Attributes:
        state_dir: where drivers keep their records. If empty, the records are in the user's state directory.
        hang_s: as for `Runtime`.
        threads: the most engine threads of a driver process. 0 for as many as the CPUs that the process may use.
    """

    state_dir: str = ""
    hang_s: float | None = DEFAULT_HANG_S
    threads: int = 0


def spawn(engine: str, name: str, theirs: socket.socket, schedule: str, settings: Settings) -> tuple[int, int]:
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
            [sys.executable, "-P", "-m", "aionn.driver", engine, str(_SOCKET_FD), schedule, *filter(None, [settings.state_dir])],
            _environment(settings.threads),
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


def _environment(threads: int) -> dict[str, str]:
    environment = dict(os.environ)
    if threads:
        environment.update(dict.fromkeys(_POOL_SIZES, str(threads)))
    # Buffered prints of an engine would be lost when its driver is killed.
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
