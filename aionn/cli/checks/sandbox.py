"""What this kernel has to confine drivers with, and what confines each driver that was tried."""

from __future__ import annotations

import ctypes
import errno
import platform
from pathlib import Path

from aionn.cgroups import text_of
from aionn.cli.checks import ROOT, Row, ok, warn
from aionn.needs import Confinement
from aionn.runtime.processes.spawning import SANDBOX
from aionn.sandbox import landlock
from aionn.sandbox.confining import LEAST_ABI
from aionn.sandbox.filter import MACHINES, check_available

_PR_GET_MDWE = 66  # linux/prctl.h, Linux 6.3

_USUAL = ("limits", "no new privileges", "environment")
"""What holds for every driver is not shown beside more. `aionn devices` shows it."""

_INSTEAD = "the filter of system calls does most of it instead"

_FREE = "so model files could reach what the app's user can reach"


def files(root: Path = ROOT) -> Row:
    """Check that the kernel has Landlock, and in which version."""
    check, needed = "landlock", "Landlock of version 3 or later, which restricts the files of a driver"
    try:
        abi = landlock.best_abi()
    except OSError as error:
        return warn(check, f"it cannot be used: {_words(error)}, {_FREE}", needed, _landlock_way_out(error.errno, root))
    if abi < LEAST_ABI:
        found = f"version {abi}: a driver may empty files that it may not write"
        return warn(check, found, needed, "run Linux 6.2 or later")
    return ok(check, f"version {abi}")


def _landlock_way_out(number: int | None, root: Path) -> str:
    if number == errno.EOPNOTSUPP:
        return "add landlock to the list of lsm= on the kernel's command line; /sys/kernel/security/lsm shows the list"
    if _is_filtered(root):
        calls = "landlock_create_ruleset, landlock_add_rule and landlock_restrict_self"
        return f"a seccomp filter is active in this process, so allow {calls} in the profile of the container"
    return "run Linux 6.2 or later, built with CONFIG_SECURITY_LANDLOCK"


def system_calls(root: Path = ROOT) -> Row:
    """Check that the kernel has filters of system calls. The look attaches no filter."""
    check, needed = "seccomp", "seccomp filters, which keep a driver from the network and from other processes"
    machine = platform.machine()
    if machine not in MACHINES:
        return warn(check, f"aionn has no table of system calls for {machine}, {_FREE}", needed, f"run on {' or '.join(MACHINES)}")
    try:
        check_available(machine)
    except OSError as error:
        way_out = "run a kernel that was built with CONFIG_SECCOMP_FILTER"
        if _is_filtered(root):
            way_out = "a seccomp filter is active in this process, so allow the call seccomp in the profile of the container"
        return warn(check, f"filters cannot be used: {_words(error)}, {_FREE}", needed, way_out)
    outer = ", beside the filter of an outer sandbox" if _is_filtered(root) else ""
    return ok(check, f"the kernel has filters{outer}")


def made_code(root: Path = ROOT) -> Row:
    """Look whether the kernel itself can keep memory from being writable and executable (MDWE)."""
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_GET_MDWE, zero, zero, zero, zero) >= 0:
        return ok("made code", "the kernel can keep memory from being writable and executable")
    why = "an outer sandbox may forbid prctl(PR_SET_MDWE)" if _is_filtered(root) else "Linux 6.3 has it"
    return ok("made code", f"the kernel cannot keep memory from being writable and executable ({why}); {_INSTEAD}")


def confined(device: str, confinement: Confinement | None) -> list[Row]:
    """Return the row of a device whose driver ran.

    Args:
        confinement: what its driver has reported.
    """
    check, needed = f"sandbox {device}", "a driver that reaches neither files nor network nor processes of its user"
    if confinement is None:
        return []
    if confinement.level == "off":
        return [warn(check, f"off, {_FREE}", needed, f"unset {SANDBOX}; apps choose by Runtime(sandbox=)")]
    shown = [word for word in confinement.holds if word not in _USUAL] or confinement.holds
    found = "; ".join((f"confined: {', '.join(shown) or 'nothing'}", *confinement.lacks))
    if {"files", "system calls"} <= set(confinement.holds):
        return [ok(check, found)]
    return [warn(check, found, needed, "see the rows landlock and seccomp")]


def _is_filtered(root: Path) -> bool:
    """Return whether this process already has a seccomp filter, as in a container."""
    return "Seccomp:\t2" in text_of(root / "proc/self/status")


def _words(error: OSError) -> str:
    return error.strerror or str(error)


CHECKS = (files, system_calls, made_code)
