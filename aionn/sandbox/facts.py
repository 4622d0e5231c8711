"""What an engine says that its driver needs beyond the usual. `sources` reads it before the engine's module is imported."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NAMES", "Facts", "FactsError"]

NAMES = ("reads", "writes_by_path", "makes_code", "devices")


class FactsError(ValueError):
    """The facts of an engine cannot be read."""


class Facts(NamedTuple):
    """What an engine needs. A class that has none of these attributes declares nothing, and its driver is hardly confined.

    Attributes:
        reads: absolute paths of files and folders that it reads, beyond Python's own and the system's libraries. "*" matches any part.
        writes_by_path: whether it writes temporary files by path. It then finds a private folder in `TMPDIR`.
        makes_code: whether it makes machine code at run time. Otherwise no memory is writable and executable.
        devices: device files that it opens for reading and writing, as in "/dev/nvidia*".
    """

    reads: tuple[str, ...] = ()
    writes_by_path: bool = False
    makes_code: bool = False
    devices: tuple[str, ...] = ()
