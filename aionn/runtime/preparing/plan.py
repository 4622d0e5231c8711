"""Which device runs a model: the first, best first, that can run every node of it. Otherwise several devices share the model.

If a device that the app named is not installed, or fails, that is an error, never a silent fallback. Without names every installed
device is a candidate. A candidate is passed over if its package is missing, or if it cannot prepare the model, or if it dies
meanwhile. The log warns of each such device, the trace counts it, and `Compilation.device` names the device that was chosen. The
cache remembers what a device could not run, so a second start neither asks the device nor sends the model. It keeps the plan of a model
that was cut (`partition`).
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aionn import trace
from aionn.errors import (
    AionnError,
    CallerError,
    CompilationError,
    DeviceUnavailableError,
    DriverDiedError,
    DriverHungError,
    MemoryAllocationError,
)
from aionn.runtime.model import is_read
from aionn.runtime.preparing.compile_acts import CompileRequest, UnsupportedOperationError, node_of, wants_lanes
from aionn.runtime.preparing.preparation import Found, prepare
from aionn.runtime.processes.devices import Devices
from aionn.runtime.record import about, current

if TYPE_CHECKING:
    from aionn.runtime.preparing.partition import Partition

logger = logging.getLogger("aionn.runtime")

_FAILURES = (CompilationError, DeviceUnavailableError, MemoryAllocationError, DriverDiedError, DriverHungError)
"""Errors of a device after which the next one is tried, if the app named none."""


def checked_names(devices: Devices, names: Iterable[str] | None) -> Sequence[str] | None:
    """Return the names that an app gives, after checking that each device is there. None stands for every device.

    Raises:
        CallerError: `names` is not a sequence of names, or is empty.
        DeviceUnavailableError: a device is not installed.
    """
    if names is None:
        return None
    if isinstance(names, str | bytes) or not isinstance(names, Iterable) or not (found := tuple(names)):
        raise CallerError(f"devices={names!r}: give a sequence of device names, as in ('onnxruntime',), or None for every device")
    return tuple([devices.find(name).name for name in found])


def checked_stages(devices: Devices, names: Sequence[str]) -> Sequence[str]:
    """Return the names of stages that an app gives, after checking that each device is there.

    Raises:
        CallerError: `names` is not a sequence of different names, or is empty.
        DeviceUnavailableError: a device is not installed.
    """
    if isinstance(names, str) or len(set(names)) < len(names) or not names:
        raise CallerError(f"stages={names!r}: give the names of devices from quick to best, each once")
    for name in names:
        devices.find(name)
    return names


def prepare_on_best(devices: Devices, request: CompileRequest) -> Coroutine[Any, Any, Found]:
    """Prepare the model on the first device that can run it whole. Otherwise cut it over the devices.

    Raises:
        DeviceUnavailableError: a named device cannot be used here, or no device is installed.
        CompilationError: no candidate can run a node. `.node` is the first such node.
        CompilationError, MemoryAllocationError, DriverDiedError, DriverHungError: the best candidate that can run every node failed, or the
            device of a step. Without candidates all the others have failed, too, and their errors are notes of this one.
    """
    return _Search(devices, request).run()


class _Search:
    """One search for the device, or the devices, of a model."""

    def __init__(self, devices: Devices, request: CompileRequest) -> None:
        self._devices = devices
        self._request = request
        self._model = request.model
        self._named = request.candidates is not None
        self._candidates = list(dict.fromkeys(devices.installed if request.candidates is None else request.candidates))
        self._priority = request.options.priority
        self._made: Partition | None = None
        self._looked = False
        self._shortfalls: list[UnsupportedOperationError] = []
        self._unavailable: dict[str, DeviceUnavailableError] = {}
        self._failures: list[AionnError] = []

    @property
    def _partition(self) -> Partition:
        from aionn.runtime.preparing.partition import Partition  # most models need none

        if self._made is None:
            self._made = Partition(self._devices, self._request)
        return self._made

    async def run(self) -> Found:
        """See `prepare_on_best`."""
        try:
            for name in self._candidates:
                if self._shortfalls and not await self._caches(name) and (found := await self._kept()) is not None:
                    return found  # to ask a device that does not cache needs the graph, which a plan from the cache does without
                try:
                    prepared, outcome = await prepare(self._devices, name, self._request)
                    return prepared, (outcome,)
                except UnsupportedOperationError as error:
                    self._shortfalls.append(error)
                    trace.count("plan.device_cannot", device=name)
                except AionnError as error:
                    if not self._passes_over(name, error, "model"):
                        raise
            if not self._shortfalls or self._model.format != "onnx":  # no other format can be cut
                raise self._why_none()
            found = await self._kept()
            return found if found is not None else await self._cut()
        finally:
            # Each error's traceback refers to the search, so these lists would keep the model until a collection.
            self._shortfalls.clear()
            self._unavailable.clear()
            self._failures.clear()

    async def _caches(self, name: str) -> bool:
        """Return whether a device caches. One that is not there counts as one that does."""
        try:
            return (await self._devices.get(name, self._priority)).cache_files.supported
        except AionnError:
            return True  # preparing will say what is wrong

    def _passes_over(self, name: str, error: AionnError, what: str) -> bool:
        """Note why a device is not used. Returns False if the next device must not be tried."""
        if not isinstance(error, _FAILURES) or self._named or self._devices.closed:
            return False
        if isinstance(error, DeviceUnavailableError):
            self._unavailable[name] = error
            logger.warning("device %r is passed over for model %r: %s", name, current.get().name, error, extra=self._about(name))
            trace.count("plan.device_unavailable", device=name)
            return True
        if not is_read(self._model) and not wants_lanes(error):
            return False  # with a model that is not read, the fault lies in its graph, and no device can help
        self._failures.append(error)
        # The text alone: a log record with the error would keep its traceback, and with the traceback the model.
        words = "device %r failed to prepare %s %r and is passed over: %s"
        logger.warning(words, name, what, current.get().name, str(error), extra=self._about(name))
        trace.count("plan.device_failed", device=name, error=type(error).__name__)
        return True

    def _about(self, device: str = "") -> dict[str, str]:
        return about(device=device, model=current.get().name)

    async def _versions(self) -> dict[str, str]:
        """Return the versions of the candidates that are there. Their drivers are started."""
        found = {}
        for name in self._candidates:
            if name in self._unavailable:
                continue
            try:
                found[name] = (await self._devices.get(name, self._priority)).version
            except DeviceUnavailableError as error:
                if self._named:
                    raise
                self._unavailable[name] = error
        return found

    async def _kept(self) -> Found | None:
        """Prepare the plan that the cache keeps, if it keeps one. The cache is asked once."""
        if self._looked or self._request.cache is None:
            return None
        self._looked = True
        try:
            return await self._partition.kept(await self._versions())
        except _FAILURES as error:
            if self._named or self._devices.closed:
                raise
            words = "the plan that the cache keeps for model %r is not used: %s"
            logger.warning(words, current.get().name, str(error), extra=self._about())
            return None

    async def _cut(self) -> Found:
        """Cut the model over the devices that can run a part of it. Without names, a device that cannot prepare its step is left out."""
        partition = self._partition
        versions = await self._versions()
        partition.capable = {error.device: await partition.ask(error.device, error) for error in self._shortfalls}
        while True:
            try:
                return await partition.cut(versions)
            except AionnError as error:
                name = partition.step_failed
                if name is None:
                    if not isinstance(error, CompilationError):
                        raise
                    raise self._why_none(error) from None
                if not self._passes_over(name, error, "its step of model"):
                    raise
                partition.capable.pop(name, None)
                if not partition.capable:
                    raise self._why_none() from None

    def _why_none(self, uncut: CompilationError | None = None) -> AionnError:
        """Return the error of the search. `uncut`: why the model cannot be cut."""
        shortfalls, unavailable, failures = self._shortfalls, list(self._unavailable.values()), self._failures
        if failures:
            for other in (*failures[1:], *shortfalls, *unavailable):
                failures[0].add_note(str(other))
            return failures[0]
        if not shortfalls:
            why = "; ".join(map(str, unavailable)) or "no package offers an engine (entry points of the group aionn.engines)"
            return DeviceUnavailableError("", f"no installed device can run a model: {why}")
        if uncut is not None and len(shortfalls) > 1:
            for other in (*shortfalls, *unavailable):
                uncut.add_note(str(other))
            return uncut
        first = shortfalls[0]
        each = "; ".join(map(str, shortfalls))
        return CompilationError(
            f"no device can run every node of the model: {each}", node=first.node or node_of(self._model, first.reason), reason=first.reason
        )
