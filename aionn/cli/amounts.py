"""Amounts that people type: bytes and times, with a unit."""

from __future__ import annotations

import re

from aionn.cli.printing import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}


def bytes_of(text: str, option: str) -> int:
    """Return the number of bytes that a text names, with or without a unit (powers of 1000). `option` is named in an error."""
    parts = re.fullmatch(r"(\d+)\s*([kKMGT]?)B?", text.strip())
    if parts is None:
        raise UsageError(f"{option} {text!r} is not a number of bytes; give one as 500000000, 500M or 2G")
    power: int = " kMGT".index(parts[2].replace("K", "k") or " ")
    return int(parts[1]) * int(1000**power)


def seconds_of(text: str, option: str) -> float:
    """Return the seconds that a text names, as "90s", "15m", "12h" or "30d". `option` is named in an error."""
    parts = re.fullmatch(r"(\d+)\s*([smhd]?)", text.strip())
    if parts is None:
        raise UsageError(f"{option} {text!r} is not a time; give one as 90s, 15m, 12h or 30d")
    return float(int(parts[1]) * _SECONDS[parts[2]])
