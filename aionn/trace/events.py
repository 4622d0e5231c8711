"""What a trace consists of: spans, counters, and the times of frames. Times are CLOCK_MONOTONIC in nanoseconds."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class Span(msgspec.Struct, frozen=True):
    """A piece of work that took time: [started_ns, ended_ns) on CLOCK_MONOTONIC, in one process and thread."""

    name: str
    started_ns: int
    ended_ns: int
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)
    pid: int = msgspec.field(default_factory=os.getpid)
    thread_id: int = msgspec.field(default_factory=threading.get_native_id)

    @property
    def duration_ns(self) -> int:
        """How long the span took."""
        return self.ended_ns - self.started_ns


class Counter(msgspec.Struct, frozen=True):
    """A change of a counter: `value` more at that moment."""

    name: str
    at_ns: int
    value: int
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)
    pid: int = msgspec.field(default_factory=os.getpid)


class FrameTimes(msgspec.Struct):
    """When one request of a burst was where. A time is 0 if no record of it was read.

    Attributes:
        queue: names the burst's queues in both processes. identity: of the request in its burst.
        captured_ns: when the frame came from its source, as `Burst.map` or the app has noted it.
        sent_ns: when the app wrote the request. taken_ns: when the driver took it. answered_ns: when the driver had the answer.
        settled_ns: when the app took the answer.
        pid: of the app. driver_pid: of the driver. lane: what took the request in the driver.
        about: what the request belongs to, as far as it is known: "runtime", "model", "burst", "device", "stage".
    """

    queue: int
    identity: int
    captured_ns: int = 0
    sent_ns: int = 0
    taken_ns: int = 0
    answered_ns: int = 0
    settled_ns: int = 0
    pid: int = 0
    driver_pid: int = 0
    lane: str = ""
    about: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def phases(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, start, end) of what the frame went through, in order and without gaps. A phase with an unknown end is left out."""
        times = (self.captured_ns, self.sent_ns, self.taken_ns, self.answered_ns, self.settled_ns)
        for name, started_ns, ended_ns in zip(("capture", "queue", "driver", "return"), times, times[1:], strict=False):
            if started_ns and ended_ns:
                yield name, started_ns, ended_ns

    def spans(self) -> Iterator[Span]:
        """Yield the frame as spans: "burst.queue_wait", "burst.execute" and "burst.return"."""
        attributes = {**self.about, "queue": self.queue, "identity": self.identity}
        for phase, started_ns, ended_ns in self.phases():
            if phase == "driver":
                yield Span("burst.execute", started_ns, ended_ns, attributes, self.driver_pid, 0)
            elif phase != "capture":
                name = "burst.queue_wait" if phase == "queue" else "burst.return"
                yield Span(name, started_ns, ended_ns, attributes, self.pid, 0)


class Recorded(msgspec.Struct):
    """What was recorded, of one process or of several.

    Attributes:
        spans, counters: what Python code has reported.
        frames: requests of bursts, from the records of native code.
        processes: the name of each process, by its number.
        time_namespaces: the inode number of each process's time namespace. Times can be compared where it is the same.
        lost: records that were overwritten before they could be read, or that found no room.
    """

    spans: list[Span] = msgspec.field(default_factory=list)
    counters: list[Counter] = msgspec.field(default_factory=list)
    frames: list[FrameTimes] = msgspec.field(default_factory=list)
    processes: dict[int, str] = msgspec.field(default_factory=dict)
    time_namespaces: dict[int, int] = msgspec.field(default_factory=dict)
    lost: int = 0
