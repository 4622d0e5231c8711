"""`Room`: how much memory the bodies of all requests may take that arrive in pieces.

Without such a bound a thousand clients, each with a body of the largest size, would take all of the machine's memory.
"""

from __future__ import annotations

from aionn.asgi.open_inference.refusals import RESTART_S, Refusal

__all__ = ["Room"]

ROOM_BYTES, ROOM_BODIES = 2**29, 4
"""All bodies may take so many bytes, or as much as so many of the largest bodies, if that is more."""


class Room:
    """Memory for bodies.

    Args:
        largest_bytes: the largest body that is accepted.
    """

    def __init__(self, largest_bytes: int) -> None:
        self._most = max(ROOM_BYTES, ROOM_BODIES * largest_bytes)
        self._used = 0

    def take(self, count: int) -> None:
        """Count bytes that a body takes.

        Raises:
            Refusal: there is not so much room now.
        """
        if self._used + count > self._most:
            sentence = f"the requests under way have {self._used} bytes of the {self._most} that this server keeps of them; try again later"
            raise Refusal(503, sentence, {"Retry-After": str(RESTART_S), "Connection": "close"})
        self._used += count

    def give_back(self, count: int) -> None:
        """Count bytes that a body took, and does not take any more."""
        self._used -= count
