"""Start the process of a driver. A confined service lets another process do it (`starter`).

A driver is a copy of a template, or is started by posix_spawn and exec. So nothing of the app's loop or threads is copied into it.

`Runtime.open` spawns a driver before it imports what a runtime needs. So this module imports nothing heavy.

The start of a driver takes longer than the imports of an app. So `spawn_early` begins it when a runtime opens, before the app imports
NumPy and what needs it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aionn.caching.private_folder import name_folder, remove_folder, user_state_directory
from aionn.engines.installed import BUILT_IN, Homes, installed_engines, not_installed
from aionn.errors import CallerError, DeviceUnavailableError
from aionn.loopless import leave_in_child
from aionn.remote.orders import CONTROL_FD, COUNTER_FD, LEAVES_TEMPLATE, PLACES, SPACES
from aionn.runtime.processes.child import Child, Output, output_pipe
from aionn.runtime.processes.environment import SET_BY_AIONN, driver_environment
from aionn.runtime.processes.template import Template, end_child, end_unused, new_template, template_of_thread

if TYPE_CHECKING:
    from aionn.needs import Needs


DEFAULT_HANG_S = 10.0

USUAL, WHEN_IDLE = "0", "idle"
"""How the system schedules a driver process: like the app, or only where no other process wants the CPU (SCHED_IDLE)."""

GRACE_S = 2.0
"""How long a driver whose socket has ended may take to free its device. Then it is killed."""

KILL_S = 5.0
"""How long to wait for a killed process: the kernel may be busy freeing its memory. The process is then left to init."""


class DriverStarter(Protocol):
    """A process that starts drivers for this one (`starter`)."""

    def start(self, arguments: Sequence[str], threads: int, more: Mapping[str, str], given: Sequence[int]) -> int: ...


class Settings(NamedTuple):
    """What is the same for all driver processes of a runtime.

    Attributes:
        state_dir: where drivers keep their records. If empty, the records are in the user's state directory.
        hang_s: as for `Runtime`.
        threads: the most engine threads of a driver process. 0 for as many as the CPUs that the process may use.
        sandbox: how much confines a driver (as `checked_sandbox` returns it).
        environment: variables that drivers get beyond those that every driver gets.
        needs: by the name of a device what its sandbox must allow, in place of what the engine's package states.
        template: whether drivers may be copies of a template.
        service: the path of the socket of the service whose drivers are used, or an empty text if the app starts its drivers.
        may_lack_service: whether the app starts drivers itself where no service listens.
        shared: whether the drivers serve other apps, too. They outlive this process then while their guests stream.
        starter: the process that starts drivers, or None where this one does.
    """

    state_dir: str = ""
    hang_s: float | None = DEFAULT_HANG_S
    threads: int = 0
    sandbox: str = "off"
    environment: Mapping[str, str] = MappingProxyType({})
    needs: Mapping[str, Needs] = MappingProxyType({})
    template: bool = True
    service: str = ""
    may_lack_service: bool = False
    shared: bool = False
    starter: DriverStarter | None = None


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
            (`private_folder.remove_folder`) when the process has ended.
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

    def child(self, exited: Callable[[], None]) -> Child:
        """Return the process, which its caller must wait for. The socket is the caller's from now on. `exited` is as for `Child`."""
        pidfd, _, output = self.take_over()
        return Child(self.pid, pidfd, output, exited, self.exports)

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
        *(settings.sandbox, exports, str(COUNTER_FD), needs_as_text(settings.needs.get(name)), "shared" if settings.shared else ""),
    ]
    template = template_of_thread() if settings.template else None
    pid = 0 if template is None else template.order(arguments, environment, theirs)
    if not pid:
        leaves = new_template(environment) if settings.template and schedule == USUAL else None
        pid = _executed(arguments, environment, theirs, leaves, settings)
    try:
        return pid, os.pidfd_open(pid)
    except BaseException:
        # The child has not been waited for yet, so no other process can have its number.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _executed(
    arguments: list[str], environment: dict[str, str], theirs: tuple[int, int, int], leaves: Template | None, settings: Settings
) -> int:
    """Start `python -m aionn.driver ARGUMENTS`, which also leaves a template if one is given. Returns the pid.

    Raises:
        OSError: the process cannot be started.
    """
    given = list(theirs)
    if leaves is not None:
        arguments = [*arguments, LEAVES_TEMPLATE + " " * SPACES]
        given += leaves.theirs
    # Numbers above the child's numbers, so that each dup2 really duplicates and clears close-on-exec.
    high: list[int] = []
    try:
        if settings.starter is not None:
            return settings.starter.start(arguments, settings.threads, settings.environment, given)
        for fd in given:
            high.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10))
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "aionn.driver", *arguments],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                *((os.POSIX_SPAWN_DUP2, fd, place) for fd, place in zip(high, PLACES, strict=False)),
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


def needs_as_text(needs: Needs | None) -> str:
    """Return needs as JSON, or an empty text for None."""
    if needs is None:
        return ""
    import msgspec  # few apps give needs

    return msgspec.json.encode(needs).decode()


SANDBOX = "AIONN_SANDBOX"
"""The variable with the level of drivers, for an app that gives none to `Runtime(sandbox=)`."""

_LEVELS = ("auto", "require", "off")
"""What an app may ask for. "strict" is for tests, and only the environment can ask for it: a denied system call then ends the driver."""


def checked_driver_env(driver_env: object) -> dict[str, str]:
    """Return `Runtime(driver_env=)` as a dictionary, which is empty for None.

    Raises:
        CallerError: it is not a mapping from names to texts.
    """
    if driver_env is None:
        return {}
    if not isinstance(driver_env, Mapping):
        found = type(driver_env).__name__
        raise CallerError(f"driver_env: expected a mapping from names of variables to texts, or None, got {found}")
    for name, value in driver_env.items():  # no sentence shows a value, which may be a secret
        if not isinstance(name, str) or not name or set(name) & set("=\0") or not _is_encodable(name):
            raise CallerError(f"driver_env: {name!r} cannot name a variable; give a text without '=' and without a zero byte")
        if not isinstance(value, str) or "\0" in value or not _is_encodable(value):
            found = "a text that cannot be a value" if isinstance(value, str) else type(value).__name__
            raise CallerError(f"driver_env: {name!r} is {found}; give a text without a zero byte")
        if name in SET_BY_AIONN:
            raise CallerError(f"driver_env: aionn sets {name} for its drivers; leave it out")
    return dict(driver_env)


def checked_engine_needs(engine_needs: object) -> dict[str, Needs]:
    """Return `Runtime(engine_needs=)` by the names under which a runtime knows its devices. It is empty for None.

    Raises:
        CallerError: it is not a mapping from names of devices to `aionn.hal.Needs`, or a device is not installed.
    """
    if engine_needs is None:
        return {}
    from aionn.needs import Needs  # few apps give needs

    expected = "give a mapping from names of devices to aionn.hal.Needs"
    if not isinstance(engine_needs, Mapping):
        raise CallerError(f"engine_needs is {type(engine_needs).__name__}; {expected}")
    homes = Homes()
    for name, needs in engine_needs.items():
        if not isinstance(name, str) or not isinstance(needs, Needs):
            raise CallerError(f"engine_needs has {name!r}: {type(needs).__name__}; {expected}")
        if ":" not in name and not homes.home(name):
            raise CallerError(f"engine_needs names {name!r}, which is not installed; the installed devices are {', '.join(homes.engines)}")
    return {homes.key(name): needs for name, needs in engine_needs.items()}


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def checked_sandbox(sandbox: str | None) -> str:
    """Return the level for `Runtime(sandbox=)`. The environment's word counts where the app says nothing.

    Raises:
        CallerError: one of them is not a level. The text says which.
    """
    if sandbox is not None:
        if not isinstance(sandbox, str) or sandbox not in _LEVELS:
            raise CallerError(f"sandbox={sandbox!r}: expected 'auto', 'require' or 'off'")
        return sandbox
    level = os.environ.get(SANDBOX) or "auto"
    if level not in (*_LEVELS, "strict"):
        raise CallerError(f"{SANDBOX}={level!r}: expected 'auto', 'require', 'off' or 'strict'")
    return level


EARLY_S = 10.0
"""A driver that was started early is ended when no compile has asked for it for so long."""

BY_DEFAULT = True
"""Whether `Runtime(start=None)` starts the first installed device early."""


def checked_start(start: Any) -> tuple[str, ...]:
    """Return the names that `Runtime(start=)` gives. None stands for the best of the devices that are always installed.

    Raises:
        CallerError: `start` is not a sequence of names of devices, or a device is not installed.
    """
    if start is None:
        return tuple(BUILT_IN)[:1] if BY_DEFAULT else ()
    names = None if isinstance(start, str) or not isinstance(start, Sequence) else tuple(start)
    if names is None or not all(isinstance(name, str) and name and "\0" not in name for name in names):
        raise CallerError(
            f"start={start!r}: give a sequence of device names, as in ('onnxruntime',), () for none, or None for the first device"
        )
    for name in names:
        if name not in BUILT_IN and ":" not in name and name not in (installed := installed_engines()):
            raise CallerError(f"start={start!r}: {not_installed(name, sorted(installed))}")
    return tuple(dict.fromkeys(names))


def spawn_early(names: Sequence[str], settings: Settings) -> dict[str, Spawned]:
    """Start the driver processes of devices, without waiting. `Devices.start_early` takes them over, or `end_early` ends them.

    A process that cannot be started is missing in the result. `Devices.start_early` tries again, and reports the reason.
    """
    spawned: dict[str, Spawned] = {}
    for name in names:
        if settings.needs and ":" in name:
            continue  # needs are kept by the name that `Devices` makes of this one
        with suppress(DeviceUnavailableError):
            spawned[name] = Spawned(name, Homes().home(name), USUAL, settings)
    return spawned


def end_early(spawned: dict[str, Spawned]) -> None:
    """End the processes that were not taken over."""
    while spawned:
        spawned.popitem()[1].end()
