"""The command line of `aionn ray`: the arguments of each command. The work is in `ray`, imported when a command is called."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

__all__ = ["ray"]

Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False, help="Print one JSON value instead of a table.")]
DeviceNames = Annotated[list[str] | None, Parameter(name="--device", negative="")]

ray = App(name="ray", help="Use aionn on a Ray cluster.")


@ray.command(name="node-resources")
def node_resources(*, device: DeviceNames = None, json: Json = False) -> None:
    """Show the resources by which compile tasks find this machine. Each device is started once.

    With --json it prints what Ray takes: ray start --resources="$(aionn ray node-resources --json)".

    Args:
        device: Name of a device; give it again for more. Default: every installed one that starts and caches.
    """
    from aionn.cli.ray import show_node_resources

    show_node_resources(device, json)
