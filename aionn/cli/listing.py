"""`aionn devices`: every installed engine, started once to see what it is and whether it works here."""

from __future__ import annotations

from typing import Any

import aionn
from aionn.cli.printing import print_json, print_table
from aionn.errors import AionnError

__all__ = ["list_devices"]


def list_devices(as_json: bool) -> None:
    """Print all devices, best first, with those that cannot start."""
    found = aionn.run(_devices)
    if as_json:
        print_json(found)
        return
    print_table(
        "",
        ["device", "type", "providers", "version", "cache files", "state"],
        [
            (
                one["name"],
                one["type"] or "",
                ", ".join(one["providers"] or ()),
                one["version"] or "",
                "" if one["cache_files"] is None else f"{one['cache_files']['model']} model, {one['cache_files']['data']} data",
                "available" if one["available"] else one["error"],
            )
            for one in found
        ],
    )


async def _devices() -> list[dict[str, Any]]:
    found = []
    async with aionn.Runtime(start=()) as runtime:
        for device in runtime.devices:
            error = ""
            try:
                await device.restart()  # none runs yet, so this only starts it
            except AionnError as unavailable:
                error = str(unavailable)
            files = device.cache_files
            found.append(
                {
                    "name": device.name,
                    "type": device.type.name.lower() if device.type is not None else None,
                    "providers": None if device.providers is None else list(device.providers),
                    "runs_on": device.runs_on,
                    "version": device.version,
                    "cache_files": None if files is None else {"model": files.model, "data": files.data},
                    "available": not error,
                    "error": error or None,
                }
            )
    return found
