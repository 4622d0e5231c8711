"""What an engine needs beyond what every driver may do: the sandbox allows it, and nothing else. And what confines a driver then.

`aionn.hal` shows the needs to driver authors. They lie on the ground floor, because a driver reads them before it may import NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aionn.errors import CallerError

__all__ = ["NAMES", "Confinement", "Needs"]


class Needs(msgspec.Struct, frozen=True):
    """What the sandbox of an engine's driver must allow. It stands in `aionn-engine.toml`, or in `Runtime(engine_needs=)`.

    Without it, a driver may do what every driver may do. See docs/how-to/own-driver.md.

    Attributes:
        reads: absolute paths of files and folders that the engine reads, beyond Python's packages and the system's libraries. "*"
            matches any part of a name.
        writes_by_path: whether it writes temporary files by path. Its driver then has a private folder in `TMPDIR`.
        makes_code: whether it makes machine code at run time. Otherwise no memory is writable and executable.
        devices: device files that it opens for reading and writing, as in "/dev/nvidia*".

    Raises:
        CallerError: a path is not absolute, or a value has another type.
    """

    reads: Sequence[str] = ()
    writes_by_path: bool = False
    makes_code: bool = False
    devices: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("writes_by_path", "makes_code"):
            if not isinstance(value := getattr(self, name), bool):
                raise CallerError(f"{name} is {value!r}; it must be true or false")
        for name in ("reads", "devices"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(_is_path, value)):
                raise CallerError(f"{name} is {value!r}; it must be a list of absolute paths, as in ['/etc/engine.conf']")
            msgspec.structs.force_setattr(self, name, tuple(value))

    def __add__(self, other: Needs) -> Needs:
        """Return what both need."""
        return Needs(
            (*self.reads, *other.reads),
            self.writes_by_path or other.writes_by_path,
            self.makes_code or other.makes_code,
            (*self.devices, *other.devices),
        )


NAMES = Needs.__struct_fields__


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/") and "\0" not in value


class Confinement(msgspec.Struct, frozen=True):
    """What confines one driver process (public face: `aionn.Device.sandbox`).

    Attributes:
        level: "auto", "require", "off" or "strict".
        holds: what holds, each as one word or a few: "files", "system calls", "network", "processes", "signals", "no made code",
            "limits", "no new privileges", "environment".
        lacks: what does not hold, and why. One sentence each.
    """

    level: str = "off"
    holds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
