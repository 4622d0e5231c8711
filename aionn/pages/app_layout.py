"""Where each number of an app's page lies, and of a trace record, and what they mean. No I/O; burst_slot.h and trace_ring.h repeat them.

All slots of an app's page have one form. What a slot is for says its first word.

    other         counts for what found no free slot; written with the heartbeat, so it is up to a second old
    runtime       one open `Runtime`: its name, its state (in the text DEVICE), its event loop's heartbeat
    compilation   one open compilation: its name
    burst         one open burst
    single        one connection behind `Compilation.compute` or `Compilation.start`
    past bursts   what bursts have counted that are closed, or that a swap has moved to another device or stage
    past singles  the same for singles
    device        the driver processes of one device, and the compilations on it
    stage         one stage of the compilations of one name: its state (in the text DEVICE)
    cache         one cache directory, by its last name

Slots of the last five kinds stay until the page is closed. Their texts are keys: no two slots have the same kind and texts.

Invariants
    A slot's first word is 0 if and only if the slot is free.
    What a slot counts moves to its parent when it ends. So the sum over all slots of a page never falls, and with `Kind.PAST_BURSTS`
    and `Kind.PAST_SINGLES` as parents neither does the sum over the slots with the same model, burst, device and stage.
    The durations of `call_times` add up to ANSWERED, except while an answer is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from aionn.pages import layout

SLOT_BYTES = 3072
SLOT_WORDS = SLOT_BYTES // 8
SLOTS = (layout.PAGE_BYTES - layout.SLOT_OFFSET) // SLOT_BYTES

# Words of a slot.
KIND, NUMBER, PARENT, SINCE, BEAT, PID, FIRST_GAUGE, SECOND_GAUGE = range(8)
NAME, DEVICE, STAGE, BURST, RUNTIME, TEXT_BYTES = 8, 16, 24, 32, 40, 64
TEXTS = (NAME, DEVICE, STAGE, BURST, RUNTIME)
FIRST_COUNTER, COUNTERS_END = 48, 96
SENT, ANSWERED, COMPUTED, FAILED, COPIED_BYTES, DRIVER_BUSY_NS, LOST, DROPPED, CONNECTIONS, FELL_BACK = range(48, 58)
LATE, REFUSED, DIED, HUNG, DROPPED_REPLACED, DROPPED_LATE, DROPPED_REJECTED, JOINED_RUNS, JOINED_ROWS = range(58, 67)
CALL_TIMES, SERVICE_TIMES, AGES = 96, 192, 288

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
    "late": LATE,
    "refused": REFUSED,
    "died": DIED,
    "hung": HUNG,
    "dropped_replaced": DROPPED_REPLACED,
    "dropped_late": DROPPED_LATE,
    "dropped_rejected": DROPPED_REJECTED,
    "joined_runs": JOINED_RUNS,
    "joined_rows": JOINED_ROWS,
}
"""Of the slots that count executions. `late` to `hung` are calls that ended with `DeadlineError`, `CallerError`, `DriverDiedError` and
`DriverHungError`. `dropped` includes the three reasons behind it. Past bursts have what drivers have run with `batch=`, and its rows."""

STARTS, EXITS, SIGNALS, HANGS, PROTOCOL_ENDS, CLOSED, HITS, MISSES, DECLINED, NO_CACHE, FAILED_COMPILES = range(48, 59)
REASONS = 64
"""The counter of the first `MissReason`. Those of the others follow, in the order of the enumeration. Of a device it is why a
compilation missed, and of a cache why an entry was refused."""

DEVICE_COUNTERS: Mapping[str, int] = {
    "starts": STARTS,
    "exit": EXITS,
    "signal": SIGNALS,
    "hung": HANGS,
    "protocol": PROTOCOL_ENDS,
    "closed": CLOSED,
    "hit": HITS,
    "miss": MISSES,
    "declined": DECLINED,
    "no_cache": NO_CACHE,
    "failed": FAILED_COMPILES,
}
"""Of a device: driver processes that were started, how they ended, and how compilations came out. CALL_TIMES has their durations."""

STAGE_STATES = ("waiting", "compiling", "loading", "comparing", "serving", "replaced", "rejected", "skipped")
STAGE_COUNTERS: Mapping[str, int] = {state: FIRST_COUNTER + number for number, state in enumerate(STAGE_STATES)}
"""Of a stage: how often it entered each state. CALL_TIMES has the durations of swaps to it."""

EVICTED = 48
CACHE_COUNTERS: Mapping[str, int] = {"evicted": EVICTED}

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
    SINGLE = 6
    PAST_BURSTS = 7
    PAST_SINGLES = 8
    STAGE = 9
    CACHE = 10


_COUNTERS_OF: Mapping[Kind, Mapping[str, int]] = {Kind.DEVICE: DEVICE_COUNTERS, Kind.STAGE: STAGE_COUNTERS, Kind.CACHE: CACHE_COUNTERS}
_WITH_REASONS = (Kind.DEVICE, Kind.CACHE)


class TraceKind(IntEnum):
    """What happened. The app writes SENT and SETTLED of a frame, and a lane of its driver TAKEN and ANSWERED. EVENT and TEXT are a span or
    a counter of Python code, in the app or the driver; see `trace_records`."""

    SENT = 1
    TAKEN = 2
    EVENT = 3
    TEXT = 4
    ANSWERED = 5
    SETTLED = 6


class TraceRecord(NamedTuple):
    """One thing that happened to one frame.

    Attributes:
        number: of the record in its ring, from 0.
        kind: a `TraceKind`.
        burst: names the burst in both processes. identity: of the request in its burst.
        at_ns: CLOCK_MONOTONIC.
        first: of SENT the number of the burst's slot, of TAKEN the deadline or 0, of ANSWERED and SETTLED how long the driver took in ns.
        second: of SENT when the frame was captured, or 0.
    """

    number: int
    kind: int
    burst: int
    identity: int
    at_ns: int
    first: int
    second: int


class SlotView(NamedTuple):
    """One slot, at one moment.

    Attributes:
        kind: what it is for. number: no other slot of this process has or had it.
        parent: number of the slot that gets the counts at the end, or 0.
        since_ns: when the slot was taken, or followed another parent. beat_ns: a runtime's last heartbeat. pid: of a device's driver, or 0.
        gauges: two numbers of this moment. Of a burst: bytes of its shared memory, and frames that are free. Of a device: compilations
            that are under way, and 0. Of a cache: its bytes and its entries.
        name, device, stage, burst, runtime: texts, cut to 64 bytes. `name` is that of the runtime, the compilation's model, the device or
            the cache.
        counters: by the names of `COUNTERS`; or of `DEVICE_COUNTERS`, `STAGE_COUNTERS` or `CACHE_COUNTERS` for slots of these kinds.
        reasons: of a device or a cache: one count for each `MissReason`, and zeros. Else empty.
        call_times, service_times, ages: histograms; `layout.longest_in_bucket_s` has their edges. `ages` are those of streams' frames
            when their result was handed out.
    """

    kind: Kind
    number: int
    parent: int
    since_ns: int
    beat_ns: int
    pid: int
    gauges: tuple[int, int]
    name: str
    device: str
    stage: str
    burst: str
    runtime: str
    counters: Mapping[str, int]
    reasons: Sequence[int]
    call_times: Sequence[int]
    service_times: Sequence[int]
    ages: Sequence[int]

    @property
    def executes(self) -> bool:
        """Whether the slot counts executions, so that its counters are those of `COUNTERS`."""
        return self.kind not in _COUNTERS_OF

    @property
    def in_flight(self) -> int:
        """Requests that have not been answered."""
        if not self.executes:
            return 0
        return max(0, self.counters["sent"] - self.counters["answered"] - self.counters["lost"])


class PageView(NamedTuple):
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
        """Return the sum of one counter of `COUNTERS` over all slots that count executions."""
        return sum(slot.counters[counter] for slot in self.slots if slot.executes)


def text(name: str) -> bytes:
    """Return a name as a slot has it: UTF-8, cut to 64 bytes between two characters, filled up with zeros."""
    cut = name.encode("utf-8", "replace")
    if len(cut) > TEXT_BYTES:
        cut = cut[:TEXT_BYTES].decode("utf-8", "ignore").encode()
    return cut.ljust(TEXT_BYTES, b"\0")


def shown_text(name: str) -> str:
    """Return a name as readers of a slot see it."""
    return _text_in(text(name))


_NO_TEXT = bytes(TEXT_BYTES)


def description(kind: Kind, number: int, parent: int, since_ns: int, texts: Sequence[str]) -> bytes:
    """Return the words of a slot in front of its counters. `texts` are its name, device, stage, burst and runtime."""
    head = struct.pack("=8Q", kind, number, parent, since_ns, 0, 0, 0, 0)
    return head + b"".join([text(shown) if shown else _NO_TEXT for shown in texts]) + _NO_TEXT * (len(TEXTS) - len(texts))


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
            kind = Kind(words[first])
            name, device, stage, burst, runtime = (_text_in(page[at + word * 8 : at + word * 8 + TEXT_BYTES]) for word in TEXTS)
            number, parent, since_ns, beat_ns, pid, *gauges = words[first + NUMBER : first + SECOND_GAUGE + 1]
            yield SlotView(
                kind=kind,
                number=number,
                parent=parent,
                since_ns=since_ns,
                beat_ns=beat_ns,
                pid=pid,
                gauges=(gauges[0], gauges[1]),
                name=name,
                device=device,
                stage=stage,
                burst=burst,
                runtime=runtime,
                counters={counter: words[first + word] for counter, word in _COUNTERS_OF.get(kind, COUNTERS).items()},
                reasons=words[first + REASONS : first + COUNTERS_END].tolist() if kind in _WITH_REASONS else (),
                call_times=words[first + CALL_TIMES : first + CALL_TIMES + layout.BUCKETS].tolist(),
                service_times=words[first + SERVICE_TIMES : first + SERVICE_TIMES + layout.BUCKETS].tolist(),
                ages=words[first + AGES : first + AGES + layout.BUCKETS].tolist(),
            )


def _text_in(content: bytes) -> str:
    return content.rstrip(b"\0").decode("utf-8", "replace")


def names_in(page: bytes) -> dict[int, dict[str, str]]:
    """Return what slots of bursts belong to, by the slots' numbers, from a copy of a page. Unknown names are left out."""
    words = memoryview(page).cast("Q")
    found = {}
    for at in range(layout.SLOT_OFFSET, len(page) - SLOT_BYTES + 1, SLOT_BYTES):
        if words[at // 8] in (Kind.BURST, Kind.SINGLE):
            texts = (_text_in(page[at + word * 8 : at + word * 8 + TEXT_BYTES]) for word in TEXTS)
            found[words[at // 8 + NUMBER]] = named(texts)
    return found


def named(texts: Iterable[str]) -> dict[str, str]:
    """Return the texts of a burst's slot by what they are. Empty ones are left out."""
    return {name: text for name, text in zip(("model", "device", "stage", "burst", "runtime"), texts, strict=False) if text}


def records_in(content: bytes) -> list[TraceRecord]:
    """Return the trace records in a copy of a ring's part."""
    return [TraceRecord(*words[:7]) for words in struct.iter_unpack("=8Q", content)]
