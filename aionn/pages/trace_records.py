"""What trace records mean: spans and counters as records, and records as spans, counters and the times of frames. No I/O.

A span or a counter of Python code is one EVENT record, followed by TEXT records with 24 bytes of its text each. Other records of the same
ring may stand between them.

    EVENT  burst: thread      identity: the event's number  at_ns: start  first: end, or 0 of a counter  second: bytes of the text
    TEXT   burst: event       identity, first, second: 24 bytes of the text                              at_ns: that of the event

The text is JSON: [name, attributes] of a span, [name, attributes, value] of a counter.

Invariant
    Nothing here raises for records that are missing or that make no sense, because another process has written them.
"""

from __future__ import annotations

import itertools
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from aionn.pages.app_layout import TraceKind, records_in
from aionn.trace.events import Counter, FrameTimes, Recorded, Span

Note = tuple[int, int, int, int, int, int]
"""Kind, burst, identity, at_ns, first and second of a record."""

NAMED = "slot.named"
"""The counter that says what a slot belongs to: its attributes are "slot" and those of `app_layout.named`. A trace leaves it out."""

MOST_TEXT_BYTES = 2048
"""Longer texts lose their attributes."""

_numbers = itertools.count(1)
_CHUNK = struct.Struct("<3Q")


def notes_of(event: Span | Counter) -> Iterator[Note]:
    """Yield the records that stand for a span or a counter, or nothing in a process that has no free descriptor to import with."""
    try:
        import json  # most processes are never traced
    except OSError:
        return  # a trace must not end the work that it shows

    number = next(_numbers)
    span = isinstance(event, Span)
    value = [] if isinstance(event, Span) else [event.value]
    text = json.dumps([event.name, event.attributes, *value], default=str).encode()
    if len(text) > MOST_TEXT_BYTES:
        text = json.dumps([event.name[:256], {}, *value]).encode()
    at_ns, ended_ns = (event.started_ns, event.ended_ns) if isinstance(event, Span) else (event.at_ns, 0)
    yield TraceKind.EVENT, event.thread_id if isinstance(event, Span) else 0, number, at_ns, ended_ns if span else 0, len(text)
    for at in range(0, len(text), _CHUNK.size):
        identity, first, second = _CHUNK.unpack(text[at : at + _CHUNK.size].ljust(_CHUNK.size, b"\0"))
        yield TraceKind.TEXT, number, identity, at_ns, first, second


class BurstNames:
    """What bursts belong to, by the numbers of their slots, as a page has shown it at one time and another."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}

    def note(self, names: Mapping[int, Mapping[str, Any]], at_ns: int) -> None:
        """Note what the page shows at that time."""
        for slot, found in names.items():
            seen = self._seen.setdefault(slot, [])
            if not seen or seen[-1][1] != found:
                seen.append((at_ns, found))
                seen.sort(key=lambda one: one[0])

    def at(self, slot: int, at_ns: int) -> Mapping[str, Any]:
        """Return what the burst belonged to at that time, as far as it is known."""
        seen = self._seen.get(slot)
        if not seen:
            return {}
        return seen[max(0, bisect_right(seen, at_ns, key=lambda one: one[0]) - 1)][1]


class RingRecords(NamedTuple):
    """Records of one ring, one after the other. `lane` names the ring in its process."""

    pid: int
    lane: str
    records: bytes


def add_records(recorded: Recorded, contents: Iterable[RingRecords], names: BurstNames, python_of: int = 0) -> None:
    """Decode records. `python_of`: the process whose spans and counters are known already, so that they are left out."""
    frames: dict[tuple[int, int], FrameTimes] = {}
    slots: list[tuple[FrameTimes, int]] = []
    texts: dict[tuple[int, int], bytearray] = {}
    events: list[tuple[Span, int, int]] = []

    def frame_of(queue: int, identity: int) -> FrameTimes:
        found = frames.get((queue, identity))
        if found is None:
            found = frames[queue, identity] = FrameTimes(queue, identity)
            recorded.frames.append(found)
        return found

    for content in contents:
        pid, lane = content.pid, content.lane
        for _, kind, burst, identity, at_ns, first, second in records_in(content.records):
            match kind:
                case TraceKind.SENT:
                    frame = frame_of(burst, identity)
                    if frame.sent_ns:  # the number of an earlier queue, which is gone
                        del frames[burst, identity]
                        frame = frame_of(burst, identity)
                    frame.pid, frame.sent_ns, frame.captured_ns = pid, at_ns, second if second <= at_ns else 0
                    slots.append((frame, first))
                case TraceKind.SETTLED:
                    frame = frame_of(burst, identity)
                    frame.pid, frame.settled_ns = pid, at_ns
                case TraceKind.TAKEN:
                    frame = frame_of(burst, identity)
                    frame.driver_pid, frame.taken_ns, frame.lane = pid, at_ns, lane
                case TraceKind.ANSWERED:
                    frame = frame_of(burst, identity)
                    frame.driver_pid, frame.answered_ns, frame.lane = pid, at_ns, lane
                case TraceKind.EVENT:
                    events.append((Span("", at_ns, first, {}, pid, burst), identity, second))
                case TraceKind.TEXT:
                    texts.setdefault((pid, burst), bytearray()).extend(_CHUNK.pack(identity, first, second))
    for shape, number, size in events:
        event = _event(texts.get((shape.pid, number), b"")[:size], shape, size)
        if event is None:
            recorded.lost += 1
        elif event.name == NAMED and isinstance(event, Counter):
            slot = event.attributes.pop("slot", 0)
            if isinstance(slot, int):
                names.note({slot: event.attributes}, event.at_ns)
        elif event.pid != python_of:
            _add(recorded, event, frame_of)
    for frame, slot in slots:
        frame.about = names.at(slot, frame.sent_ns)
    for frame in recorded.frames:
        _put_in_order(frame)


def _event(text: bytes | bytearray, shape: Span, size: int) -> Span | Counter | None:
    """Return a span or a counter with the times of `shape`, or None if a part of it is missing."""
    import json

    try:
        name, attributes, *value = json.loads(text)
    except (ValueError, TypeError):
        return None
    if len(text) != size or not isinstance(name, str) or not isinstance(attributes, dict):
        return None
    if not shape.ended_ns:
        grown = value[0] if value and isinstance(value[0], int) else 1
        return Counter(name, shape.started_ns, grown, attributes, shape.pid)
    return Span(name, shape.started_ns, shape.ended_ns, attributes, shape.pid, shape.thread_id)


def _add(recorded: Recorded, event: Span | Counter, frame_of: Callable[[int, int], FrameTimes]) -> None:
    """Add an event. What the listener of a burst has answered itself is the time of a frame."""
    queue, identity = event.attributes.get("queue"), event.attributes.get("identity")
    if isinstance(event, Counter):
        recorded.counters.append(event)
    elif event.name == "burst.execute" and isinstance(queue, int) and isinstance(identity, int):
        frame = frame_of(queue, identity)
        frame.driver_pid, frame.lane = event.pid, f"listener of burst {queue}"
        frame.taken_ns, frame.answered_ns = event.started_ns, event.ended_ns
    else:
        recorded.spans.append(event)


def _put_in_order(frame: FrameTimes) -> None:
    """Let no time be before the one before it. An answer may come while the app looks, and the app's time is that of the look."""
    before_ns = 0
    for name in ("sent_ns", "taken_ns", "answered_ns", "settled_ns"):
        at_ns = getattr(frame, name)
        if at_ns:
            before_ns = max(before_ns, at_ns)
            if at_ns < before_ns:
                setattr(frame, name, before_ns)
