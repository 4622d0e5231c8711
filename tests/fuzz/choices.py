"""What a target is, and bytes as a sequence of choices: so that a mutated byte is another call, not only another number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

EDGES = (
    0, 1, 2, 3, 4, 7, 8, 15, 16, 24, 63, 64, 65, 127, 128, 192, 255, 256, 320, 511, 512, 4095, 4096, 65535, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
"""Where fields, pages, signs and words end."""


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to fuzz.

    Attributes:
        one: takes any bytes; what it raises is a finding.
        seeds: inputs to start from.
        max_bytes: inputs are not made longer.
        short_runs, soak_runs: inputs in the normal suite, and in the soak.
    """

    one: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    max_bytes: int
    short_runs: int
    soak_runs: int


class Choices:
    """Takes choices from bytes. When they are used up every choice is the first one, and `left` is False."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def piece(self, count: int) -> bytes:
        """So many, or what is left."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def below(self, bound: int) -> int:
        return self.byte() % bound if bound <= 256 else int.from_bytes(self.piece(4), "little") % bound

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def number(self) -> int:
        """A small one, an edge, the neighbour or the opposite of one, or any of 64 bits."""
        kind = self.byte()
        if kind < 96:
            return self.byte()
        if kind < 160:
            return self.of(EDGES)
        if kind < 192:
            return self.of(EDGES) + self.below(5) - 2
        if kind < 208:
            return -self.of(EDGES)
        return int.from_bytes(self.piece(8), "little")

    def rest(self) -> bytes:
        return self.piece(len(self._data))
