"""Ray, imported when it is first needed, its errors in one line, and what it says of this process.

The import takes a second, and an app may import `aionn.ray` where Ray is not installed.
"""

from __future__ import annotations

from typing import Any

from aionn.errors import text_of


def needed_ray() -> Any:
    """Return the package `ray`.

    Raises:
        ImportError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("aionn.ray needs Ray; install it with: pip install 'aionn[ray]'") from error
    return ray


def connected_ray() -> Any:
    """Return the package `ray` of a process that is connected to a cluster.

    Most calls of Ray start a new cluster on this machine if there is no connection. An app that has called `ray.shutdown` must not
    get one.

    Raises:
        ImportError: it is not installed.
        ray.exceptions.RaySystemError: this process is not connected.
    """
    ray = needed_ray()
    if not ray.is_initialized():
        raise ray.exceptions.RaySystemError("this process is not connected to a Ray cluster any more")
    return ray


def assigned_threads() -> int | None:
    """Return how many engine threads a replica may have: the whole CPUs that Ray has assigned to it, at least 1.

    Returns:
        None outside of an actor.
    """
    ray = needed_ray()
    if not ray.is_initialized():  # the next call would start a cluster on this machine
        return None
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None
    return max(1, int(context.get_assigned_resources().get("CPU", 0)))


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that is not empty, or else the name of its class. Ray's errors have long texts."""
    return next((line.strip() for line in text_of(error).splitlines() if line.strip()), type(error).__name__)
