"""A validator of the Trace Event Format, as far as viewers insist on it. `check` returns the file's content, decoded exactly."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "b": {"name", "ts", "pid", "tid", "cat", "id2"},
    "e": {"name", "ts", "pid", "tid", "cat", "id2"},
    "s": {"name", "ts", "pid", "tid", "cat", "id"},
    "t": {"name", "ts", "pid", "tid", "cat", "id"},
    "f": {"name", "ts", "pid", "tid", "cat", "id", "bp"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
}

Event = dict[str, Any]


class FormatError(AssertionError):
    """The file is not what viewers understand."""


def read(path: Path) -> dict[str, Any]:
    """Read a file, compressed or not. Times are exact."""

    def refuse(word: str) -> None:
        raise FormatError(f"{word} is not JSON")

    content = path.read_bytes()
    if path.name.endswith(".gz"):
        content = gzip.decompress(content)
    found: dict[str, Any] = json.loads(content, parse_constant=refuse, parse_float=Decimal)
    return found


def check(path: Path) -> dict[str, Any]:
    """Read a file and check it.

    Raises:
        FormatError: it breaks the format; the text names the first event that does.
    """
    found = read(path)
    events: list[Event] = found["traceEvents"]
    for event in events:
        missing = REQUIRED[event["ph"]] - event.keys()
        if missing:
            raise FormatError(f"{event} has no {sorted(missing)}")
    _check_slices(events)
    _check_async(events)
    _check_flows(events)
    _check_metadata(found, events)
    return found


def slices_of(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """The slices of each thread, outer ones before inner ones."""
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for found in threads.values():
        found.sort(key=lambda event: (event["ts"], -event["dur"]))
    return threads


def _check_slices(events: list[Event]) -> None:
    for found in slices_of(events).values():
        around: list[Event] = []
        for event in found:
            if event["dur"] < Decimal("0.001"):
                raise FormatError(f"{event} is shorter than 1 ns")
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            if around and event["ts"] + event["dur"] > around[-1]["ts"] + around[-1]["dur"]:
                raise FormatError(f"{event} overlaps {around[-1]}")
            around.append(event)


def _check_async(events: list[Event]) -> None:
    open_events: dict[tuple[int, str, str], list[Event]] = defaultdict(list)
    for event in sorted((event for event in events if event["ph"] in "be"), key=lambda event: event["ts"]):  # stable, as viewers sort
        stack = open_events[event["pid"], event["cat"], event["id2"]["local"]]
        if event["ph"] == "b":
            stack.append(event)
        elif not stack or stack.pop()["name"] != event["name"]:
            raise FormatError(f"{event} ends nothing")
    left = [stack for stack in open_events.values() if stack]
    if left:
        raise FormatError(f"{left[0]} never ends")


def _check_flows(events: list[Event]) -> None:
    threads = slices_of(events)
    flows: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            thread = threads[event["pid"], event["tid"]]
            before = thread[: bisect_right(thread, event["ts"], key=lambda one: one["ts"])]  # `thread` is in the order of `ts`
            if not any(event["ts"] < one["ts"] + one["dur"] for one in before[:-9:-1]):
                raise FormatError(f"{event} lies in no slice")
            flows[event["cat"], event["id"]].append(event)
    for found in flows.values():
        found.sort(key=lambda event: event["ts"])
        phases = "".join(event["ph"] for event in found)
        if phases[0] != "s" or phases[-1] != "f" or set(phases[1:-1]) - {"t"}:
            raise FormatError(f"a flow goes {phases}: {found}")
        if any(event["bp"] != "e" for event in found if event["ph"] == "f"):
            raise FormatError(f"{found[-1]} does not bind to the slice around it")


def _check_metadata(found: dict[str, Any], events: list[Event]) -> None:
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        if event["pid"] not in named:
            raise FormatError(f"{event} is of a process without a name")
        if event["ph"] == "X" and (event["pid"], event["tid"]) not in threads:
            raise FormatError(f"{event} is of a thread without a name")
    if not {"wall_time", "wall_time_at_monotonic_ns", "time_namespaces", "lost_records"} <= found["otherData"].keys():
        raise FormatError(f"the file's own metadata is {found['otherData']}")
