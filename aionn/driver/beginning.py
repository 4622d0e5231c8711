"""The first lines of a driver process: tie its life to its parent's, give its rights away, open its socket.

All of it happens with one thread, because a thread made earlier would keep its rights. A driver that neither leaves a template nor comes
from one has not imported NumPy, the loop's library or an engine yet. So this module imports nothing heavy. The thread that watches the
output is made last.

A driver process gets CPU time like its app, in the background, or only when a CPU is idle. `__main__` sets that while the process has one
thread. NumPy makes threads when it is imported. A thread keeps the schedule that the process had when the thread was made.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import socket
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from aionn.caching.private_folder import RecordsFolder, user_state_directory
from aionn.engines.installed import Homes
from aionn.engines.needs import is_test_double, needs_of
from aionn.errors import CallerError
from aionn.memory.limits import raise_file_limit
from aionn.needs import Confinement, Needs
from aionn.sandbox.confining import SandboxError, confine

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal, systemd, `timeout` or a container's init sends to the whole process group.

The app handles them and may still finish its work. Its drivers end with it.
"""

_MOST_FILES = 1 << 16
"""So many descriptors are looked at without /proc. A limit may allow a thousand million."""

PATIENCE_S = 5.0
"""How long a thread may wait that prints while the app does not read. Then the oldest output is dropped, and the app says how much.
It is less than the usual `hang_s`, after which a driver whose loop waits is killed."""


def bind_to_parent(*, outlives: bool = False) -> None:
    """Ask the kernel to kill this process when its parent ends, unless it `outlives` it. Leave `GROUP_SIGNALS` to the parent.

    The parent starts this process with every signal blocked, so none of them arrives before it is ignored.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not outlives and libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed, so this driver would outlive its app; allow it in the sandbox")
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show. The kernel cuts it to 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(f"aionn-{name}")[:15], 0, 0, 0)


def close_inherited(keep: tuple[int, ...]) -> None:
    """Close what the app left open for its children. A server's listening socket must not stay bound because of a driver.

    Descriptors that this process has opened itself are close-on-exec, so they stay open.
    """
    try:
        found: Iterable[int] = [int(entry) for entry in os.listdir("/proc/self/fd")]
    except OSError:  # no /proc: whatever may be open by its number
        found = range(3, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_FILES))
    for fd in found:
        try:
            if fd > 2 and fd not in keep and os.get_inheritable(fd):
                os.close(fd)
        except OSError:
            continue  # the descriptor of the listing itself, or a number that is not in use


def keep_bytecode() -> None:
    """Write the bytecode of aionn's modules once if it is missing, as after an editable install. A confined driver can write none.

    Otherwise each start of a driver would compile its modules anew, which takes a third of the start.
    """
    here = os.path.dirname(__file__)
    if sys.dont_write_bytecode or not os.access(sys.pycache_prefix or here, os.W_OK):
        return
    from importlib.util import cache_from_source

    if not os.path.exists(cache_from_source(os.path.join(here, "../caching/integrity.py"))):
        import compileall

        compileall.compile_dir(os.path.dirname(here), quiet=2)


def own_pipe() -> tuple[int, int] | None:
    """Open both ends of the pipe that is this process's stderr, by descriptions that do not wait.

    Call it before the process is confined, because a confined process may not open descriptors again. Returns None without /proc, and
    where stderr is not a pipe.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(2).st_mode):
            return None
        reading = os.open("/proc/self/fd/2", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return reading, os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        os.close(reading)
        return None


def watch_pipe(ends: tuple[int, int], counter: int) -> None:
    """Drop output that the app does not read, from now on. Call it after the process is confined, because it starts a thread.

    Args:
        ends: of `own_pipe`.
        counter: an eventfd of the app, which gets the number of the bytes that are dropped.
    """
    from aionn.driver._valve import open_valve

    open_valve(*ends, counter, int(PATIENCE_S * 1000))


class Begun(NamedTuple):
    """A driver process that is ready to import its engine.

    Attributes:
        name: of the device.
        home: "package.module:Class" if the parent has looked it up, or an empty text.
        sock: the control socket.
        records: where the device keeps its records.
        held: descriptors that hold folders for temporary files while this process lives.
        confinement: what the process has given away.
        refusal: why the driver may not serve, or an empty text.
        shared: whether it serves other apps beside its parent, and outlives its parent while they stream.
    """

    name: str
    home: str
    sock: socket.socket
    records: RecordsFolder
    held: tuple[int, ...]
    confinement: Confinement
    refusal: str = ""
    shared: bool = False


def begin(arguments: list[str]) -> Begun | int:
    """Prepare this process: `python -m aionn.driver NAME[=HOME] FD [SCHEDULE [STATE_DIR [SANDBOX [EXPORTS [COUNTER [NEEDS [SHARED]]]]]]]`.

    Returns an exit code for bad usage.

    Args:
        arguments: NAME of the device, with HOME ("package.module:Class") if the parent has looked it up. FD, the socket. SCHEDULE is a
            number of CPUs for a driver in the background, 0 for the app's own priority, or "idle" for SCHED_IDLE. `__main__` has
            taken it up. Each device keeps its records in a folder of STATE_DIR. SANDBOX is the level. EXPORTS is the
            path of a folder for an engine that writes temporary files by path; see `caching.private_folder`. COUNTER is the
            descriptor of an eventfd. An app that reads this process's output gives it (`runtime.processes.child`). NEEDS is JSON
            with the fields of `aionn.needs.Needs`, in place of those that the engine's package states. SHARED is not empty for a
            driver that serves other apps, too.
    """
    numbers = [arguments[place] for place in (1, 6) if place < len(arguments)]
    if not 2 <= len(arguments) <= 9 or not all(number.isdigit() for number in numbers) or not is_schedule(schedule_of(arguments)):
        usage = (
            "python -m aionn.driver ENGINE[=MODULE:CLASS] SOCKET_FD [CPUS|idle [STATE_DIR [SANDBOX [EXPORTS [COUNTER [NEEDS [SHARED]]]]]]]"
        )
        print(f"usage: {usage}  (started by aionn's runtime; see `aionn devices`)", file=sys.stderr)
        return 2
    name, equals, home = arguments[0].rpartition("=")  # a provider's name may have one, too
    if not equals:
        name, home = home, ""
    fd, *counters = map(int, numbers)
    shared = bool(arguments[8:] and arguments[8])
    bind_to_parent(outlives=shared)
    name_process(name)
    close_inherited((fd, *counters))
    raise_file_limit()
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        print(f"aionn.driver: descriptor {fd} is not a socket ({error.strerror}); give the one of a control socket", file=sys.stderr)
        return 2
    sock.set_inheritable(False)
    for counter in counters:
        os.set_inheritable(counter, False)
    state = arguments[3] if len(arguments) > 3 else user_state_directory()
    level, exports = (*arguments[4:6], *("off", "")[len(arguments[4:6]) :])
    records = RecordsFolder(state, name)
    refusal, confinement, held, writable, pipe = "", Confinement(), list[int](), list[str](), own_pipe() if counters else None
    try:
        if level != "off":
            keep_bytecode()
        needs = None if level == "off" else _needs(*_place(name, home), *arguments[7:8])
        if needs is not None:  # else the records' folder is made at its first use
            with suppress(OSError):  # the store of digests says why it cannot be used
                writable.append(records.made())
            if needs.writes_by_path and exports:
                from aionn.caching.private_folder import make_folder  # few engines need it

                with suppress(OSError):  # the engine's export fails, and says that it has no temporary directory
                    held.append(make_folder(exports))
                    writable.append(exports)
                    os.environ["TMPDIR"] = exports
        confinement = confine(level, needs, tuple(writable))
    except (SandboxError, CallerError) as error:
        refusal = f"device {name!r} cannot start: {error}"
    if pipe is not None:
        watch_pipe(pipe, *counters)
    return Begun(name, home, sock, records, tuple(held), confinement, refusal, shared)


def _place(name: str, home: str) -> tuple[str, str]:
    """Return "package.module:Class" of a device's engine, and the name of its provider or an empty text."""
    engine, _, rest = name.partition(":")
    found = home or Homes().home(engine)
    if found:
        return found, rest
    attribute, _, provider = rest.partition(":")
    return f"{engine}:{attribute}", provider


def _needs(place: str, provider: str, given: str = "") -> Needs | None:
    """Return what the sandbox must allow, or None for the fake device of a test.

    Raises:
        CallerError: the file in the engine's package states no needs.
    """
    if given:
        import msgspec  # few apps give needs

        return Needs(**msgspec.json.decode(given))
    return None if is_test_double(place) else needs_of(place, provider)


WHEN_IDLE = "idle"

_NICEST = 19
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3
_IOPRIO_CLASS_SHIFT = 13
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The kernel's number of ioprio_set by architecture, because glibc has no such function. Elsewhere the niceness alone decides."""


def schedule_of(arguments: Sequence[str]) -> str:
    """Return the argument SCHEDULE of a driver's command line, as `process.main` describes it."""
    return arguments[2] if len(arguments) > 2 else "0"


def is_schedule(word: str) -> bool:
    """Return whether that word is a SCHEDULE."""
    return word.isdigit() or word == WHEN_IDLE


def take_up(schedule: str) -> None:
    """Schedule this process so from now on. Threads made later inherit that. Ignores a word that is not a schedule."""
    if schedule == WHEN_IDLE:
        _run_when_idle()
    elif schedule.isdigit() and int(schedule):
        _stay_in_background(int(schedule))


def _run_when_idle() -> None:
    """Use only CPU time that no other process wants, on all CPUs.

    Under SCHED_IDLE, a process that wakes up never waits for this one. With the highest niceness it does.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _stay_in_background(cpus: int) -> None:
    """Use only little CPU and idle disk time, on `cpus` CPUs at most. Even beside a busy CPU the work comes to an end."""
    os.nice(_NICEST)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Take the last CPUs, because many programs take the first. An engine that counts its CPUs then counts these.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cpus:])
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE << _IOPRIO_CLASS_SHIFT)
