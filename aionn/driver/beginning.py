"""The first lines of a driver process: tie its life to its parent's, give its rights away, open its socket.

All of it happens with one thread, and before NumPy, the loop's library or an engine is imported. A thread made earlier would keep its
rights. So this module imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from aionn.caching.private_folder import device_folder, private_directory
from aionn.driver.schedule import is_schedule, schedule_of
from aionn.engines.installed import home_of
from aionn.engines.needs import facts_of
from aionn.sandbox.confining import SandboxError, confine
from aionn.sandbox.facts import FactsError
from aionn.sandbox.report import Confinement

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal, systemd, `timeout` or a container's init sends to the whole process group.

The app handles them and may still finish its work. Its drivers end with it.
"""


def bind_to_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, and leave `GROUP_SIGNALS` to the parent.

    The parent starts this process with every signal blocked, so none of them arrives before it is ignored.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed, so this driver would outlive its app; allow it in the sandbox")
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def raise_file_limit() -> None:
    """Allow as many open files as the hard limit does, because each request in flight may bring descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show. The kernel cuts it to 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(f"aionn-{name}")[:15], 0, 0, 0)


def close_inherited(keep: int) -> None:
    """Close what the app left open for its children. A server's listening socket must not stay bound because of a driver.

    Descriptors that this process has opened itself are close-on-exec, so they stay open.
    """
    for entry in os.listdir("/proc/self/fd"):
        fd = int(entry)
        try:
            if fd > 2 and fd != keep and os.get_inheritable(fd):
                os.close(fd)
        except OSError:
            continue  # the descriptor of the listing itself


@dataclass(frozen=True, slots=True)
class Begun:
    """A driver process that is ready to import its engine.

    Attributes:
        name: of the device.
        home: "package.module:Class" if the parent has looked it up, or an empty text.
        sock: the control socket.
        state_directory: where the device keeps its records.
        confinement: what the process has given away.
        refusal: why the driver may not serve, or an empty text.
    """

    name: str
    home: str
    sock: socket.socket
    state_directory: str
    confinement: Confinement
    refusal: str = ""


def begin(arguments: list[str]) -> Begun | int:
    """Prepare this process: `python -m aionn.driver NAME[=HOME] FD [SCHEDULE [STATE_DIR [SANDBOX]]]`. Returns an exit code for bad usage.

    Args:
        arguments: NAME of the device, with HOME ("package.module:Class") if the parent has looked it up. FD, the socket. SCHEDULE is a
            number of CPUs for a driver in the background, 0 for the app's own priority, or "idle" for SCHED_IDLE. `__main__` has
            taken it up. Each device keeps its records in a folder of STATE_DIR. SANDBOX is a level of
            `sandbox.report`.
    """
    if not 2 <= len(arguments) <= 5 or not arguments[1].isdigit() or not is_schedule(schedule_of(arguments)):
        usage = "python -m aionn.driver ENGINE[=MODULE:CLASS] SOCKET_FD [CPUS|idle [STATE_DIR [SANDBOX]]]"
        print(f"usage: {usage}  (started by aionn's runtime; see `aionn devices`)", file=sys.stderr)
        return 2
    name, equals, home = arguments[0].rpartition("=")  # a provider's name may have one, too
    if not equals:
        name, home = home, ""
    fd = int(arguments[1])
    bind_to_parent()
    name_process(name)
    close_inherited(fd)
    raise_file_limit()
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        print(f"aionn.driver: descriptor {fd} is not a socket ({error.strerror}); give the one of a control socket", file=sys.stderr)
        return 2
    sock.set_inheritable(False)
    state = arguments[3] if len(arguments) > 3 else os.path.expanduser("~/.local/state/aionn")
    records = device_folder(state, name)
    with suppress(OSError):  # the store of digests tries again, and says why it cannot be used
        private_directory(state)
        private_directory(records)
    level = arguments[4] if len(arguments) > 4 else "off"
    refusal, confinement = "", Confinement()
    try:
        confinement = confine(level, None if level == "off" else facts_of(*_place(name, home)), (str(records),))
    except (SandboxError, FactsError) as error:
        refusal = f"device {name!r} cannot start: {error}"
    return Begun(name, home, sock, str(records), confinement, refusal)


def _place(name: str, home: str) -> tuple[str, str]:
    """Return "package.module:Class" of a device's engine, and the name of its provider or an empty text."""
    engine, _, rest = name.partition(":")
    found = home or home_of(engine)
    if found:
        return found, rest
    attribute, _, provider = rest.partition(":")
    return f"{engine}:{attribute}", provider
