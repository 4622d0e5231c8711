"""What a driver has reported about its device, kept after its end."""

from __future__ import annotations

from dataclasses import dataclass

from aionn.hal.types import CacheFiles, DeviceType
from aionn.remote.device import RemoteDevice
from aionn.sandbox.report import Confinement


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts of `Device` that its driver reports. All are None before the first report."""

    version: str | None = None
    type: DeviceType | None = None
    cache_files: CacheFiles | None = None
    providers: tuple[str, ...] | None = None
    runs_on: str | None = None
    sandbox: Confinement | None = None

    @classmethod
    def of(cls, remote: RemoteDevice) -> DeviceFacts:
        """Return the facts that a driver has greeted with."""
        return cls(remote.version, remote.type, remote.cache_files, remote.providers, remote.runs_on or None, remote.sandbox)


_ORDER = ("onnxruntime", "openvino")


def rank(name: str) -> tuple[int, str]:
    """Rank the engines that were measured best first, then any other, then the reference."""
    if name in _ORDER:
        return _ORDER.index(name), name
    return len(_ORDER) + (name == "reference"), name
