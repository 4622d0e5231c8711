"""`StoreError`: an artifact store cannot be used."""

from __future__ import annotations

from aionn.errors import AionnError


class StoreError(AionnError):
    """An artifact store cannot be used: it does not answer, it refuses, it is full, or its address is wrong.

    Attributes:
        store: the address.
        reason: what the store answered, or that it did not answer in time.
    """

    def __init__(self, store: str, doing: str, reason: str) -> None:
        super().__init__(f"artifact store {store}: {doing} failed: {reason}")
        self.store = store
        self.reason = reason
