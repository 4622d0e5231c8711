"""`Pauses`: what has failed is not asked again for 30 seconds, and each kind of failure is one WARNING in the log."""

from __future__ import annotations

import logging
import time

_PAUSE_S = 30.0
"""So long a service is left alone after a failure. Each compile in that time would wait for it in vain."""


class Pauses:
    """The failures of the services that a backend asks, such as an artifact store. In one event loop.

    Args:
        logger: for the failures. The first of each kind is a WARNING, and later ones are INFO.
        message: what is logged. It has one %s, which stands for the reason.
    """

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self._logger, self._message = logger, message
        self._until: dict[str, float] = {}  # time.monotonic, by service
        self._warned: set[str] = set()

    def paused(self, *services: str) -> bool:
        """Return whether one of these services has failed within the last 30 seconds."""
        now = time.monotonic()
        return any(now < self._until.get(service, 0.0) for service in services)

    def pause(self, service: str, kind: str, why: str) -> None:
        """Note that a service has failed, and log it."""
        self._until[service] = time.monotonic() + _PAUSE_S
        self.log(kind, why)

    def log(self, kind: str, why: str) -> None:
        """Log a failure, after which the service may be asked again at once."""
        level = logging.INFO if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        self._logger.log(level, self._message, why)
