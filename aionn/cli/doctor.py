"""`aionn doctor`: look at everything that aionn needs, and say what is wrong and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aionn.cli.checks import Row, fail, warn
from aionn.cli.printing import NotDoneError, duration, print_json, print_table
from aionn.escapes import escaped

_NEEDED_BY_ENGINES = (
    "kernel",
    "memfd",
    "eventfd",
    "futex",
    "sockets",
    "parent death",
    "pidfd",
    "open files",
    "address space",
    "python",
    "memory",
)
"""Rows without which no engine is started: it would fail for the same reason, or the kernel would kill this process."""


@dataclass(frozen=True, slots=True)
class _Folders:
    state_dir: str | None
    cache_dir: str | None


def examine(state_dir: str | None, cache_dir: str | None, devices: Sequence[str] | None, *, fix: bool, as_json: bool) -> None:
    """Run all checks and print their rows. `devices` are those to try, or None for every installed engine.

    Raises:
        NotDoneError: a row failed.
    """
    began = time.monotonic()
    folders = _Folders(state_dir, cache_dir)
    fixed = _fix(folders) if fix else []
    rows = _rows(folders, devices)
    took_s = time.monotonic() - began
    failed = [row.check for row in rows if row.status == "fail"]
    if as_json:
        print_json({"ok": not failed, "took_s": round(took_s, 3), "fixed": fixed, "rows": [asdict(row) for row in rows]})
    else:
        _print_rows(rows, fixed, took_s)
    if failed:
        raise NotDoneError(f"failed: {', '.join(failed)}; the rows above name the way out of each")


def _rows(folders: _Folders, devices: Sequence[str] | None) -> list[Row]:
    """Run the checks. Those that import much come last, because little memory must be noticed before it is used."""
    from aionn.cli.checks import kernel, machine, sandbox

    clock = machine.ClockWatch()
    rows = [kernel.kernel(), machine.python(), machine.open_files(), machine.address_space()]
    rows += [machine.cpus(), machine.memory()]
    rows += [check(Path("/")) for check in kernel.CHECKS]
    rows += kernel.child_processes()
    rows += [check(Path("/")) for check in sandbox.CHECKS]
    rows += [check() for check in (machine.clock_source, machine.governor, machine.huge_pages, machine.busy)]
    rows += _of_folders(folders)
    rows += _of_processes()
    rows += _of_engines(rows, folders, devices)
    return [*rows, clock.row()]


def _of_folders(folders: _Folders) -> list[Row]:
    from aionn.cli.checks.folders import cache_directory, export_folders, state_directory

    rows = state_directory(folders.state_dir) + export_folders()
    return rows if folders.cache_dir is None else rows + cache_directory(folders.cache_dir)


def _of_processes() -> list[Row]:
    from aionn.cli.checks.frigate import frigate
    from aionn.cli.checks.processes import orphan_drivers, orphans, releases, time_namespaces
    from aionn.cli.checks.service import service

    try:
        return [orphan_drivers(orphans()), releases(), time_namespaces(), service(), frigate()]
    except OSError as error:
        return [warn("processes", f"/proc cannot be read: {error.strerror}", "/proc, to see drivers and apps", "mount /proc")]


def _of_engines(rows: Sequence[Row], folders: _Folders, devices: Sequence[str] | None) -> list[Row]:
    lacking = [row.check for row in rows if row.status == "fail" and row.check in _NEEDED_BY_ENGINES]
    if lacking:
        found = f"not started, because of {', '.join(lacking)}"
        return [warn("engines", found, "every engine tried", "mend these first, then run aionn doctor again")]
    import aionn
    from aionn.cli.checks.engines import engine_names, engines, installed_points
    from aionn.errors import AionnError

    try:
        points = installed_points()
        names = list(dict.fromkeys(devices or (point.name for point in points)))
        return [engine_names(points), *aionn.run(engines, names, folders.state_dir)]
    except AionnError as error:
        return [fail("engines", str(error), "every engine tried", "mend what it names, then run aionn doctor again")]


def _fix(folders: _Folders) -> list[str]:
    from aionn.caching.state import state_path
    from aionn.cli.checks.leavings import clean_cache, clean_exports, clean_state, end_orphans
    from aionn.cli.checks.processes import orphans

    done = end_orphans(orphans()) + clean_state(state_path(folders.state_dir)) + clean_exports()
    return done if folders.cache_dir is None else done + clean_cache(Path(folders.cache_dir))


def _print_rows(rows: Sequence[Row], fixed: Sequence[str], took_s: float) -> None:
    for line in fixed:
        print(escaped(f"fixed: {line}", one_line=True))
    print_table("", ["check", "is", "found"], [(row.check, row.status, row.found) for row in rows])
    for row in rows:
        if row.status != "ok":
            lines = (f"{row.status}: {row.check}", f"  found    {row.found}", f"  needed   {row.needed}", f"  way out  {row.way_out}")
            print("", *(escaped(line, one_line=True) for line in lines), sep="\n")
    worse = {status: sum(row.status == status for row in rows) for status in ("warn", "fail")}
    verdict = "all is well" if not any(worse.values()) else f"{worse['warn']} to look at, {worse['fail']} failed"
    print(f"\n{len(rows)} checks in {duration(took_s)}: {verdict}")
