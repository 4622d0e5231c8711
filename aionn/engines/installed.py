"""Which engines are installed: the entry points of the group `aionn.engines`. Nothing is imported by looking."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "aionn.engines"


def installed_engines() -> dict[str, EntryPoint]:
    """Every installed engine's entry point by name; the first of a name wins."""
    from importlib.metadata import entry_points  # 10 ms; a driver that was told where its engine is never looks

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, point)
    return found
