"""What an installed engine needs of its driver's sandbox. A driver asks before it imports the engine."""

from __future__ import annotations

from aionn.engines.installed import BUILT_IN
from aionn.sandbox.facts import Facts

_FACTS = {
    BUILT_IN["onnxruntime"]: Facts(),
    BUILT_IN["openvino"]: Facts(makes_code=True),
    BUILT_IN["reference"]: Facts(),
}
"""The facts of these classes. To read them in the source takes 8 ms of each start. A test compares."""

_OF_ACCELERATORS = {
    "reads": (
        "/proc/driver/nvidia",
        "/sys/class/drm",
        "/sys/class/accel",
        "/sys/class/kfd",
        "/etc/OpenCL",
        "/etc/vulkan",
        "/usr/local/cuda*",
    ),
    "devices": ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/accel"),
}
_CPU = "cpu"


def facts_of(place: str, provider: str) -> Facts | None:
    """Return what an engine needs of its driver's sandbox, or None if its class does not say. Imports no engine.

    Args:
        place: "package.module:Class".
        provider: what follows the engine's name in the device's name, or an empty text. Providers other than the CPU get the device
            files of accelerators, and may make code.

    Raises:
        FactsError: the class says it in a way that cannot be read.
    """
    facts = _FACTS.get(place)
    if facts is None:
        from aionn.sandbox.sources import declared  # it parses

        facts = declared(place)
    if facts is None or provider.lower() in ("", _CPU):
        return facts
    reads, devices = (*facts.reads, *_OF_ACCELERATORS["reads"]), (*facts.devices, *_OF_ACCELERATORS["devices"])
    return Facts(reads, facts.writes_by_path, True, devices)
