"""Models that end their drivers again and again are refused for a while, so that they cost other apps no more drivers.

The page of a driver that has died shows which models it ran or compiled. `Quarantine` counts these deaths, by model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

logger = logging.getLogger("aionn.service")

DEATHS = 3
WITHIN_S = 60.0
FOR_S = 600.0
_NS = 1_000_000_000


class Suspects:
    """The models that were running or compiling when drivers died, by the first 8 bytes of their identities."""

    def __init__(self) -> None:
        self._deaths: dict[int, list[int]] = {}
        self._until_ns: dict[int, int] = {}

    def died(self, keys: Iterable[int]) -> bool:
        """Note the models of a driver that has died. Returns whether one of them is refused from now on."""
        now_ns, found = time.monotonic_ns(), False
        for key in keys:
            deaths = [at_ns for at_ns in self._deaths.get(key, ()) if now_ns - at_ns < WITHIN_S * _NS]
            self._deaths[key] = deaths = [*deaths, now_ns]
            if len(deaths) >= DEATHS:
                words = "the model %016x was running at the deaths of %d drivers within %g s, and is refused for %g s"
                logger.warning(words, key, len(deaths), WITHIN_S, FOR_S)
                self._until_ns[key] = now_ns + int(FOR_S * _NS)
                del self._deaths[key]
                found = True
        return found

    @property
    def refused(self) -> tuple[tuple[int, int], ...]:
        """The models that are refused now, and until when in CLOCK_MONOTONIC."""
        now_ns = time.monotonic_ns()
        self._until_ns = {key: until_ns for key, until_ns in self._until_ns.items() if until_ns > now_ns}
        return tuple(self._until_ns.items())
