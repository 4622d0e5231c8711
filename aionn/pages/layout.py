"""Where each number of a statistics page lies, and what it means. No I/O; words.h and model_slot.h repeat some of the numbers.

Every number is an unsigned 64-bit word in the machine's own byte order: both processes run on one machine. Times are
CLOCK_MONOTONIC in nanoseconds.

Invariants
    An execution of a model is in progress if and only if its slot has begun more executions than it has finished.
    The buckets of a slot's histogram add up to its finished executions, except while one ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

MAGIC = int.from_bytes(b"aionnpg\0", "little")
VERSION = 3
ROLE_APP, ROLE_DRIVER = 1, 2
ROLES = {ROLE_APP: "app", ROLE_DRIVER: "driver"}

PAGE_BYTES = 2 * 1024 * 1024
STACK_BYTES = 16 * 1024
STACK_OFFSET = 4096
ASKED_BYTES = STACK_OFFSET + STACK_BYTES
"""A driver's second memory has the header of a page, of which `TRACE_UNTIL` counts, and the stacks. The stacks are last, because a write
behind them would enlarge the file, which its seals forbid."""

# Words of the header.
HEADER_MAGIC, HEADER_VERSION, HEADER_ROLE, HEADER_PID, HEADER_START, HEADER_BYTES, HEADER_SLOTS, HEADER_SLOT_BYTES = range(8)
HEADER_WORDS = 8
TIME_NAMESPACE, TRACE_UNTIL, SEQUENCE, SLOTS_LOST = 8, 10, 11, 12
"""The inode number of the process's time namespace; until when frames are traced; even while no slot changes hands; slots refused."""

RELEASE_WORD, RELEASE_BYTES = 16, 32
"""Which release of aionn the process runs, as text."""

RELEASE = "0.1.0"
"""This release. Asking the package's metadata would take an app longer than all else about its page."""

# Words of the activity, behind room for a longer header.
HEARTBEAT, LOADS_BEGUN, LOADS_ENDED, LOADING_SINCE, COMPILES_BEGUN, COMPILES_ENDED, COMPILING_SINCE, SLOTS_USED = range(32, 40)
PREPARING_KEY = 40
"""The key of the model whose compilation or load began last, in a driver that apps share."""

# Words of a slot. model_slot.h has the same numbers.
SLOT_OFFSET = 4096
SLOT_BYTES = 1024
SLOT_WORDS = SLOT_BYTES // 8
SLOTS = (PAGE_BYTES - SLOT_OFFSET) // SLOT_BYTES
MODEL, BEGUN, FINISHED, SINCE, ENDED, HISTOGRAM = 0, 1, 2, 3, 4, 16
KEY = 10
"""The key of the slot's model, or 0: the first 8 bytes of the digest of its identity, in a driver that apps share."""
BUCKETS = 90

JOIN_ROWS, JOIN_MOST, JOIN_OFF, JOIN_NOW = range(6, 10)
"""Of a model whose requests may be joined, in one of its slots: the rows of runs that have several; how many rows are joined at most
now; 1 after a joined run has shown that rows do not stay apart; joined runs in progress. All are 0 for another model."""

SIZES = 7
SIZE_RUNS, SIZE_ROW_NS = HISTOGRAM + BUCKETS, HISTOGRAM + BUCKETS + SIZES
"""Runs by their rows, and the mean time of one row in them: 1, 2 and 3, from 4 to 7, and so on by powers of two up to 64 rows."""

# Four buckets per octave from 2^-18 s to 2^4 s, in units of 2^-30 s, one for shorter and one for longer durations.
_FIRST_OCTAVE = 12

State = Literal["idle", "loading", "compiling", "executing"]


class LayoutError(ValueError):
    """The bytes are not a page of this layout, or not a page of the process that sent them."""


class ShownExecution(NamedTuple):
    """One execution in progress.

    Attributes:
        slot: the slot of its model.
        number: how many executions the model had begun with this one. The number distinguishes one execution from the next.
        since_ns: when the execution began, or 0 if the page does not say.
    """

    slot: int
    number: int
    since_ns: int


class JoinedRuns(NamedTuple):
    """What one prepared model has joined.

    Attributes:
        runs, rows: runs that bursts have asked for, and their rows.
        most: how many rows are joined at most now.
        off: whether a joined run has shown that rows do not stay apart.
        size_runs, size_row_ns: by size, the runs and the mean time of one row. Sizes are powers of two.
    """

    runs: int
    rows: int
    most: int
    off: bool
    size_runs: tuple[int, ...]
    size_row_ns: tuple[int, ...]


class Activity(NamedTuple):
    """What a driver does at one moment.

    Attributes:
        state: the first of "executing", "compiling", "loading" and "idle" that applies.
        since_ns: when the state began, or 0 if unknown. For several executions it is the earliest begin, in "idle" the end of the last one.
        executing: the executions in progress.
        finished: how many executions the models that are prepared now have finished so far.
        ended_ns: when the last of these executions ended, or 0 if none has.
        heartbeat_ns: when the driver's loop last ran its heartbeat.
        joined_runs, joined_rows: runs of models whose requests may be joined, and their rows.
    """

    state: State
    since_ns: int
    executing: tuple[ShownExecution, ...]
    finished: int
    ended_ns: int
    heartbeat_ns: int
    joined_runs: int = 0
    joined_rows: int = 0


def header(role: int, pid: int, start_time: int, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> list[int]:
    """Return the words of a page's header."""
    words = [0] * HEADER_WORDS
    words[HEADER_MAGIC], words[HEADER_VERSION], words[HEADER_ROLE] = MAGIC, VERSION, role
    words[HEADER_PID], words[HEADER_START] = pid, start_time
    words[HEADER_BYTES], words[HEADER_SLOTS], words[HEADER_SLOT_BYTES] = PAGE_BYTES, slots, slot_bytes
    return words


def check_header(words: Sequence[int], role: int, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
    """Check that a page is one of this role and of this layout.

    Raises:
        LayoutError: the page is another one. The text names the word that differs.
    """
    wanted = header(role, words[HEADER_PID], words[HEADER_START], slots, slot_bytes)
    names = ("magic", "version", "role", "pid", "start time", "size", "slots", "slot size")
    for what, found, right in zip(names, words[:HEADER_WORDS], wanted, strict=True):
        if found != right:
            raise LayoutError(f"a statistics page has {what} {found}, but {right} was expected; use the same release on both sides")


def activity(words: Sequence[int], started_ns: int = 0) -> Activity:
    """Read what the driver does from the words of its page. A time that is not from `started_ns` to now becomes 0."""
    executing: list[ShownExecution] = []
    finished = ended_ns = runs = rows = 0
    for slot in range(min(words[SLOTS_USED], SLOTS)):
        at = slot_word(slot)
        done = words[at + FINISHED]  # before `begun`, so that an execution that begins and ends meanwhile is not missed
        begun = words[at + BEGUN]
        finished += done
        if words[at + JOIN_MOST]:
            more = _runs_and_rows(words, at)
            runs, rows = runs + more[0], rows + more[1]
        ended_ns = max(ended_ns, words[at + ENDED])
        if begun > done:
            executing.append(ShownExecution(slot, begun, words[at + SINCE]))
    compiling, loading = words[COMPILES_BEGUN] > words[COMPILES_ENDED], words[LOADS_BEGUN] > words[LOADS_ENDED]
    acts_ns, beat_ns = words[COMPILING_SINCE] if compiling else words[LOADING_SINCE], words[HEARTBEAT]
    now_ns = time.monotonic_ns()  # after all times were read
    executing = [one if started_ns <= one.since_ns <= now_ns else ShownExecution(one.slot, one.number, 0) for one in executing]
    ended_ns = ended_ns if started_ns <= ended_ns <= now_ns else 0
    since_ns = acts_ns if started_ns <= acts_ns <= now_ns else 0
    state: State = "compiling" if compiling else "loading"
    if executing:
        state, since_ns = "executing", min(execution.since_ns for execution in executing)
    elif not (compiling or loading):
        state, since_ns = "idle", ended_ns
    return Activity(state, since_ns, tuple(executing), finished, ended_ns, beat_ns, runs, rows)


def joined_runs(words: Sequence[int], model: int) -> JoinedRuns | None:
    """Return what a model has joined, or None if no slot shows the model. One of its slots has the numbers."""
    firsts = [at for at in map(slot_word, range(min(words[SLOTS_USED], SLOTS))) if words[at + MODEL] == model]
    if not firsts:
        return None
    at = max(firsts, key=lambda first: words[first + JOIN_MOST])
    sizes = (tuple(words[at + first + size] for size in range(SIZES)) for first in (SIZE_RUNS, SIZE_ROW_NS))
    return JoinedRuns(*_runs_and_rows(words, at), words[at + JOIN_MOST], bool(words[at + JOIN_OFF]), *sizes)


def _runs_and_rows(words: Sequence[int], at: int) -> tuple[int, int]:
    """Return how many runs a slot shows, and their rows. Single runs are counted once, as runs of the first size."""
    runs = words[at + SIZE_RUNS : at + SIZE_RUNS + SIZES]
    return sum(runs), words[at + JOIN_ROWS] + runs[0]


def joining_models(words: Sequence[int]) -> frozenset[int]:
    """Return the numbers of the models of which a joined run is in progress."""
    firsts = map(slot_word, range(min(words[SLOTS_USED], SLOTS)))
    return frozenset(words[at + MODEL] for at in firsts if words[at + JOIN_NOW])


def suspect_keys(words: Sequence[int]) -> frozenset[int]:
    """Return the keys of the models that may have ended the driver: those that run for the first time, else all that run.

    What is being prepared is one of them. Of several preparations at once the page shows one.
    """
    firsts = map(slot_word, range(min(words[SLOTS_USED], SLOTS)))
    running = [at for at in firsts if words[at + BEGUN] > words[at + FINISHED]]
    keys = {words[at + KEY] for at in running if not words[at + FINISHED]} or {words[at + KEY] for at in running}
    if words[COMPILES_BEGUN] > words[COMPILES_ENDED] or words[LOADS_BEGUN] > words[LOADS_ENDED]:
        keys.add(words[PREPARING_KEY])
    return frozenset(keys - {0})


def slot_word(slot: int) -> int:
    """Return the index of a slot's first word."""
    return (SLOT_OFFSET + slot * SLOT_BYTES) // 8


def longest_in_bucket_s(bucket: int) -> float:
    """Return the upper edge of a bucket in seconds. That of the last bucket is infinity."""
    if bucket >= BUCKETS - 1:
        return float("inf")
    if bucket == 0:
        return float(2.0 ** (_FIRST_OCTAVE - 30))
    octave, quarter = divmod(bucket - 1, 4)
    return float((5 + quarter) * 2.0 ** (_FIRST_OCTAVE + octave - 2 - 30))


def quantile_s(buckets: Sequence[int], quantile: float, least: int) -> float | None:
    """Return an upper bound of a histogram's quantile in seconds, or None if the histogram counts fewer than `least` durations."""
    if sum(buckets) < least:
        return None
    found = _at(buckets, quantile)
    return float("inf") if found is None else longest_in_bucket_s(found[0])


def percentile_s(buckets: Sequence[int], share: float) -> float | None:
    """Return a percentile of a histogram in seconds, interpolated within its bucket, or None if the histogram is empty."""
    found = _at(buckets, share)
    if found is None:
        return None
    bucket, part = found
    low, high = longest_in_bucket_s(bucket - 1) if bucket else 0.0, longest_in_bucket_s(bucket)
    return low if high == float("inf") else low + (high - low) * part


def _at(buckets: Sequence[int], share: float) -> tuple[int, float] | None:
    """Return the bucket that holds a share of all durations, and which part of that bucket lies below. None if the histogram is empty."""
    wanted = share * sum(buckets)
    seen = 0
    for bucket, number in enumerate(buckets):
        if number and seen + number >= wanted:
            return bucket, (wanted - seen) / number
        seen += number
    return None
