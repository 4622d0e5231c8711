"""Where each number of an app's page lies, and of a trace record, and what they mean. No I/O; burst_slot.h and trace_ring.h repeat them.

All slots of an app's page have one form. What a slot is for says its first word.

    other        counts for what found no free slot; written with the heartbeat, so it is up to half a second old
    runtime      one open `Runtime`: its name, its event loop's heartbeat, the counts of compilations that are closed
    device       one driver process
    compilation  the counts of its bursts that are closed
    burst        one open burst, also the one behind `Compilation.compute`

Invariants
    A slot's first word is 0 if and only if the slot is free.
    What a slot counts moves to its parent when it ends. So the sum over all slots of a page never falls.
    The durations of `call_times` add up to ANSWERED, except while an answer is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from aionn.pages import layout

SLOT_BYTES = 2048
SLOT_WORDS = SLOT_BYTES // 8
SLOTS = (layout.STACK_OFFSET - layout.SLOT_OFFSET) // SLOT_BYTES

# Words of a slot.
KIND, NUMBER, PARENT, SINCE, BEAT, PID = range(6)
NAME, DEVICE, STAGE, TEXT_BYTES = 8, 16, 24, 64
SENT, ANSWERED, COMPUTED, FAILED, COPIED_BYTES, DRIVER_BUSY_NS, LOST, DROPPED, CONNECTIONS, FELL_BACK = range(32, 42)
CALL_TIMES, SERVICE_TIMES = 64, 160

COUNTERS: Mapping[str, int] = {
    "sent": SENT,
    "answered": ANSWERED,
    "computed": COMPUTED,
    "failed": FAILED,
    "copied_bytes": COPIED_BYTES,
    "driver_busy_ns": DRIVER_BUSY_NS,
    "lost": LOST,
    "dropped": DROPPED,
    "connections": CONNECTIONS,
    "fell_back": FELL_BACK,
}

TRACE_RECORDS = 8192
TRACE_BYTES = 4096 + TRACE_RECORDS * 64
TRACE_MAGIC = 0x006372746E6E6F69
TRACE_WORD_PID, TRACE_WORD_START, TRACE_WORD_RECORDS = 1, 2, 3


class Kind(IntEnum):
    """What a slot is for."""

    OTHER = 1
    RUNTIME = 2
    DEVICE = 3
    COMPILATION = 4
    BURST = 5


class TraceKind(IntEnum):
    """What happened to a frame. The app writes SENT and SETTLED, and a lane of its driver TAKEN and ANSWERED."""

    SENT = 1
    TAKEN = 2
    ANSWERED = 5
    SETTLED = 6


class TraceRecord(NamedTuple):
    """One thing that happened to one frame.

    Attributes:
        number: of the record in its ring, from 0.
        kind: a `TraceKind`.
        burst: names the burst in both processes. identity: of the request in its burst.
        at_ns: CLOCK_MONOTONIC. first, second: free, by kind.
    """

    number: int
    kind: int
    burst: int
    identity: int
    at_ns: int
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot, at one moment.

    Attributes:
        kind: what it is for. number: no other slot of this process has or had it.
        parent: number of the slot that gets the counts at the end, or 0.
        since_ns: when the slot was taken. beat_ns: a runtime's last heartbeat. pid: of a device's driver, or 0.
        name, device, stage: texts, cut to 64 bytes.
        counters: by the names of `COUNTERS`.
        call_times, service_times: histograms; `layout.longest_in_bucket_s` has their edges.
    """

    kind: Kind
    number: int
    parent: int
    since_ns: int
    beat_ns: int
    pid: int
    name: str
    device: str
    stage: str
    counters: Mapping[str, int]
    call_times: Sequence[int]
    service_times: Sequence[int]

    @property
    def in_flight(self) -> int:
        """Requests that have not been answered."""
        return max(0, self.counters["sent"] - self.counters["answered"] - self.counters["lost"])


@dataclass(frozen=True, slots=True)
class PageView:
    """An app's page, at one moment.

    Attributes:
        pid, start_time: which process this is; see `start_time_of`.
        release: of aionn. time_namespace: the inode number of the process's time namespace.
        trace_until_ns: until when frames are traced, or 0.
        slots_lost: how often no slot was free.
        slots: those in use.
    """

    pid: int
    start_time: int
    release: str
    time_namespace: int
    trace_until_ns: int
    slots_lost: int
    slots: tuple[SlotView, ...]

    def total(self, counter: str) -> int:
        """Return the sum of one counter over all slots."""
        return sum(slot.counters[counter] for slot in self.slots)


def text(name: str) -> bytes:
    """Return a name as a slot has it: UTF-8, cut to 64 bytes between two characters, filled up with zeros."""
    cut = name.encode("utf-8", "replace")[:TEXT_BYTES].decode("utf-8", "ignore").encode()
    return cut.ljust(TEXT_BYTES, b"\0")


def description(kind: Kind, number: int, parent: int, since_ns: int, texts: Sequence[str]) -> bytes:
    """Return the words of a slot in front of its counters. `texts` are its name, its device and its stage."""
    head = struct.pack("=8Q", kind, number, parent, since_ns, 0, 0, 0, 0)
    return head + b"".join(text(texts[i] if i < len(texts) else "") for i in range(3))


def view(page: bytes) -> PageView:
    """Read a page from a copy of its header and its used slots."""
    words = memoryview(page).cast("Q")
    release = page[layout.RELEASE_WORD * 8 :][: layout.RELEASE_BYTES]
    return PageView(
        pid=words[layout.HEADER_PID],
        start_time=words[layout.HEADER_START],
        release=_text_in(release),
        time_namespace=words[layout.TIME_NAMESPACE],
        trace_until_ns=words[layout.TRACE_UNTIL],
        slots_lost=words[layout.SLOTS_LOST],
        slots=tuple(_slots_in(page, words)),
    )


def _slots_in(page: bytes, words: memoryview) -> Iterator[SlotView]:
    kinds = {int(kind) for kind in Kind}
    for at in range(layout.SLOT_OFFSET, len(page) - SLOT_BYTES + 1, SLOT_BYTES):
        first = at // 8
        if words[first] in kinds:
            name, device, stage = (_text_in(page[at + word * 8 :][:TEXT_BYTES]) for word in (NAME, DEVICE, STAGE))
            number, parent, since_ns, beat_ns, pid = words[first + NUMBER : first + PID + 1]
            yield SlotView(
                kind=Kind(words[first]),
                number=number,
                parent=parent,
                since_ns=since_ns,
                beat_ns=beat_ns,
                pid=pid,
                name=name,
                device=device,
                stage=stage,
                counters={counter: words[first + word] for counter, word in COUNTERS.items()},
                call_times=words[first + CALL_TIMES : first + CALL_TIMES + layout.BUCKETS].tolist(),
                service_times=words[first + SERVICE_TIMES : first + SERVICE_TIMES + layout.BUCKETS].tolist(),
            )


def _text_in(content: bytes) -> str:
    return content.rstrip(b"\0").decode("utf-8", "replace")


def records_in(content: bytes) -> list[TraceRecord]:
    """Return the trace records in a copy of a ring's part."""
    return [TraceRecord(*words[:7]) for words in struct.iter_unpack("=8Q", content)]
