"""`aionn devices`: every installed engine, started once to see what it is, whether it works here, and what confines its driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

import aionn
from aionn.cli.printing import print_json, print_table
from aionn.errors import AionnError


def list_devices(as_json: bool) -> None:
    """Print all devices, best first, with those that cannot start."""
    found = aionn.run(_devices)
    if as_json:
        print_json(found)
        return
    _print_devices(found)
    _print_confinement([one for one in found if one["sandbox"] is not None])


def _print_devices(found: Sequence[dict[str, Any]]) -> None:
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


def _print_confinement(found: Sequence[dict[str, Any]]) -> None:
    """Print what holds for each driver, with a line for each thing that does not hold."""
    if not found:
        return
    print()
    rows = []
    for one in found:
        sandbox = one["sandbox"]
        holds = ", ".join(sandbox["holds"]) or "nothing"
        lacks = list(sandbox["lacks"]) or ["" if sandbox["level"] != "off" else "all of it, because the sandbox is off"]
        rows += [(one["name"], sandbox["level"], holds, lacks[0]), *(("", "", "", lack) for lack in lacks[1:])]
    print_table("", ["device", "sandbox", "confined", "not confined"], rows)


async def _devices() -> list[dict[str, Any]]:
    found = []
    async with aionn.Runtime(start=()) as runtime:
        for device in runtime.devices:
            error = ""
            try:
                await device.restart()  # none runs yet, so this only starts it
            except AionnError as unavailable:
                error = str(unavailable)
            files, sandbox = device.cache_files, device.sandbox
            found.append(
                {
                    "name": device.name,
                    "type": device.type.name.lower() if device.type is not None else None,
                    "providers": None if device.providers is None else list(device.providers),
                    "runs_on": device.runs_on,
                    "version": device.version,
                    "cache_files": None if files is None else {"model": files.model, "data": files.data},
                    "sandbox": None if sandbox is None else asdict(sandbox),
                    "available": not error,
                    "error": error or None,
                }
            )
    return found
