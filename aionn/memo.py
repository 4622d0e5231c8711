"""`Memo`: a dictionary of bounded size, for answers that are cheap to keep and can be made again."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """A dictionary that forgets its oldest entry when it is full and a new one comes.

    A hit costs what it costs in a plain dictionary, because only assignment is overridden. Fill it by assignment, in one thread.
    """

    __slots__ = ("_most",)

    def __init__(self, most: int) -> None:
        """Hold at most `most` entries, at least 1."""
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._most and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)
