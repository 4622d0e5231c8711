"""Ray, imported when it is first needed, and its errors in one line.

The import takes a second, and an app may import `aionn.ray` where Ray is not installed.
"""

from __future__ import annotations

from typing import Any

from aionn.errors import text_of

__all__ = ["first_line", "needed_ray"]


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


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that is not empty, or else the name of its class. Ray's errors have long texts."""
    return next((line.strip() for line in text_of(error).splitlines() if line.strip()), type(error).__name__)
