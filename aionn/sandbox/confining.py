"""Confine this process: all mechanisms in their order, each tried, with a report of what holds.

prctl and setrlimit take away new privileges, core files, and memory that is writable and executable. RLIMIT_NPROC
is not used, because it counts all threads of the user. RLIMIT_FSIZE is not used, because it counts for memory files, too.
RLIMIT_AS is not used, because each thread's arena reserves 128 MiB.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
from collections.abc import Callable

from aionn.needs import Confinement, Needs
from aionn.sandbox import landlock
from aionn.sandbox.filter import MACHINES, install, program
from aionn.sandbox.paths import rules, too_wide

LEAST_ABI = 3
"""What level "require" asks for. Older versions of Landlock do not see that a file is cut, which only the filter denies then."""

_CLONE_THREAD = 0x10000
_SCOPED_ABI = 6
"""From this version on, Landlock denies signals to other processes."""

_BY_FILTER = ("system calls", "network", "processes", "signals")


class SandboxError(Exception):
    """The process cannot be confined as it was asked to be. The text says why."""


def confine(level: str, needs: Needs | None, writable: tuple[str, ...] = (), *, serves: bool = False) -> Confinement:
    """Give away what a driver does not need. Call it with one thread, before a model is seen.

    Args:
        level: "auto", "require" or "strict"; with "off" nothing happens.
        needs: of the engine, or None for an engine that a test steers by files. Then only mechanisms that no engine notices are used.
        writable: folders in which the driver may make, write and remove files.
        serves: whether this is a service of apps, in place of a driver. It accepts connections, and sends signals to drivers.

    Raises:
        SandboxError: there is a second thread, which would keep its rights; or level "require" or "strict" cannot be had.
    """
    if level == "off":
        return Confinement("off")
    _check_threads()
    report = _Report()
    report.attempt(("limits",), no_core_files, "a limit of core files", "a crash may write a core file")
    report.attempt(("no new privileges",), no_new_privileges, "prctl(PR_SET_NO_NEW_PRIVS)", "setuid programs keep their privileges")
    if serves:  # with those of root it would read the environment of any process
        report.attempt(("no capabilities",), no_capabilities, "capset", "capabilities are kept", needed=True)
    else:
        report.holds.append("environment")
    if needs is None:
        free = "files, network, processes and made code are free"
        report.lack(f"{free}, because a test steers the engine as its fake device", unmet=level != "strict")
    else:
        wide = too_wide(needs)
        abi = _landlocked(report, needs, writable, serves)
        by_kernel = not needs.makes_code and report.attempt(("no made code",), no_made_code, "prctl(PR_SET_MDWE)", "")
        _filtered(report, needs, strict=level == "strict", no_made_code=not needs.makes_code and not by_kernel, serves=serves)
        if serves:
            report.lack("signals to the user's processes are free, because a service ends drivers")
        elif abi >= _SCOPED_ABI and "files" in report.holds and "signals" not in report.holds:
            report.holds.append("signals")
        _note_exceptions(report, needs, wide if "files" in report.holds else {}, level, "service" if serves else "driver")
    if level in ("require", "strict") and report.unmet:
        raise SandboxError(f"sandbox={level!r} cannot be had: {'; '.join(report.unmet)}")
    return Confinement(level, tuple(report.holds), tuple(report.lacks))


def threads_here() -> str:
    """Return how many threads this process has: their number, or without /proc "1" or "several".

    Raises:
        SandboxError: they cannot be counted.
    """
    try:
        return str(len(os.listdir("/proc/self/task")))
    except OSError as error:
        return _threads_by_kernel(error)


def _check_threads() -> None:
    """Refuse to go on with more than one thread."""
    threads = threads_here()
    if threads != "1":
        raise SandboxError(
            f"it has {threads} threads before it is confined, and each would keep its rights; remove what starts a thread when Python "
            "starts (sitecustomize, .pth files), or choose sandbox='off'"
        )


def _threads_by_kernel(unread: OSError) -> str:
    """Return "1" or "several", without /proc. The kernel refuses a process of several threads to leave its thread group.

    Raises:
        SandboxError: a filter of system calls forbids the question.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_THREAD) == 0:
        return "1"
    if ctypes.get_errno() == errno.EINVAL:
        return "several"
    raise SandboxError(f"its threads cannot be counted before it is confined ({unread}); mount /proc, or choose sandbox='off'") from unread


class _Report:
    """What was tried so far.

    Attributes:
        holds, lacks: as in `Confinement`.
        unmet: those of `lacks` that keep level "require" from being met.
    """

    def __init__(self) -> None:
        self.holds: list[str] = []
        self.lacks: list[str] = []
        self.unmet: list[str] = []

    def lack(self, sentence: str, unmet: bool = False) -> None:
        """Note what does not hold, and whether level "require" needs it."""
        self.lacks.append(sentence)
        if unmet:
            self.unmet.append(sentence)

    def attempt(self, words: tuple[str, ...], act: Callable[[], None], what: str, lack: str, needed: bool = False) -> bool:
        """Return whether `act` worked, and note it.

        Args:
            words: what holds then.
            act: tries a mechanism.
            what: the name of the mechanism.
            lack: what does not hold otherwise. If empty, the caller notes it.
            needed: whether level "require" needs it.
        """
        try:
            act()
        except OSError as error:
            if lack:
                self.lack(f"{lack}, because the kernel or an outer sandbox refuses {what} ({error.strerror})", needed)
            return False
        self.holds.extend(words)
        return True


def _landlocked(report: _Report, needs: Needs, writable: tuple[str, ...], serves: bool) -> int:
    """Restrict files, and with a later kernel signals. Returns the version of Landlock, or 0."""
    free = "files are free, and so is the memory of the user's other processes"
    try:
        abi = landlock.best_abi()
    except OSError as error:
        why = {
            errno.ENOSYS: "this kernel has no Landlock (it comes with Linux 5.13)",
            errno.EOPNOTSUPP: "Landlock is switched off on this machine (add landlock to `lsm=` on the kernel's command line)",
        }.get(error.errno or 0, f"an outer sandbox denies Landlock ({error.strerror})")
        report.lack(f"{free}, because {why}", unmet=True)
        return 0
    found = rules(needs, writable)
    restricted = report.attempt(("files",), lambda: landlock.restrict(found, abi, signals=serves), "rules of Landlock", free, needed=True)
    if restricted and abi < LEAST_ABI:
        report.lack(
            f"only the filter of system calls protects files from being cut, because this kernel's Landlock has version {abi}", True
        )
    return abi


def _filtered(report: _Report, needs: Needs, *, strict: bool, no_made_code: bool, serves: bool) -> None:
    """Restrict system calls. The filter also keeps memory from being made executable where the kernel has no rule for that."""
    machine = os.uname().machine
    free = "system calls, network and processes are free"
    if machine not in MACHINES:
        report.lack(f"{free}, because aionn has no table of system calls for {machine}", unmet=True)
    else:
        if strict:
            from aionn.sandbox.strict import name_denied_calls  # tests only

            name_denied_calls(MACHINES[machine][0])
        code = program(machine, strict=strict, any_ioctl=bool(needs.devices), no_made_code=no_made_code, serves=serves)
        words = (*_BY_FILTER[: 3 if serves else 4], *(("no made code",) if no_made_code else ()))
        if report.attempt(words, lambda: install(code, machine), "a filter of system calls", free, needed=True):
            return
    if no_made_code:
        report.lack(
            "memory may be writable and executable, because neither the kernel (since Linux 6.3) nor a filter of system calls denies it"
        )


def _note_exceptions(report: _Report, needs: Needs, wide: dict[str, str], level: str, who: str) -> None:
    """Note what the engine may do beyond the usual."""
    if needs.makes_code:
        report.lack("memory may be writable and executable, because the engine makes code at run time")
    if needs.devices:
        report.lack(f"the {who} may use the device files {', '.join(needs.devices)}, because its engine needs them", level == "require")
    for path, why in wide.items():
        report.lack(f"the {who} may read all of {path}, because {why}", level == "require")


# linux/prctl.h
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_MDWE, _MDWE_REFUSE_EXEC_GAIN = 65, 1
# linux/capability.h
_CAPABILITIES_VERSION = 0x2008_0522
# linux/personality.h
_QUERY, _READ_IMPLIES_EXEC = 0xFFFF_FFFF, 0x040_0000


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def no_new_privileges() -> None:
    """Setuid programs give nothing any more. Landlock and seccomp need this.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def no_capabilities() -> None:
    """Give away all capabilities, which only root's processes have.

    Raises:
        OSError: the kernel refuses.
    """
    head = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    if ctypes.CDLL(None, use_errno=True).capset(head, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def no_core_files() -> None:
    """A crash writes no core file, which would hold the app's frames. Programs that collect cores, such as systemd's, respect the limit.

    Raises:
        OSError: the kernel refuses.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def no_made_code() -> None:
    """No mapping is writable and executable, and none that was writable becomes executable (Linux 6.3).

    A file in memory can still be written first and mapped as code then.

    Raises:
        OSError: the kernel has no such rule.
    """
    # A process that was started by `setarch -X` gets no readable memory under this rule.
    libc = ctypes.CDLL(None)
    if libc.personality(ctypes.c_ulong(_QUERY)) & _READ_IMPLIES_EXEC:
        libc.personality(ctypes.c_ulong(libc.personality(ctypes.c_ulong(_QUERY)) & ~_READ_IMPLIES_EXEC))
    _prctl(_PR_SET_MDWE, _MDWE_REFUSE_EXEC_GAIN)
