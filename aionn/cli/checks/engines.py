"""Every installed engine: it loads, compiles a model of three nodes and agrees with the reference, in a real driver process."""

from __future__ import annotations

import importlib.util
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import anyio
import numpy as np

import aionn
from aionn.caching.state import state_path
from aionn.cli.checks import Row, fail, ok, warn
from aionn.cli.checks.sandbox import confined
from aionn.engines.installed import BUILT_IN, GROUP, READERS, with_descriptors
from aionn.errors import AionnError, CompilationError
from aionn.runtime.processes.template import why_none
from aionn.testing.models import CheckedModel, standard_models

ENGINE_S = 60.0
"""How long an engine may take to start, compile and answer."""

_BESIDE_EACH_OTHER = 2
_TOLERANCE = 0.02
"""As a share of the largest right value. A GPU may compute in half precision; a broken engine is further off."""

_LIBRARIES = {"onnxruntime": "onnxruntime", "openvino": "openvino", "litert": "ai_edge_litert"}
"""What engines of this package need. aionn lists these engines also where the library is not installed."""

_REMOTE = {"azure"}
"""Providers that send models to a service, and so cannot be tried here."""


def installed_points() -> list[EntryPoint]:
    """Return the entry points of all installed engines, those with the same name too.

    Raises:
        MemoryAllocationError: this process has no free file descriptor to look with.
    """
    with with_descriptors("the look for engines"):
        return list(entry_points(group=GROUP))


def engine_names(points: Iterable[EntryPoint]) -> Row:
    """Check that no two installed packages have an engine of the same name. Only the first one found is used."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for point in points:
        owner = point.dist.name if point.dist is not None else "?"
        places[point.name].setdefault(point.value, owner)
    doubles = {name: found for name, found in places.items() if len(found) > 1}
    if not doubles:
        return ok("engine names", f"{len(places)} engines: {', '.join(sorted(places))}")
    listed = "; ".join(
        f"{name!r} is {' and '.join(f'{value} of package {owner}' for value, owner in found.items())}" for name, found in doubles.items()
    )
    return fail(
        "engine names", listed, "one engine for each name", "uninstall all packages but one, or name the engine by package.module:Class"
    )


async def engines(names: Sequence[str], state_dir: str | None = None) -> list[Row]:
    """Check these devices, two beside each other, and the providers that their engines list."""
    missing = {name for name in names if _LIBRARIES.get(name) and BUILT_IN.get(name) and not importlib.util.find_spec(_LIBRARIES[name])}
    subject = standard_models()[0]
    found: dict[str, list[Row]] = {}
    limiter = anyio.CapacityLimiter(_BESIDE_EACH_OTHER)

    async def check(runtime: aionn.Runtime, name: str) -> None:
        async with limiter:
            found[name] = await _engine(runtime, name, subject)

    with _left_as_it_is(state_dir) as folder:
        async with aionn.Runtime(start=(), name="aionn doctor", state_dir=folder) as runtime:
            async with anyio.create_task_group() as tasks:
                for name in names:
                    if name not in missing:
                        tasks.start_soon(check, runtime, name)
            why = why_none()
    rows = [row for name in names for row in found.get(name, ())]
    if found:
        rows.append(_template(why))
    rows += [ok(f"engine {name}", f"not installed; pip install 'aionn[{name}]' brings it") for name in names if name in missing]
    if set(names) - {"reference"} and not set(found) - {"reference"}:
        way_out = "pip install 'aionn[onnxruntime]'"
        rows.append(warn("engines", "only the reference, which is slow", "an engine that computes models quickly", way_out))
    return rows


def _template(why: str) -> Row:
    if not why:
        return ok("template", "further drivers are copies of one that has started")
    needed, way_out = (
        "a driver that can be copied, so that the next ones start quickly",
        "drivers work without it; each takes a whole start",
    )
    return warn("template", f"each driver is started by itself: {why}", needed, way_out)


@contextmanager
def _left_as_it_is(state_dir: str | None) -> Iterator[Path]:
    """Give a folder for the records of drivers. A state directory that does not exist is not made: another folder is used meanwhile."""
    path = state_path(state_dir)
    if path.exists():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="aionn-doctor-") as folder:
        yield Path(folder)


async def _engine(runtime: aionn.Runtime, name: str, subject: CheckedModel) -> list[Row]:
    rows = await _tried(runtime, name, subject)
    device = next((device for device in runtime.devices if device.name == name), None)
    if rows[0].status != "ok" or device is None:
        return rows
    for provider in device.providers or ():
        if provider.lower() != "cpu" and provider.lower() not in _REMOTE:
            row, *more = await _tried(runtime, f"{name}:{provider}", subject)
            # The engine works, and lists a provider whose hardware or library is not there.
            rows += [row if row.status == "ok" else warn(row.check, row.found, row.needed, row.way_out), *more]
    return rows


async def _tried(runtime: aionn.Runtime, name: str, subject: CheckedModel) -> list[Row]:
    """Compile and run the model on one device. Returns its row, and one about its sandbox if its driver ran."""
    row = await _judged(runtime, name, subject)
    device = next((device for device in runtime.devices if device.name == name), None)
    return [row, *confined(name, None if device is None else device.sandbox)]


async def _judged(runtime: aionn.Runtime, name: str, subject: CheckedModel) -> Row:
    check, needed = f"engine {name}", "an engine that loads, compiles and computes what the reference computes"
    try:
        with anyio.fail_after(ENGINE_S):
            compilation = await runtime.compile(subject.model, devices=(name,))
            outputs = await compilation.compute(subject.runs[0])
    except TimeoutError:
        return fail(check, f"no answer within {ENGINE_S:.0f} s", needed, f"see stderr, and install the package of {name!r} again")
    except AionnError as error:
        if name in READERS.values() and isinstance(error, CompilationError):
            return ok(check, "loads; it reads no ONNX, so it computed nothing here")
        way_out = f"install or mend the package of {name!r}, or uninstall it; aionn devices tries it again"
        return fail(check, str(error), needed, way_out)
    device = next(device for device in runtime.devices if device.name == name)
    worst = _difference(outputs, subject.right(0))
    if worst > _TOLERANCE:
        found = f"version {device.version}: its outputs differ from the reference by {worst:.0%} of the largest value"
        return fail(check, found, needed, f"install another version of the package of {name!r}, and report this to its authors")
    last = "computes" if name == "reference" else "agrees with the reference"
    return ok(check, f"version {_short(device.version)}: loads, compiles, {last}")


def _short(version: str | None) -> str:
    """Return the first part of an engine's version, which may name every library and CPU feature behind it."""
    return (version or "?").partition(";")[0][:48]


def _difference(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> float:
    """Return the largest difference as a share of the largest right value, infinite where a value or a shape is wrong."""
    worst = 0.0
    for name, wanted in right.items():
        if name not in found or found[name].shape != wanted.shape or not np.isfinite(found[name]).all():
            return float("inf")
        largest = float(np.abs(wanted).max(initial=1e-6))
        worst = max(worst, float(np.abs(found[name] - wanted).max(initial=0.0)) / largest)
    return worst
