"""Start the process of a driver. Only this file starts processes.

A driver finds in its environment which process started it (`surroundings.APP_PID`). So `aionn doctor` recognises one that has lost its app.

A driver is a copy of a template, or is started by posix_spawn and exec. So nothing of the app's loop or threads is copied into it.

`Runtime.open` spawns a driver before it imports what a runtime needs. So this module imports nothing heavy.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from aionn.caching.export_folder import name_folder, remove_folder
from aionn.caching.private_folder import user_state_directory
from aionn.errors import CallerError, DeviceUnavailableError
from aionn.remote.orders import CONTROL_FD, COUNTER_FD, LEAVES_TEMPLATE, PAGE_FD, SOCKET_FD, SPACES
from aionn.runtime.processes.output import Output, output_pipe
from aionn.runtime.processes.surroundings import driver_environment
from aionn.runtime.processes.template import Template, end_child, end_unused, new_template, template_of_thread
from aionn.tasks import leave_in_child

if TYPE_CHECKING:
    from aionn.needs import Needs

DEFAULT_HANG_S = 10.0

USUAL, WHEN_IDLE = "0", "idle"
"""How the system schedules a driver process: like the app, or only where no other process wants the CPU (SCHED_IDLE)."""

GRACE_S = 2.0
"""How long a driver whose socket has ended may take to free its device. Then it is killed."""

KILL_S = 5.0
"""How long to wait for a killed process: the kernel may be busy freeing its memory. The process is then left to init."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for all driver processes of a runtime.

    Attributes:
        state_dir: where drivers keep their records. If empty, the records are in the user's state directory.
        hang_s: as for `Runtime`.
        threads: the most engine threads of a driver process. 0 for as many as the CPUs that the process may use.
        sandbox: how much confines a driver (`sandbox.report.LEVELS`, or "strict").
        environment: variables that drivers get beyond those that every driver gets.
        needs: by the name of a device what its sandbox must allow, in place of what the engine's package states.
        template: whether drivers may be copies of a template.
    """

    state_dir: str = ""
    hang_s: float | None = DEFAULT_HANG_S
    threads: int = 0
    sandbox: str = "off"
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, Needs] = field(default_factory=dict)
    template: bool = True


def checked_state_dir(state_dir: object) -> str:
    """Return `Runtime(state_dir=)` as an absolute path, or an empty text for None.

    Raises:
        CallerError: it is not a path; or Python imports from it. A driver that a model file has taken over could then leave a package
            "onnxruntime" there, which the next app would import.
    """
    if state_dir is None:
        return ""
    if not isinstance(state_dir, str | os.PathLike) or not (path := os.fspath(state_dir)) or not isinstance(path, str) or "\0" in path:
        raise CallerError(f"state_dir={state_dir!r}: give the path of a folder, or None for the user's state folder")
    if os.path.realpath(path) in (os.path.realpath(entry) for entry in sys.path if isinstance(entry, str)):
        raise CallerError(f"state_dir={state_dir!r}: Python imports from this folder, and drivers write to it; give a folder below it")
    return os.path.abspath(path)


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
    """A driver process that was just started. Its owner takes the pidfd, the socket and the output over, or calls `end`.

    Attributes:
        pid: its number.
        pidfd: a descriptor of the process. -1 once it was taken over or closed.
        sock: the app's end of the control socket.
        output: what the process prints. Nothing reads it before it was taken over.
        home: "package.module:Class" of its engine, or an empty text.
        started_ns: by CLOCK_MONOTONIC.
        exports: the folder for temporary files that the process may have made, or an empty text. The owner removes it
            (`export_folder.remove_folder`) when the process has ended.
    """

    def __init__(self, name: str, home: str, schedule: str, settings: Settings) -> None:
        """Start the process. `schedule` and `home` are as for `DriverProcess`.

        Raises:
            DeviceUnavailableError: the process cannot be started. Nothing of it is left.
        """
        self.home = home
        self.started_ns = time.monotonic_ns()
        self.exports = "" if settings.sandbox == "off" else name_folder()
        try:
            with ExitStack() as theirs, ExitStack() as ours:
                self.output, printing = output_pipe()
                theirs.callback(os.close, printing)
                ours.callback(self.output.end)
                self.sock, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                theirs.enter_context(control)
                ours.enter_context(self.sock)
                engine = f"{name}={home}" if home else name
                self.pid, self.pidfd = _spawn(
                    engine, name, (control.fileno(), printing, self.output.counter), schedule, settings, self.exports
                )
                ours.pop_all()
        except OSError as error:
            raise DeviceUnavailableError(
                name, f"device {name!r} cannot start: its driver process ({sys.executable}) was not made: {error.strerror}"
            ) from error
        leave_in_child(self)

    def take_over(self) -> tuple[int, socket.socket, Output]:
        """Give the pidfd, the socket and the output to the caller, who must close them and wait for the process."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd, self.sock, self.output

    def end(self) -> None:
        """Kill the process and wait for its end, unless it was taken over. A process that does not end is left to the system.

        Without a runtime, the template that the process may have left ends, too.
        """
        if self.pidfd < 0:
            return
        pidfd, sock, output = self.take_over()
        try:
            end_child(pidfd)
        finally:
            sock.close()
            output.end()
            remove_folder(self.exports)
            end_unused()

    def leave(self) -> None:
        """Close the descriptors in a child of fork: the process is the parent's."""
        if self.pidfd >= 0:
            pidfd, sock, _ = self.take_over()  # the output leaves by itself
            os.close(pidfd)
            sock.close()


def _spawn(engine: str, name: str, theirs: tuple[int, int, int], schedule: str, settings: Settings, exports: str) -> tuple[int, int]:
    """Start a driver process. Returns the pid and the pidfd.

    Args:
        engine: what the driver loads, with its home if that is known.
        theirs: a socket, which the child has as descriptor 3, the end of a pipe, which it has as stdout and stderr, and an eventfd, which
            it has as descriptor 4. It has no stdin.
        schedule: as for `DriverProcess`.

    Raises:
        OSError: the process cannot be started. Nothing of it is left.
        DeviceUnavailableError: this app has no Python to start the driver with.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        found = "is the app itself (it is frozen)" if sys.executable else "is not set"
        raise DeviceUnavailableError(
            name, f"device {name!r} cannot start: sys.executable {found}; set it to a Python that has aionn installed"
        )
    environment = driver_environment(settings.sandbox, settings.threads, settings.environment)
    arguments = [
        *(engine, str(CONTROL_FD), schedule, settings.state_dir or os.path.abspath(user_state_directory())),
        *(settings.sandbox, exports, str(COUNTER_FD), _as_argument(settings.needs.get(name))),
    ]
    template = template_of_thread() if settings.template else None
    pid = 0 if template is None else template.order(arguments, environment, theirs)
    if not pid:
        leaves = new_template(environment) if settings.template and schedule == USUAL else None
        pid = _executed(arguments, environment, theirs, leaves)
    try:
        return pid, os.pidfd_open(pid)
    except BaseException:
        # The child has not been waited for yet, so no other process can have its number.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _executed(arguments: list[str], environment: dict[str, str], theirs: tuple[int, int, int], leaves: Template | None) -> int:
    """Start `python -m aionn.driver ARGUMENTS`, which also leaves a template if one is given. Returns the pid.

    Raises:
        OSError: the process cannot be started.
    """
    places = [CONTROL_FD, 1, COUNTER_FD]
    given = list(theirs)
    if leaves is not None:
        arguments = [*arguments, LEAVES_TEMPLATE + " " * SPACES]
        places += [SOCKET_FD, PAGE_FD]
        given += leaves.theirs
    # Numbers above the child's numbers, so that each dup2 really duplicates and clears close-on-exec.
    high: list[int] = []
    try:
        for fd in given:
            high.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10))
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "aionn.driver", *arguments],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                *((os.POSIX_SPAWN_DUP2, fd, place) for fd, place in zip(high, places, strict=True)),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            # The app handles a signal to the process group. The driver unblocks signals once it ignores those.
            setsigmask=signal.valid_signals(),
            setsigdef=[signal.SIGPIPE, signal.SIGCHLD],
        )
    finally:
        for fd in high:
            os.close(fd)
        if leaves is not None:
            leaves.given()


def _as_argument(needs: Needs | None) -> str:
    if needs is None:
        return ""
    import json  # few apps give needs

    return json.dumps(asdict(needs))
