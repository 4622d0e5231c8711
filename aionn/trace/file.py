"""Files in the Trace Event Format, which Perfetto and chrome://tracing open.

    slices ("X")           work that nests in its thread: runs on a lane of a driver, and what Python did
    async events (b, e)    requests in flight, with their phases, and spans of Python that overlap in one thread
    flows (s, t, f)        one for each frame: capture, queue, driver, result
    counters ("C")         running sums, one for each burst or device
    metadata ("M")         names of processes and threads

A flow binds to a slice around its time. So the app has a short slice wherever a frame is captured, sent or settled, on one track for
each burst. Every slice is at least 1 ns long, because viewers drop empty ones.

Invariant
    Two slices of one thread are apart, or one lies in the other.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import math
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any

from aionn.trace.events import Counter, FrameTimes, Recorded, Span

TRACKS = 1 << 24
"""Numbers of tracks that are not threads. Every thread has a smaller number (the kernel allows 2^22)."""

SHORT_NS = 1000
"""The longest slice for the moment at which a frame is captured, sent or settled."""

_LABELS = ("runtime", "model", "burst", "device", "stage")


def write(path: str | os.PathLike[str], recorded: Recorded) -> None:
    """Write a file, compressed if its name ends in ".gz". Of several processes that write the same file, the last one's stays, whole.

    Raises:
        OSError: the file cannot be written.
    """
    with ExitStack() as open_files:
        raw = open_files.enter_context(open(path, "wb", opener=_alone))
        packed = open_files.enter_context(gzip.GzipFile("", "wb", 6, raw)) if str(path).endswith(".gz") else raw
        text = open_files.enter_context(io.TextIOWrapper(packed, encoding="utf-8"))
        text.write('{"displayTimeUnit":"ns","otherData":' + _dumps(_about(recorded)) + ',"traceEvents":[')
        before = "\n"
        for line in _lines(recorded):
            text.write(before)
            text.write(line)
            before = ",\n"
        text.write("\n]}\n")


def _alone(path: str, flags: int) -> int:
    """Open a file for writing once no other process of aionn writes it. Only then it is emptied."""
    fd = os.open(path, flags & ~os.O_TRUNC, 0o666)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            with suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _about(recorded: Recorded) -> dict[str, Any]:
    """Return the metadata of the whole file. The wall time stands here once, because times in events are monotonic."""
    return {
        "wall_time": datetime.now(UTC).isoformat(),
        "wall_time_at_monotonic_ns": time.monotonic_ns(),
        "time_namespaces": recorded.time_namespaces,
        "lost_records": recorded.lost,
        "writer": "aionn",
    }


def _lines(recorded: Recorded) -> Iterator[str]:
    tracks = _Tracks()
    yield from _process_names(recorded)
    yield from _frames(recorded.frames, tracks)
    yield from _spans(recorded.spans, tracks)
    yield from _counters(recorded.counters)
    yield from tracks.names()
    if recorded.lost:
        ends = [frame.settled_ns for frame in recorded.frames[-1:]] + [span.ended_ns for span in recorded.spans[-1:]]
        pid = next(iter(recorded.processes), 0)
        name = f"{recorded.lost} trace records were lost"
        yield _line("i", name, pid, pid, max(ends, default=0), s="g", args={"lost": recorded.lost})


def _process_names(recorded: Recorded) -> Iterator[str]:
    pids = {span.pid for span in recorded.spans} | {counter.pid for counter in recorded.counters} | recorded.processes.keys()
    for number, pid in enumerate(sorted(pids, key=lambda pid: (recorded.processes.get(pid, "app").startswith("driver"), pid))):
        yield _line("M", "process_name", pid, 0, args={"name": recorded.processes.get(pid, "app")})
        yield _line("M", "process_sort_index", pid, 0, args={"sort_index": number})


class _Tracks:
    """Threads, and tracks that are shown like threads, with their names."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], str] = {}
        self._made: dict[tuple[int, str, int], int] = {}

    def thread(self, pid: int, thread_id: int) -> int:
        self._names.setdefault((pid, thread_id), "main thread" if pid == thread_id else f"thread {thread_id}")
        return thread_id

    def track(self, pid: int, name: str, number: int = 0) -> int:
        """Return the track of a process with that name and number. Two tracks may have one name."""
        made = self._made.get((pid, name, number))
        if made is None:
            made = self._made[pid, name, number] = TRACKS + len(self._made)
            self._names[pid, made] = name
        return made

    def names(self) -> Iterator[str]:
        for (pid, thread), name in self._names.items():
            yield _line("M", "thread_name", pid, thread, args={"name": name})


# --- frames ---------------------------------------------------------------------------------------------------------------


def _frames(frames: Sequence[FrameTimes], tracks: _Tracks) -> Iterator[str]:
    """Yield all events of frames: first what is in flight, then the slices of each track in their order, with the flows in them."""
    moments: dict[tuple[int, int], list[tuple[int, int, str, int]]] = defaultdict(list)  # (start, end, name, number of the frame)
    for number, frame in enumerate(frames):
        if frame.pid:
            track = tracks.track(frame.pid, f"{label_of(frame.about)} in and out", frame.queue)
            named = (("capture", frame.captured_ns), ("send", frame.sent_ns), ("result", frame.settled_ns))
            moments[frame.pid, track] += ((at_ns, at_ns, name, number) for name, at_ns in named if at_ns)
            if frame.sent_ns:
                yield from _in_flight(frame, track)
        if frame.driver_pid and frame.taken_ns and frame.answered_ns:
            lane = frame.driver_pid, tracks.track(frame.driver_pid, frame.lane)
            moments[lane].append((frame.taken_ns, frame.answered_ns, "execute", number))
    slices = _apart(moments)
    flows: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for pid, track, started_ns, ended_ns, name, number in slices:
        frame = frames[number]
        flows[number].append((started_ns, pid, track))
        arguments = {**frame.about, "identity": frame.identity}
        yield _line("X", name, pid, track, started_ns, dur=ended_ns - started_ns, args=arguments)
    for number, steps in flows.items():
        steps.sort()
        for step, (at_ns, pid, track) in enumerate(steps if len(steps) > 1 else ()):
            phase = "s" if step == 0 else "f" if step == len(steps) - 1 else "t"
            yield _line(phase, "frame", pid, track, at_ns, cat="frame", id=number + 1, bp="e")


def _in_flight(frame: FrameTimes, track: int) -> Iterator[str]:
    """Yield a request in flight as an async event, with its phases in it."""
    more: dict[str, Any] = {"cat": label_of(frame.about), "id2": {"local": f"{frame.queue:x}-{frame.identity}"}}
    phases = list(frame.phases())
    started_ns = frame.captured_ns or frame.sent_ns
    ended_ns = max(frame.settled_ns, started_ns, *(end for _, _, end in phases)) if phases else started_ns
    arguments = {**frame.about, "identity": frame.identity}
    if not frame.settled_ns:
        arguments["finished"] = False
    yield _line("b", "frame", frame.pid, track, started_ns, args=arguments, **more)
    for name, start_ns, end_ns in phases:
        yield _line("b", name, frame.pid, track, start_ns, **more)
        yield _line("e", name, frame.pid, track, end_ns, **more)
    yield _line("e", "frame", frame.pid, track, ended_ns, **more)


def _apart(moments: Mapping[tuple[int, int], list[tuple[int, int, str, int]]]) -> Iterator[tuple[int, int, int, int, str, int]]:
    """Yield the slices of each track one after the other. Those that began at the same time move by nanoseconds."""
    for (pid, track), found in moments.items():
        found.sort()
        free_ns = 0
        for at, (started_ns, ended_ns, name, number) in enumerate(found):
            start_ns = max(started_ns, free_ns)
            if ended_ns == started_ns:  # a moment, shown as long as there is room
                following_ns = found[at + 1][0] if at + 1 < len(found) else start_ns + SHORT_NS
                ended_ns = min(start_ns + SHORT_NS, following_ns)
            free_ns = max(ended_ns, start_ns + 1)
            yield pid, track, start_ns, free_ns, name, number


def label_of(about: Mapping[str, Any]) -> str:
    """Return what a viewer shows of a burst: its name and its model, as far as they are known."""
    burst, model = about.get("burst"), about.get("model")
    if burst and model:
        return f"{burst} ({model})"
    return str(burst or model or "burst")


# --- spans and counters ---------------------------------------------------------------------------------------------------


def _spans(spans: Sequence[Span], tracks: _Tracks) -> Iterator[str]:
    """Yield spans as slices where they nest in their thread, and as async events where they do not."""
    threads: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        threads[span.pid, span.thread_id].append(span)
    number = 0
    for (pid, thread), found in threads.items():
        tracks.thread(pid, thread)
        found.sort(key=lambda span: (span.started_ns, -span.ended_ns))
        around: list[int] = []
        for span in found:
            ended_ns = max(span.ended_ns, span.started_ns + 1)
            while around and around[-1] <= span.started_ns:
                around.pop()
            arguments = _json(span.attributes)
            if not around or ended_ns <= around[-1]:
                around.append(ended_ns)
                yield _line("X", span.name, pid, thread, span.started_ns, dur=ended_ns - span.started_ns, args=arguments)
            else:
                number += 1
                more: dict[str, Any] = {"cat": "span", "id2": {"local": f"span-{thread}-{number}"}}
                yield _line("b", span.name, pid, thread, span.started_ns, args=arguments, **more)
                yield _line("e", span.name, pid, thread, ended_ns, **more)


def _counters(counters: Sequence[Counter]) -> Iterator[str]:
    """Yield running sums. Each burst and each device has its own counter, which has their names in its name."""
    totals: dict[tuple[int, str], dict[str, int]] = defaultdict(dict)
    for counter in counters:
        labels = [str(counter.attributes[label]) for label in _LABELS if counter.attributes.get(label)]
        name = f"{counter.name} [{' '.join(labels)}]" if labels else counter.name
        series = str(counter.attributes.get("why", "value"))
        sums = totals[counter.pid, name]
        sums[series] = sums.get(series, 0) + counter.value
        yield _line("C", name, counter.pid, counter.pid, counter.at_ns, args=sums)


# --- JSON -----------------------------------------------------------------------------------------------------------------


def _line(phase: str, name: str, pid: int, thread: int, at_ns: int = 0, **more: Any) -> str:
    """Return one event. Times are microseconds with three decimals, written exactly: a float would round them."""
    duration = more.pop("dur", None)
    took = "" if duration is None else f',"dur":{duration // 1000}.{duration % 1000:03d}'
    rest = "," + _dumps(more)[1:-1] if more else ""
    return f'{{"ph":"{phase}","name":{_dumps(name)},"pid":{pid},"tid":{thread},"ts":{at_ns // 1000}.{at_ns % 1000:03d}{took}{rest}}}'


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _json(value: Any) -> Any:
    """Return a value as JSON has it. Values that JSON lacks (NaN, paths, other enums) become text, so no attribute spoils the file."""
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    return str(value)
