"""Files inside installed packages, found without importing the packages: the models and the recording of the examples."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["UsageError", "packaged"]


class UsageError(Exception):
    """What the person at the terminal can put right; one sentence."""


def packaged(package: str, file: str) -> Path:
    """The path of `file` inside the top-level package `package`.

    Raises:
        UsageError: the package or the file is not there.
    """
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / file
        if path.is_file():
            return path
    raise UsageError(
        f"package {package!r} with its file {file} is not installed; "
        "run pip install --no-deps --ignore-requires-python -r examples/models.txt"
    )
