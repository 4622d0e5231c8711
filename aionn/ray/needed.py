"""Ray, imported when it is first needed. The import takes a second, and an app may import `aionn.ray` where Ray is not installed."""

from __future__ import annotations

from typing import Any

__all__ = ["needed_ray"]


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
