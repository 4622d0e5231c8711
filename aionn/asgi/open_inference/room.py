"""`Room`: how much memory the bodies of all requests that arrive in pieces may take together.

Without such a bound a thousand clients, each with a body of the largest size, would take all of the machine's memory.
"""

from __future__ import annotations

from aionn.asgi.open_inference.refusals import RESTART_S, RequestRefusal

ROOM_BYTES, ROOM_BODIES = 2**29, 4
"""All bodies together may take `ROOM_BYTES`, or as much as `ROOM_BODIES` bodies of the largest size, if that is more."""


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
            Refusal: the bodies of all requests would take more than they may.
        """
        if self._used + count > self._most:
            sentence = (
                f"the requests under way take {self._used} of the {self._most} bytes that this server keeps for them; try again later"
            )
            raise RequestRefusal(503, sentence, {"Retry-After": str(RESTART_S), "Connection": "close"})
        self._used += count

    def give_back(self, count: int) -> None:
        """Count bytes that a body took, and does not take any more."""
        self._used -= count
