from typing import final

from typing_extensions import Buffer

@final
class Slot:
    """The slot of one prepared model. One execution at a time."""

    def __init__(self, memory: Buffer, offset: int, /) -> None: ...
    def begin(self) -> int:
        """Note that an execution begins. Return when, in ns of CLOCK_MONOTONIC."""

    def end(self, began_ns: int, /) -> int:
        """Note that the execution which began then is over. Return how long it took in ns."""

    def release(self) -> None:
        """Stop writing, and drop the memory. `begin` and `end` still return times."""

def bucket_of(ns: int, /) -> int:
    """Return the histogram's bucket for a duration."""
