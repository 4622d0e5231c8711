"""Confine this process: all mechanisms in their order, each tried, with a report of what holds."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

from aionn.sandbox import landlock
from aionn.sandbox.facts import Facts
from aionn.sandbox.filter import MACHINES, install, program
from aionn.sandbox.limits import no_core_files, no_made_code, no_new_privileges
from aionn.sandbox.paths import rules
from aionn.sandbox.report import Confinement

__all__ = ["SandboxError", "confine", "usual"]

_LEAST_ABI = 3
"""The first version of Landlock without a gap that matters: before it a driver may cut files that it may not write."""


class SandboxError(Exception):
    """The process cannot be confined as it was asked to be. The text says why."""


def confine(level: str, facts: Facts | None, writable: tuple[str, ...] = ()) -> Confinement:
    """Give away what a driver does not need. Call it with one thread, before anything else is imported.

    Args:
        level: "auto", "require" or "strict"; with "off" nothing happens.
        facts: what the engine needs, or None if its class declares nothing. Then only mechanisms that no engine notices are used.
        writable: folders in which the driver may make, write and remove files.

    Raises:
        SandboxError: there is a second thread, which would keep its rights; or level "require" or "strict" cannot be had.
    """
    if level == "off":
        return Confinement("off")
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SandboxError(
            f"it has {threads} threads before it is confined, and each would keep its rights; remove what starts a thread when Python "
            "starts (sitecustomize, .pth files), or choose sandbox='off'"
        )
    report = _Report()
    report.attempt(("limits",), no_core_files)
    report.attempt(("no new privileges",), no_new_privileges)
    report.holds.append("environment")
    if facts is None:
        report.lacks.append("files, network, processes and made code are free, because the engine's class declares none of its needs")
    else:
        abi = _landlocked(report, facts, writable)
        if facts.makes_code:
            report.lacks.append("the engine makes code at run time, so memory may be writable and executable")
        else:
            report.attempt(("no made code",), no_made_code)
        _filtered(report, facts, strict=level == "strict")
        if facts.devices:
            report.lacks.append(f"the driver may use the device files {', '.join(facts.devices)}")
        if level == "require" and abi < _LEAST_ABI and "files" in report.holds:
            report.unmet.append(f"the kernel's Landlock has version {abi}, and {_LEAST_ABI} is needed")
    if level in ("require", "strict"):
        _check(report, facts, level)
    return Confinement(level, tuple(report.holds), tuple(report.lacks))


def usual(error: OSError) -> str:
    """Return what an error of the kernel means for a mechanism that was tried."""
    return f"{error.strerror or error}"


class _Report:
    """What was tried so far.

    Attributes:
        holds, lacks: as in `Confinement`.
        unmet: why level "require" is not met, beside what `lacks` says of mechanisms that were refused.
    """

    def __init__(self) -> None:
        self.holds: list[str] = []
        self.lacks: list[str] = []
        self.unmet: list[str] = []

    def attempt(self, words: tuple[str, ...], act: Callable[[], None]) -> bool:
        """Return whether `act` worked, and note it."""
        try:
            act()
        except OSError as error:
            self.lacks.append(f"{', '.join(words)}: the kernel refuses it ({usual(error)})")
            return False
        self.holds.extend(words)
        return True


def _landlocked(report: _Report, facts: Facts, writable: tuple[str, ...]) -> int:
    """Restrict files, and with a later kernel signals. Returns the version of Landlock, or 0."""
    try:
        abi = landlock.best_abi()
    except OSError as error:
        report.lacks.append(f"files: the kernel has no Landlock, or it is switched off ({usual(error)})")
        return 0
    report.attempt(("files",), lambda: landlock.restrict(rules(facts, writable), abi))
    return abi


def _filtered(report: _Report, facts: Facts, *, strict: bool) -> None:
    machine = platform.machine()
    if machine not in MACHINES:
        report.lacks.append(f"system calls, network, processes, signals: there is no table of calls for {machine}")
        return
    code = program(machine, strict=strict, any_ioctl=bool(facts.devices))
    report.attempt(("system calls", "network", "processes", "signals"), lambda: install(code, machine))


def _check(report: _Report, facts: Facts | None, level: str) -> None:
    """Refuse to go on where the level is not met."""
    if facts is None:
        if level == "strict":
            return  # engines that tests define say nothing about themselves
        raise SandboxError(f"sandbox='require' cannot be had: {report.lacks[-1]}")
    if facts.devices and level == "require":
        report.unmet.append(report.lacks[-1])
    missing = [*report.unmet, *(lack for lack in report.lacks if lack.startswith(("files:", "system calls")))]
    if missing:
        raise SandboxError(f"sandbox={level!r} cannot be had: {'; '.join(missing)}")
