"""What a driver has reported about its device, kept after its end."""

from __future__ import annotations

import logging

import msgspec

from aionn.hal.types import CacheFiles, DeviceType
from aionn.remote.device import RemoteDevice
from aionn.runtime.logs import about
from aionn.sandbox.report import Confinement

logger = logging.getLogger("aionn.driver")


class DeviceFacts(msgspec.Struct, frozen=True):
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

    def log_gaps(self, name: str) -> None:
        """Log what does not confine the driver of the device with that name, unless its app has turned the sandbox off."""
        if self.sandbox is not None and self.sandbox.level != "off" and self.sandbox.lacks:
            words = "the sandbox of device %r does not have everything (aionn devices lists it): %s"
            logger.info(words, name, "; ".join(self.sandbox.lacks), extra=about(device=name))


_ORDER = ("onnxruntime", "openvino")


def rank(name: str) -> tuple[int, str]:
    """Rank the engines that were measured best first, then any other, then the reference."""
    if name in _ORDER:
        return _ORDER.index(name), name
    return len(_ORDER) + (name == "reference"), name
