"""`aionn cache`: list, verify and prune a directory of cached compilations, and what was measured of stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import aionn
from aionn.caching import StageMeasurement
from aionn.caching.outcomes import Refusal
from aionn.caching.store import BadEntry, CacheStore, EntryInfo, PruneReport
from aionn.cli.printing import NotDoneError, ago, digest, duration, entries, print_json, print_table, size


def list_entries(directory: Path, as_json: bool) -> None:
    """Print every entry, then every stage measurement.

    Raises:
        NotDoneError: the directory cannot be read, or is not safe to use.
    """

    async def listed() -> tuple[list[EntryInfo] | Refusal, list[StageMeasurement]]:
        async with CacheStore(directory) as store:
            return await store.entries(), await store.remembered.measurements()

    found, measurements = aionn.run(listed)
    if isinstance(found, Refusal):
        raise NotDoneError(f"cache {str(directory)!r} cannot be listed: {found}")
    if as_json:
        print_json([*(_as_json(entry) for entry in found), *(_measurement_as_json(one) for one in measurements)])
        return
    _print_entries(found)
    if measurements:
        print()
        _print_measurements(measurements)


def _print_entries(found: Sequence[EntryInfo]) -> None:
    print_table(
        f"{entries(len(found))}, {size(sum(entry.size_bytes for entry in found))}",
        ["entry", "model", "name", "device", "version", "size>", "a hit saves>", "stored>", "used>", "state"],
        [
            (
                digest(entry.key),
                digest(entry.model_digest),
                entry.model_name or "?",
                entry.device,
                entry.device_version.partition(";")[0],  # the rest says for which processor and in which form; --json has it
                size(entry.size_bytes),
                duration(entry.saves_s),
                ago(entry.created_s),
                ago(entry.used_s),
                _state(entry),
            )
            for entry in found
        ],
    )


def _print_measurements(measurements: Sequence[StageMeasurement]) -> None:
    columns = "model,stage,version,after,its version,threads>,inputs,faster by>,off by up to>,measured>,detail"
    print_table(
        f"{len(measurements)} stage measurement{'s' * (len(measurements) > 1)}",
        columns.split(","),
        [
            (
                digest(one.model_digest),
                one.stage,
                one.version,
                one.base,
                one.base_version,
                str(one.threads),
                "made up" if one.made_up else "real",
                "?" if one.gain is None else f"{one.gain:.0%}",
                _largest_difference(one),
                ago(one.measured_s),
                one.detail,
            )
            for one in measurements
        ],
    )


def _largest_difference(measurement: StageMeasurement) -> str:
    """Return the largest difference over all outputs that were compared, or "?" where one is not finite."""
    differences = [output.largest for output in measurement.outputs.values()]
    finite = [largest for largest in differences if largest is not None]
    return "?" if not differences or len(finite) < len(differences) else f"{max(finite):.3g}"


def _measurement_as_json(measurement: StageMeasurement) -> dict[str, Any]:
    fields = msgspec.to_builtins(msgspec.structs.replace(measurement, model_digest=b""))
    return {"kind": "stage measurement", **fields, "model_digest": measurement.model_digest.hex()}


def _state(entry: EntryInfo) -> str:
    words = [word for word, true in (("declined", entry.declined), ("older version", entry.superseded)) if true]
    return ", ".join(words) or "current"


def _as_json(entry: EntryInfo) -> dict[str, Any]:
    return {"kind": "entry", **msgspec.structs.asdict(entry), "key": entry.key.hex(), "model_digest": entry.model_digest.hex()}


def verify_entries(directory: Path, as_json: bool) -> None:
    """Print every bad entry.

    Raises:
        NotDoneError: the cache has a bad entry.
    """

    async def bad_entries() -> tuple[list[BadEntry], int]:
        async with CacheStore(directory) as store:
            bad = [entry async for entry in store.verify()]
            found = await store.entries()
            return bad, 0 if isinstance(found, Refusal) else len(found)

    bad, count = aionn.run(bad_entries)
    if as_json:
        rows = [{"key": one.key.hex(), "device": one.device, "reason": one.reason.value, "detail": one.detail} for one in bad]
        print_json({"entries": count, "bad": rows})
    elif bad:
        print_table(
            "",
            ["entry", "device", "reason", "detail"],
            [(digest(one.key) or "(all)", one.device or "?", one.reason.value, one.detail) for one in bad],
        )
    else:
        print(f"{entries(count)}, all as stored")
    if bad:
        raise NotDoneError(f"cache {str(directory)!r}: {entries(len(bad))} not as stored; the next compilation replaces what is bad")


def prune_entries(directory: Path, max_bytes: int | None, measurements: bool, as_json: bool) -> None:
    """Prune, and print what was removed.

    Raises:
        NotDoneError: the directory cannot be used.
    """

    async def prune() -> PruneReport | Refusal:
        async with CacheStore(directory) as store:
            return await store.prune(max_bytes, measurements=measurements)

    report = aionn.run(prune)
    if isinstance(report, Refusal):
        raise NotDoneError(f"cache {str(directory)!r} cannot be pruned: {report}")
    if as_json:
        print_json(msgspec.structs.asdict(report))
        return
    in_use = f"; {report.in_use} kept because a process uses them" if report.in_use else ""
    forgotten = f"; stage measurements removed: {report.measurements}" if report.measurements else ""
    print(f"{entries(report.removed)} removed, {size(report.freed_bytes)} freed, {size(report.left_bytes)} left{in_use}{forgotten}")
