"""Trace records: written only while a tracer asks, read from another process, and each record whole, late or counted as lost."""

from __future__ import annotations

import os
import resource
import time

import pytest

from aionn.pages import app_layout, layout
from aionn.pages._page import Trace
from aionn.pages.app_layout import TraceKind
from aionn.pages.app_page import AppPage
from aionn.pages.finding import FoundPage, TraceReader, find_page
from tests.pages.processes import program
from tests.pages.tracing import tracing

FAR = 3600 * 10**9

WRITER = """
import sys, time
from aionn.pages.app_page import open_page
page = open_page()
print("ready", flush=True)
number = 0
while True:
    number += 1
    page.trace_note(1, 7, number, time.monotonic_ns(), number, number)
"""


def rings() -> int:
    with os.scandir("/proc/self/fd") as links:
        return sum(os.readlink(link.path).startswith("/memfd:aionn-trace") for link in links if os.path.lexists(link.path))


def test_records_come_in_order_with_what_was_written(page: AppPage, found: FoundPage) -> None:
    with tracing(found, time.monotonic_ns() + FAR), TraceReader(found) as reader:
        assert reader.read() == []
        before = time.monotonic_ns()
        page.trace_note(TraceKind.SENT, 2**63, 5, before, 640, 2**64 - 1)
        page.trace_note(TraceKind.SETTLED, 2**63, 5, before + 1)
        assert [tuple(record) for record in reader.read()] == [
            (0, TraceKind.SENT, 2**63, 5, before, 640, 2**64 - 1),
            (1, TraceKind.SETTLED, 2**63, 5, before + 1, 0, 0),
        ]
        assert (reader.read(), reader.lost) == ([], 0)


def test_nothing_is_made_or_written_while_nobody_asks(page: AppPage, found: FoundPage) -> None:
    page.trace_note(TraceKind.SENT, 1, 1, time.monotonic_ns())
    assert rings() == 0
    until = time.monotonic_ns() + FAR
    with tracing(found, until):
        page.trace_note(TraceKind.SENT, 1, 1, until)  # at its end it is over
        assert rings() == 0
        page.trace_note(TraceKind.SENT, 1, 2, until - 1)
        assert rings() == 1
    page.trace_note(TraceKind.SENT, 1, 3, time.monotonic_ns())
    with TraceReader(found) as reader:
        assert [record.identity for record in reader.read()] == [2]


def test_a_tracer_that_is_killed_asks_no_longer_than_it_said(page: AppPage, found: FoundPage) -> None:
    tracer = """
import sys, time
from aionn.pages.finding import find_page
from tests.pages.tracing import tracing
with find_page(int(sys.argv[1])) as page, tracing(page, int(sys.argv[2])):
    print("ready", flush=True)
    sys.stdin.readline()
"""
    until = time.monotonic_ns() + FAR
    with program(tracer, os.getpid(), until):
        pass  # killed
    page.trace_note(TraceKind.SENT, 1, 1, until - 1)
    page.trace_note(TraceKind.SENT, 1, 2, until)
    with TraceReader(found) as reader:
        assert [record.identity for record in reader.read()] == [1]


def test_a_reader_that_is_lapped_goes_on_with_the_newest_half_and_knows_what_it_lost(page: AppPage, found: FoundPage) -> None:
    with tracing(found, time.monotonic_ns() + FAR), TraceReader(found) as reader:
        page.trace_note(TraceKind.SENT, 1, 0, 1)
        assert len(reader.read()) == 1
        written = 3 * app_layout.TRACE_RECORDS + 5
        for number in range(1, written):
            page.trace_note(TraceKind.SENT, 1, number, 1)
        records = reader.read()
        assert [record.identity for record in records] == list(range(written - app_layout.TRACE_RECORDS // 2, written))
        assert [record.number for record in records] == [record.identity for record in records]
        assert reader.lost == written - app_layout.TRACE_RECORDS // 2 - 1
        for number in range(written, written + app_layout.TRACE_RECORDS):
            page.trace_note(TraceKind.SENT, 1, number, 1)
        assert [record.identity for record in reader.read()] == list(range(written, written + app_layout.TRACE_RECORDS))


def test_a_running_process_is_traced_from_outside_and_no_record_is_torn() -> None:
    with program(WRITER) as process:
        page = find_page(process.pid)
        assert page is not None
        with page, TraceReader(page) as reader:
            last, taken = 0, 0
            with tracing(page, time.monotonic_ns() + FAR):
                while taken < 100_000:
                    for record in reader.read():
                        assert record.identity == record.first == record.second, record
                        assert (record.kind, record.burst) == (1, 7)
                        assert record.identity > last
                        last = record.identity
                        taken += 1
            # The process goes on, untraced. At most the record that it had begun comes late, at any later time.
            reader.read()
            late = reader.read()
            process.kill()
            process.wait()
            assert len([*late, *reader.drain()]) <= 1
            with pytest.raises(FileNotFoundError):
                reader.read()


def test_taken_and_lost_add_up_to_what_was_written() -> None:
    with program(WRITER) as process:
        page = find_page(process.pid)
        assert page is not None
        with page, TraceReader(page) as reader:
            numbers = []
            with tracing(page, time.monotonic_ns() + FAR):
                while not reader.lost:  # slower than the writer, so it is lapped
                    numbers += [record.number for record in reader.read()]
                    deadline = time.monotonic_ns() + 20_000_000
                    while time.monotonic_ns() < deadline:
                        pass
            numbers += [record.number for record in reader.read()]
            assert numbers == sorted(set(numbers))
            assert len(numbers) + reader.lost == numbers[-1] + 1


def test_memory_that_is_not_a_ring_is_not_read(page: AppPage, found: FoundPage) -> None:
    foreign = os.memfd_create("aionn-trace", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(foreign, app_layout.TRACE_BYTES)
        with tracing(found, time.monotonic_ns() + FAR), TraceReader(found) as reader:
            page.trace_note(TraceKind.SENT, 1, 1, 1)
            assert [record.identity for record in reader.read()] == [1]
    finally:
        os.close(foreign)


def test_without_memory_for_the_ring_nothing_is_written_and_nothing_raises(page: AppPage, found: FoundPage) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tracing(found, time.monotonic_ns() + FAR):
        taken = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1, hard))
            while True:
                taken.append(os.dup(0))
        except OSError:
            page.trace_note(TraceKind.SENT, 1, 1, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
        assert rings() == 0
        page.trace_note(TraceKind.SENT, 1, 2, 1)
        assert rings() == 0  # it is tried once for each trace
    with tracing(found, time.monotonic_ns() + 2 * FAR):
        page.trace_note(TraceKind.SENT, 1, 3, 1)
        assert rings() == 1


def test_a_closed_trace_writes_no_more(page: AppPage) -> None:
    memory = bytearray(layout.SLOT_OFFSET)
    with memoryview(memory).cast("Q") as words:
        words[layout.TRACE_UNTIL] = FAR
    trace = Trace(memory)
    trace.note(1, 1, 1, 1, 0, 0)
    assert rings() == 1
    trace.close()
    trace.close()
    trace.note(1, 1, 1, 1, 0, 0)
    assert rings() == 0
    trace = Trace(memory)
    trace.note(1, 1, 1, 1, 0, 0)
    assert rings() == 1
    del trace
    assert rings() == 0
    with pytest.raises(ValueError, match="expected 4096 bytes"):
        Trace(bytearray(4095))
