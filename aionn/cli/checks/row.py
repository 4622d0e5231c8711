"""One row of `aionn doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail"]

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Row:
    """What one check found.

    Attributes:
        check: its name, which stays the same between releases.
        status: "ok", "warn" (it works, but badly or not for long) or "fail" (something of aionn does not work).
        found: as it is now.
        needed: as it should be. An empty text where the row is ok.
        way_out: what to do. An empty text where the row is ok.
    """

    check: str
    status: Status
    found: str
    needed: str = ""
    way_out: str = ""


def ok(check: str, found: str) -> Row:
    """Return a row without a complaint."""
    return Row(check, "ok", found)


def warn(check: str, found: str, needed: str, way_out: str) -> Row:
    """Return a row for what works, but badly or not for long."""
    return Row(check, "warn", found, needed, way_out)


def fail(check: str, found: str, needed: str, way_out: str) -> Row:
    """Return a row for what does not work."""
    return Row(check, "fail", found, needed, way_out)
