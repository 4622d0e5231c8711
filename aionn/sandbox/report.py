"""What confines a driver process, as its app learns it."""

from __future__ import annotations

import msgspec


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
