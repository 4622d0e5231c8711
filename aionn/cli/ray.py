"""`aionn ray`: show the resources of a node."""

from __future__ import annotations

from collections.abc import Sequence

from aionn.cli.printing import UsageError, print_json, print_table

try:
    from aionn.ray.resources import device_versions, resource_name
except ImportError as error:
    raise UsageError("aionn ray needs Ray, obstore and cryptography; install them with: pip install 'aionn[ray]'") from error


def show_node_resources(devices: Sequence[str] | None, as_json: bool) -> None:
    """Print the resources of this machine, by device.

    Raises:
        AionnError: a device that was named is not known, cannot start, or does not cache.
    """
    found = device_versions(devices)
    if as_json:
        print_json({resource_name(device, version): 1.0 for device, version in found.items()})
        return
    print_table("", ["device", "version", "resource"], [(name, version, resource_name(name, version)) for name, version in found.items()])
