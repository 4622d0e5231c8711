"""What confines a driver process, as its app learns it."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("auto", "require", "off")
"""What an app may ask for. "strict" is for tests, and only the environment can ask for it: a denied system call then ends the driver."""

VARIABLE = "AIONN_SANDBOX"


@dataclass(frozen=True, slots=True)
class Confinement:
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


def checked_level(asked: str | None, environment: str | None) -> str:
    """Return the level for `Runtime(sandbox=)`. The environment's word counts where the app says nothing.

    Raises:
        ValueError: one of them is not a level. The text says which.
    """
    if asked is not None:
        if not isinstance(asked, str) or asked not in LEVELS:
            raise ValueError(f"sandbox={asked!r}: expected 'auto', 'require' or 'off'")
        return asked
    if environment and environment not in (*LEVELS, "strict"):
        raise ValueError(f"{VARIABLE}={environment!r}: expected 'auto', 'require', 'off' or 'strict'")
    return environment or "auto"
