from typing import Final, final

from typing_extensions import Buffer

PAGE_PID: Final[int]
PAGE_START: Final[int]
PAGE_TRACE_UNTIL: Final[int]
PAGE_SEQUENCE: Final[int]
PAGE_SLOTS_USED: Final[int]
PAGE_HEADER_BYTES: Final[int]
SLOT_NUMBER: Final[int]
SLOT_SENT: Final[int]
SLOT_ANSWERED: Final[int]
SLOT_COMPUTED: Final[int]
SLOT_FAILED: Final[int]
SLOT_COPIED_BYTES: Final[int]
SLOT_DRIVER_BUSY_NS: Final[int]
SLOT_LOST: Final[int]
SLOT_DROPPED: Final[int]
SLOT_CONNECTIONS: Final[int]
SLOT_CALL_TIMES: Final[int]
SLOT_SERVICE_TIMES: Final[int]
SLOT_AGES: Final[int]
SLOT_COUNTERS_END: Final[int]
SLOT_WORDS: Final[int]
TRACE_RECORDS: Final[int]
TRACE_BYTES: Final[int]
TRACE_SETTLED: Final[int]

@final
class Trace:
    """Writes trace records while the page asks for them. One writer at a time."""

    def __new__(cls, page: Buffer, /) -> Trace: ...
    def note(self, kind: int, burst: int, identity: int, at_ns: int, first: int, second: int, /) -> None:
        """Write one record, if the page is being traced at that time."""

    def close(self) -> None:
        """Write no more, and drop the ring. No other thread may be writing."""

@final
class Slot:
    """The slot of one prepared model, or of one of its lanes. One execution at a time."""

    def __new__(cls, memory: Buffer, offset: int, trace: Trace | None = None, /) -> Slot: ...
    def begin(self) -> int:
        """Note that an execution begins. Return when, in ns of CLOCK_MONOTONIC."""

    def end(self, began_ns: int, /) -> int:
        """Note that the execution which began then is over. Return how long it took in ns."""

    def drop(self) -> None:
        """Note that the execution which began last is over, and does not count. Only its run was to be seen."""

    def release(self) -> None:
        """Stop writing. `begin` and `end` still return times."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class BurstSlot:
    """What an app counts of one burst, compilation, device or runtime. Without a page, in memory that no other process sees."""

    def __new__(
        cls, trace: Trace | None = None, page: Buffer | None = None, offset: int = 0, parent: BurstSlot | None = None, /
    ) -> BurstSlot: ...
    def add(self, counter: int, more: int, /) -> None:
        """Add to a counter."""

    def computed(self, copied_bytes: int, /) -> None:
        """Count one execution that was answered well, and the bytes that were copied for it."""

    def get(self, word: int, /) -> int:
        """Return a word. A counter includes what has moved to parents, and after `release` it goes on from where it was."""

    def answered(self, call_ns: int, service_ns: int, /) -> None:
        """Count one answer, as the native frame path does. A negative `service_ns` is unknown."""

    def follow(self, parent: BurstSlot, /) -> None:
        """Give the counts so far to the parent before, if there is one, and later ones to this parent."""

    def took(self, histogram: int, ns: int, /) -> None:
        """Count one duration. `histogram` is the first word of the histogram."""

    def describe(self, word: int, content: Buffer, /) -> None:
        """Store whole words in front of the counters. A reader sees all of them or none."""

    def release(self) -> None:
        """Leave the page, which adds the counts to the parent's. Idempotent. The end of the object does it too."""

    def become_sum_of(self, slots: list[BurstSlot], /) -> None:
        """Store the sums of these slots' counters and histograms."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def bucket_of(ns: int, /) -> int:
    """Return the histogram's bucket for a duration."""

def leave_page() -> None:
    """Release every `BurstSlot` that is on the app's page."""

def snapshot(page: Buffer, slot_bytes: int, /) -> bytes | None:
    """Return header and used slots of one moment, or None if the page kept changing."""

def take_records(ring: Buffer, cursor: int, /) -> tuple[bytes, int, int]:
    """Return new records, the next cursor, and how many records were overwritten before they could be read."""
