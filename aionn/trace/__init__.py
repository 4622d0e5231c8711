"""Spans and counters in monotonic nanoseconds. They cost nothing without a listener.

    events  what a trace consists of
    file    files that Perfetto opens

`listen(callback)` gets every finished span and every counter change that Python code of this process reports. Without a listener `span`
returns one shared object that does nothing. Code asks `active` first where it would build attributes.

A frame of a burst passes native code only, and no listener sees it. A `record` sees it all the same: it asks the app and its drivers to
write records of frames into rings of shared memory (`FrameSource`), and has read them when it ends. So what is recorded is what
runs without a recording. The drivers' own spans come the same way.

Times are CLOCK_MONOTONIC, which all processes of a machine share. So the spans of an app and a driver fit into one picture.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Protocol

from aionn.trace.events import Counter, FrameTimes, Recorded, Span

__all__ = ["Counter", "FrameTimes", "Recording", "Span", "about", "count", "listen", "record", "span", "span_at"]

MOST_EVENTS = 1_000_000
"""The most spans, and the most counter changes, that one recording keeps: the newest ones. The others count as lost."""

Listener = Callable[[Span | Counter], None]
Beginner = Callable[[str, dict[str, Any]], Callable[[dict[str, Any]], None] | None]
"""Is called with a span's name and attributes when it begins, in its task. Returns what to call with its attributes when it ends."""
_listeners: tuple[Listener, ...] = ()
_beginners: tuple[Beginner, ...] = ()
_changing = threading.Lock()
active = False
"""Whether there is a listener. Read it before building attributes on a hot path."""

_about: ContextVar[Mapping[str, Any]] = ContextVar("aionn.trace.about", default=MappingProxyType({}))

captured_ns: ContextVar[int] = ContextVar("aionn.trace.captured_ns", default=0)
"""When the frame was captured that this task sends, in CLOCK_MONOTONIC, or 0. Native code asks for it while frames are traced."""


_SILENT: AbstractContextManager[None] = nullcontext()
"""What `span` and `captured_at` return where there is nothing to do."""


@contextmanager
def _spanning(name: str, attributes: dict[str, Any]) -> Iterator[None]:
    started_ns = time.monotonic_ns()
    ends = [end for begin in _beginners if (end := begin(name, {**_about.get(), **attributes})) is not None]
    try:
        yield
    except BaseException as error:
        attributes["error"] = type(error).__name__
        raise
    finally:
        span_at(name, started_ns, time.monotonic_ns(), **attributes)
        for end in reversed(ends):
            end(attributes)


def span(name: str, **attributes: Any) -> AbstractContextManager[Any]:
    """Time the body of a `with` block. Attributes must be JSON values. An exception becomes the attribute `error`."""
    return _spanning(name, attributes) if active else _SILENT


def span_at(name: str, started_ns: int, ended_ns: int, **attributes: Any) -> None:
    """Report a span whose ends were measured elsewhere (a queue wait, a driver's execution)."""
    if active:
        _report(Span(name, started_ns, ended_ns, {**_about.get(), **attributes}))


def count(name: str, value: int = 1, **attributes: Any) -> None:
    """Report that a counter has grown by `value`."""
    if active:
        _report(Counter(name, time.monotonic_ns(), value, {**_about.get(), **attributes}))


@contextmanager
def about(**attributes: Any) -> Iterator[None]:
    """Add attributes to every span and counter that the body reports, and the tasks that it starts. Empty ones are left out."""
    token = _about.set({**_about.get(), **{name: value for name, value in attributes.items() if value}})
    try:
        yield
    finally:
        _about.reset(token)


def captured_at(at_ns: int) -> AbstractContextManager[Any]:
    """Say in the body when the frame was captured that it sends. 0: it is not known."""
    return _capturing(at_ns) if active and at_ns else _SILENT


@contextmanager
def _capturing(at_ns: int) -> Iterator[None]:
    token = captured_ns.set(at_ns)
    try:
        yield
    finally:
        captured_ns.reset(token)


def _report(event: Span | Counter) -> None:
    for listener in _listeners:
        listener(event)


@contextmanager
def listen(listener: Listener, beginner: Beginner | None = None) -> Iterator[None]:
    """Call `listener` with each event for the `with` body. It runs where the event happens, so keep it short and never raise.

    It sees what Python code of this process reports: compiling, preparing, swaps, single executions, drops. Frames of bursts pass
    native code only, so a listener does not see them and does not slow them down. `record` has them when it ends.

    `beginner` is called where a span begins, under the same conditions. See `Beginner`.
    """
    global _listeners, _beginners, active
    with _changing:
        _listeners = (*_listeners, listener)
        _beginners = _beginners if beginner is None else (*_beginners, beginner)
        active = True
    try:
        yield
    finally:
        with _changing:
            remaining, beginners = list(_listeners), list(_beginners)
            remaining.remove(listener)
            if beginner is not None:
                beginners.remove(beginner)
            _listeners, _beginners = tuple(remaining), tuple(beginners)
            active = bool(_listeners)


# --- recordings -----------------------------------------------------------------------------------------------------------


class Harvest(Protocol):
    """Records that were read and not decoded yet."""

    def add_to(self, recorded: Recorded) -> None:
        """Decode them."""


class FrameSource(Protocol):
    """Where records of frames come from: the statistics page of this process, while it has one."""

    def begin(self, recording: Recording) -> None:
        """Read records from now on."""

    def end(self, recording: Recording) -> None:
        """Read what is left, and add a `Harvest` to the recording. Do nothing if the source has not begun."""


_sources: tuple[FrameSource, ...] = ()
_recordings: tuple[Recording, ...] = ()


class Recording:
    """What happened in the body of `record`.

    Attributes:
        pending: records of frames that are decoded when they are first asked for.
    """

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MOST_EVENTS)
        self._counters: deque[Counter] = deque(maxlen=MOST_EVENTS)
        self._pushed_out = 0
        self._recorded = Recorded()
        self.pending: list[Harvest] = []

    def keep(self, event: Span | Counter) -> None:
        """Add an event that has just ended."""
        if isinstance(event, Span):
            self._pushed_out += len(self._spans) == MOST_EVENTS
            self._spans.append(event)
        else:
            self._pushed_out += len(self._counters) == MOST_EVENTS
            self._counters.append(event)

    def recorded(self) -> Recorded:
        """Return everything. What drivers and frames have recorded is there once the recording has ended."""
        known = self._recorded
        while self.pending:
            self.pending.pop(0).add_to(known)
        return Recorded(
            sorted([*self._spans, *known.spans], key=lambda span: span.ended_ns),
            sorted([*self._counters, *known.counters], key=lambda counter: counter.at_ns),
            known.frames,
            known.processes,
            known.time_namespaces,
            known.lost + self._pushed_out,
        )

    @property
    def spans(self) -> list[Span]:
        """All spans in the order in which they ended. Those of frames and of drivers are there once the recording has ended."""
        recorded = self.recorded()
        of_frames = [span for frame in recorded.frames for span in frame.spans()]
        return sorted([*recorded.spans, *of_frames], key=lambda span: span.ended_ns) if of_frames else recorded.spans

    @property
    def counters(self) -> list[Counter]:
        """All counter changes in their order."""
        return self.recorded().counters

    @property
    def frames(self) -> list[FrameTimes]:
        """The requests of bursts, once the recording has ended."""
        return self.recorded().frames

    @property
    def lost(self) -> int:
        """How many records were lost, because they came faster than they could be read, or were more than a recording keeps."""
        return self.recorded().lost

    def total(self, counter: str) -> int:
        """Return the sum of one counter."""
        return sum(event.value for event in self.counters if event.name == counter)

    def write_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write a file in the Trace Event Format, which Perfetto and chrome://tracing open. It is compressed if `path` ends in ".gz".

        It takes about 1 s for each 50,000 frames. In an app that must not stall, call it with `asyncio.to_thread`.

        Raises:
            OSError: the file cannot be written.
        """
        from aionn.trace.file import write

        write(path, self.recorded())


@contextmanager
def record() -> Iterator[Recording]:
    """Collect what happens in the `with` body: in this process, and in the drivers of its runtimes.

    A thread reads the records of frames meanwhile. The end of the body reads the last ones, which takes some milliseconds.
    """
    global _recordings
    recording = Recording()
    with listen(recording.keep):
        with _changing:
            _recordings = (*_recordings, recording)
            sources = _sources
        for source in sources:
            source.begin(recording)
        try:
            yield recording
        finally:
            with _changing:
                _recordings = tuple(other for other in _recordings if other is not recording)
                sources = _sources
            for source in sources:
                source.end(recording)


def add_source(source: FrameSource) -> None:
    """Let recordings read the records of frames from `source`, those under way too."""
    global _sources
    with _changing:
        _sources = (*_sources, source)
        recordings = _recordings
    for recording in recordings:
        source.begin(recording)


def remove_source(source: FrameSource) -> None:
    """End what `add_source` began."""
    global _sources
    with _changing:
        _sources = tuple(other for other in _sources if other is not source)
        recordings = _recordings
    for recording in recordings:
        source.end(recording)
