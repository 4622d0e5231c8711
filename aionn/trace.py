"""Spans and counters in monotonic nanoseconds. They cost nothing without a listener.

`listen(callback)` gets every finished span and every counter change of this process. Without a listener `span` returns one shared
object that does nothing. Code on the frame path asks `active` first, so a disabled trace costs one attribute read. Times are
CLOCK_MONOTONIC, which all processes of a machine share. So the spans of an app and a driver fit into one picture.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Counter", "Recording", "Span", "count", "listen", "record", "span", "span_at"]


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work that took time: [started_ns, ended_ns) on CLOCK_MONOTONIC, in one process and thread."""

    name: str
    started_ns: int
    ended_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)
    thread_id: int = field(default_factory=threading.get_native_id)

    @property
    def duration_ns(self) -> int:
        """How long the span took."""
        return self.ended_ns - self.started_ns


@dataclass(frozen=True, slots=True)
class Counter:
    """A change of a counter: `value` more at that moment."""

    name: str
    at_ns: int
    value: int
    attributes: dict[str, Any] = field(default_factory=dict)


Listener = Callable[[Span | Counter], None]
_listeners: tuple[Listener, ...] = ()
_changing = threading.Lock()
active = False
"""Whether there is a listener. Read it before building attributes on a hot path."""


class _Silent(AbstractContextManager["_Silent"]):
    """The object that `span` returns while there is no listener."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        return None


_SILENT = _Silent()


@contextmanager
def _spanning(name: str, attributes: dict[str, Any]) -> Iterator[None]:
    started_ns = time.monotonic_ns()
    try:
        yield
    except BaseException as error:
        attributes["error"] = type(error).__name__
        raise
    finally:
        span_at(name, started_ns, time.monotonic_ns(), **attributes)


def span(name: str, **attributes: Any) -> AbstractContextManager[Any]:
    """Time the body of a `with` block. Attributes must be JSON values. An exception becomes the attribute `error`."""
    return _spanning(name, attributes) if active else _SILENT


def span_at(name: str, started_ns: int, ended_ns: int, **attributes: Any) -> None:
    """Report a span whose ends were measured elsewhere (a queue wait, a driver's execution)."""
    if active:
        _report(Span(name, started_ns, ended_ns, attributes))


def count(name: str, value: int = 1, **attributes: Any) -> None:
    """Report that a counter has grown by `value`."""
    if active:
        _report(Counter(name, time.monotonic_ns(), value, attributes))


def _report(event: Span | Counter) -> None:
    for listener in _listeners:
        listener(event)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener` with each event for the `with` body. It runs where the event happens, so keep it short and never raise."""
    global _listeners, active
    with _changing:
        _listeners = (*_listeners, listener)
        active = True
    try:
        yield
    finally:
        with _changing:
            remaining = list(_listeners)
            remaining.remove(listener)
            _listeners = tuple(remaining)
            active = bool(_listeners)


@dataclass(slots=True)
class Recording:
    """Events in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)

    def total(self, counter: str) -> int:
        """Return the sum of one counter."""
        return sum(event.value for event in self.counters if event.name == counter)

    def write_chrome(self, path: str | Path) -> None:
        """Write a file in the Trace Event Format, which Perfetto and chrome://tracing open (times in microseconds)."""
        pid = os.getpid()
        events: list[dict[str, Any]] = [
            {
                "ph": "X",
                "name": s.name,
                "ts": s.started_ns / 1e3,
                "dur": s.duration_ns / 1e3,
                "pid": s.pid,
                "tid": s.thread_id,
                "args": s.attributes,
            }
            for s in self.spans
        ]
        totals: dict[str, int] = {}
        for c in self.counters:
            totals[c.name] = totals.get(c.name, 0) + c.value
            events.append({"ph": "C", "name": c.name, "ts": c.at_ns / 1e3, "pid": pid, "args": {"value": totals[c.name]}})
        Path(path).write_text(json.dumps(_json({"traceEvents": events, "displayTimeUnit": "ns"}), allow_nan=False), encoding="utf-8")


def _json(value: Any) -> Any:
    """Return a value as JSON has it. Values that JSON lacks (NaN, paths, other enums) become text, so no attribute spoils the file."""
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    return str(value)


@contextmanager
def record() -> Iterator[Recording]:
    """Collect every event of the `with` body."""
    recording = Recording()

    def keep(event: Span | Counter) -> None:
        if isinstance(event, Span):
            recording.spans.append(event)
        else:
            recording.counters.append(event)

    with listen(keep):
        yield recording
