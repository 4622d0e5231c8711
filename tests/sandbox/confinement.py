"""What /proc says about the confinement of a driver process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import aionn

__all__ = ["SECRET", "assert_confined", "serving"]

FACTS = {"Seccomp": "2", "NoNewPrivs": "1"}
SECRET = "a secret of the environment"
"""A test that puts it into a variable sees that drivers do not know it."""


def facts(status: Path) -> dict[str, str]:
    """Return what the kernel says of a thread. One that has ended says nothing of its filters any more."""
    rows = {name: value.strip() for name, _, value in (line.partition(":") for line in status.read_text().splitlines())}
    if rows["State"][0] in "ZX":
        raise ProcessLookupError(f"{status} is of a thread that has ended")
    return {name: rows[name] for name in FACTS}


def assert_confined(pid: int) -> None:
    """Each thread of a driver is confined, and the driver does not know the app's secret."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            assert facts(thread / "status") == FACTS, thread
    assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def serving(runtime: aionn.Runtime) -> set[int]:
    """Return the drivers that a runtime has greeted. One that is starting is not confined yet."""
    devices = [*runtime.devices, *(device.low_priority for device in runtime.devices if device.low_priority is not None)]
    return {device.pid for device in devices if device.pid is not None and device.activity is not None}
