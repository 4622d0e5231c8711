"""Which devices a node of a Ray cluster has, as custom resources: `aionn-fp:<16 hex digits>`.

The digits are the beginning of a fingerprint (`fleet.places.fingerprint`): the digest of a device's name and version. The version names the
engine's version and the CPU's instruction set. So a compile task that asks for the resource runs only where its artifact fits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence

import aionn
from aionn.errors import AionnError, CallerError
from aionn.fleet.places import fingerprint
from aionn.hal.types import Priority
from aionn.runtime.runtime import opened_of

PREFIX = "aionn-fp:"
_DIGITS = 16
TASK_SHARE = 0.001
"""How much of a node's resource a task takes, of 1.0. CPUs and memory limit how many tasks run at once. This resource must not."""


def resource_name(device: str, device_version: str) -> str:
    """Return the name of the resource that a node with this version of a device has."""
    return f"{PREFIX}{fingerprint(device, device_version)[:_DIGITS]}"


def device_resources(resources: Iterable[str]) -> list[str]:
    """Return those names of resources that stand for devices of aionn, sorted."""
    return sorted(name for name in resources if name.startswith(PREFIX))


def node_resources(devices: Sequence[str] | None = None) -> dict[str, float]:
    """Return the custom resources of this machine, for `ray.init(resources=...)` or `ray start --resources=...`.

    Each device is started once, which takes a second or two. A device that does not cache has no artifacts, so it has no resource.

    Args:
        devices: names of devices. None: every installed one that starts.

    Returns:
        1.0 for each device, by the name `aionn-fp:<16 hex digits>`.

    Raises:
        CallerError: a device that was named is not known.
        AionnError: a device that was named cannot start.
        RuntimeError: an event loop runs in this thread. Call the function in another thread.
    """
    return {resource_name(*named): 1.0 for named in device_versions(devices).items()}


def device_versions(devices: Sequence[str] | None = None) -> Mapping[str, str]:
    """Return the version of each device that caches, by its name. Arguments and errors are as for `node_resources`."""

    async def versions(state_dir: str) -> dict[str, str]:
        found: dict[str, str] = {}
        async with aionn.Runtime(state_dir=state_dir, start=(), name="aionn node resources") as runtime:
            opened = opened_of(runtime)
            assert opened is not None
            for name in opened.devices.installed if devices is None else devices:
                try:
                    remote = await opened.devices.get(name, Priority.MEDIUM)
                except AionnError:
                    if devices is not None:
                        raise
                    continue  # installed, and not usable here
                if remote.cache_files.supported:
                    found[name] = remote.version
                elif devices is not None:
                    raise CallerError(f"device {name!r} does not cache, so no other machine can compile for it")
        return found

    with tempfile.TemporaryDirectory(prefix="aionn-node-") as folder:
        return aionn.run(versions, folder)
