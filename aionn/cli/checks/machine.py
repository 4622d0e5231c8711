"""What makes answers late on this machine: its clocks, its frequency governor, its pages, other work."""

from __future__ import annotations

import re
import time
from pathlib import Path

from aionn.cgroups import text_of
from aionn.cli.checks.row import ROOT, Row, ok, warn

_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")
_BUSY_PERCENT = 50.0
_STEP_S = 0.1
_FIRST_S = 1_767_225_600
"""2026-01-01. aionn did not exist before."""


def clock_source(root: Path = ROOT) -> Row:
    """Check that the kernel reads a fast clock. Each frame reads it several times."""
    folder = root / "sys/devices/system/clocksource/clocksource0"
    current = text_of(folder / "current_clocksource").strip()
    if not current:
        return ok("clock source", "not shown here")
    if current not in _SLOW_CLOCKS:
        return ok("clock source", current)
    known = text_of(folder / "available_clocksource").split()
    fast = [name for name in known if name not in _SLOW_CLOCKS]
    way_out = f"echo {fast[0]} > /{folder.relative_to(root)}/current_clocksource" if fast else "dmesg says why the tsc is not used"
    return warn("clock source", f"{current}, which takes about a microsecond to read", "tsc or another fast clock", way_out)


def governor(root: Path = ROOT) -> Row:
    """Check that CPUs speed up at once under load. Drivers that set their own pace (intel_pstate) do so under any governor."""
    found = set()
    for folder in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq")):
        name = text_of(folder / "scaling_governor").strip()
        if name and not re.match(r"intel_pstate|amd[-_]pstate_epp|amd-pstate-epp", text_of(folder / "scaling_driver").strip()):
            found.add(name)
    if not found & {"powersave", "conservative"}:
        return ok("cpu governor", ", ".join(sorted(found)) or "none; the CPU or its host sets the pace")
    return warn(
        "cpu governor",
        f"{', '.join(sorted(found))}: CPUs stay slow in short runs",
        "schedutil, ondemand or performance",
        "cpupower frequency-set -g schedutil",
    )


def huge_pages(root: Path = ROOT) -> Row:
    """Check that large weights may lie in huge pages, which halves the time to lay them out."""
    modes = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", modes)
    if chosen is None:
        return ok("huge pages", "not shown here")
    if chosen[1] != "never":
        return ok("huge pages", chosen[1])
    return warn("huge pages", "never", "madvise or always", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")


def busy(root: Path = ROOT) -> Row:
    """Check how much of the last ten seconds some process waited for a CPU (pressure stall information)."""
    found = re.search(r"some avg10=([\d.]+)", text_of(root / "proc/pressure/cpu"))
    if found is None:
        return ok("cpu pressure", "not shown here")
    waited = f"processes waited for a CPU {float(found[1]):.0f} % of the last 10 s"
    if float(found[1]) <= _BUSY_PERCENT:
        return ok("cpu pressure", waited)
    return warn("cpu pressure", f"this machine is busy: {waited}", f"at most {_BUSY_PERCENT:.0f} %", "stop other work before you measure")


class ClockWatch:
    """Compares the wall clock with the monotonic one over the time of the other checks. Times within aionn are monotonic."""

    def __init__(self) -> None:
        self._began = self._ahead_s()

    @staticmethod
    def _ahead_s() -> float:
        return time.time() - time.monotonic()

    def row(self) -> Row:
        """Return whether the wall clock was set since this was made, or is plainly wrong."""
        if time.time() < _FIRST_S:
            now = time.strftime("%Y-%m-%d", time.gmtime(time.time()))
            return warn(
                "wall clock", f"it says {now}", "today", "set it, or start an NTP service; until then ages of cache entries are wrong"
            )
        step_s = self._ahead_s() - self._began
        if abs(step_s) <= _STEP_S:
            return ok("wall clock", "it did not jump while the doctor looked")
        return warn(
            "wall clock",
            f"it jumped by {step_s:+.1f} s while the doctor looked",
            "a clock that is slewed",
            "let one NTP service alone set it; frames that are dated by the wall clock have wrong ages",
        )
