"""Pages across processes: readers beside writers, forks, and SIGKILL at either end. Rows O2 and O3 of the acceptance."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

import pytest

from aionn.pages import app_layout, layout
from aionn.pages._page import snapshot
from aionn.pages.app_layout import COUNTERS, Kind
from aionn.pages.app_page import AppPage, close_page, open_page
from aionn.pages.finding import FoundPage, TraceReader, find_page
from aionn.pages.process_use import of_each_process
from tests.pages.processes import memfds, program
from tests.pages.tracing import tracing

WRITER = """
import sys, threading
from aionn.pages.app_layout import Kind; from aionn.pages import app_layout; from aionn.pages.app_page import open_page
page = open_page()
runtime = page.slot(Kind.RUNTIME, "writer")
bursts = [page.slot(Kind.BURST, "x" * 60, "y" * 60, parent=runtime) for _ in range(8)]
print("ready", flush=True)
threading.Thread(target=lambda: (sys.stdin.readline(), over.append(1)), daemon=True).start()
over, turns = [], 0
while not over:
    turns += 1
    letter = "abcdefghij"[turns % 10]
    for number, burst in enumerate(bursts):
        burst.add(app_layout.SENT, 1)
        burst.answered(turns * 1000 % 20_000_000, turns)
    if turns % 3 == 0:
        page.rename(bursts[turns % 8], letter * 60, letter * 60)
    if turns % 5 == 0:  # slots change hands, and their counts go to the runtime's
        page.release(bursts[turns % 7])
        bursts[turns % 7] = page.slot(Kind.BURST, letter * 60, letter * 60, parent=runtime)
    page.beat(runtime)
print(8 * turns, flush=True)
sys.stdin.readline()
"""

IDLE = """
import sys
from aionn.pages.app_layout import Kind; from aionn.pages.app_page import open_page
page = open_page()
burst = page.slot(Kind.BURST, "idle")
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
"""

READER = """
import sys
from aionn.pages.finding import TraceReader, find_page
from tests.pages.tracing import tracing
import time
with find_page(int(sys.argv[1])) as page, tracing(page, time.monotonic_ns() + 60_000_000_000), TraceReader(page) as records:
    print("ready", flush=True)
    while True:
        page.read()
        records.read()
"""


def found_pages() -> list[FoundPage]:
    return of_each_process(find_page)[0]


def whole_names_in(copy: bytes) -> set[str]:
    """The letters of which the bursts' names consist. Both names of a burst are one letter, 60 times; "x" comes with "y"."""
    letters = set()
    for at in range(layout.SLOT_OFFSET, len(copy), app_layout.SLOT_BYTES):
        if copy[at] == Kind.BURST:
            name, device = copy[at + 8 * app_layout.NAME :][:64], copy[at + 8 * app_layout.DEVICE :][:64]
            assert name == name[:1] * 60 + bytes(4), name
            assert device == (b"y" if name[:1] == b"x" else name[:1]) * 60 + bytes(4), (name, device)
            letters.add(name[:1].decode())
    return letters


def read_beside_a_writer(reads: int) -> None:
    with program(WRITER) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        page = find_page(process.pid)
        assert page is not None
        with page:
            before = dict.fromkeys(COUNTERS, 0)
            names = set()
            for number in range(reads):
                copy = snapshot(page._mapping, app_layout.SLOT_BYTES)
                assert copy is not None
                names |= whole_names_in(copy)
                if number % 50 == 0:
                    view = app_layout.view(copy)
                    for slot in view.slots:
                        # The durations are stored before their number, and are copied after it.
                        assert 0 <= sum(slot.call_times) - slot.counters["answered"] <= 100_000
                    now = {counter: view.total(counter) for counter in COUNTERS}
                    assert all(now[counter] >= before[counter] for counter in COUNTERS), (before, now)
                    before = now
            assert names <= set("abcdefghijx")
            assert len(names) > 2  # names did change meanwhile; which of them a reader meets is chance
            process.stdin.write("end\n")
            process.stdin.flush()
            count = int(process.stdout.readline())
            last = page.read()
            assert last is not None
            assert last.total("sent") == last.total("answered") == count
            assert sum(sum(slot.call_times) for slot in last.slots) == count
            assert sum(sum(slot.service_times) for slot in last.slots) == count


def test_counters_never_fall_and_no_name_is_torn() -> None:
    read_beside_a_writer(100_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_counters_never_fall_and_no_name_is_torn_in_a_million_reads() -> None:
    read_beside_a_writer(1_000_000)


def test_a_page_is_found_by_its_process_and_by_no_other() -> None:
    with program(IDLE) as one, program(IDLE) as other:
        pages = found_pages()
        try:
            found = {page.pid: page for page in pages}
            assert {one.pid, other.pid} <= found.keys()
            assert len(found) == len(pages)
            for process in (one, other):
                assert found[process.pid].role == "app"
                view = found[process.pid].read()
                assert view is not None
                assert view.pid == process.pid
                assert "idle" in [slot.name for slot in view.slots]
        finally:
            for page in pages:
                page.close()
                page.close()
    assert find_page(os.getpid()) is None
    with pytest.raises(FileNotFoundError):
        find_page(one.pid)


def in_child(body: Callable[[], None]) -> None:
    """Run this in a child of fork, where a failed assertion is a failure here."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_every_writer_is_off_in_a_child_of_fork() -> None:
    page = open_page()
    try:
        runtime, burst = page.slot(Kind.RUNTIME, "parent"), page.slot(Kind.BURST, "parent")
        burst.add(app_layout.COMPUTED, 1)
        with (reader := _found()), tracing(reader, time.monotonic_ns() + 60 * 10**9):
            page.trace_note(1, 2, 3, time.monotonic_ns())
            before = reader.read()

            def child() -> None:
                assert find_page(os.getpid()) is None
                burst.add(app_layout.COMPUTED, 1)
                burst.answered(1, 1)
                page.rename(burst, "child")
                page.beat(runtime)
                page.trace_note(1, 2, 3, time.monotonic_ns())
                own = page.slot(Kind.BURST, "child")
                own.add(app_layout.COMPUTED, 7)
                assert own.get(app_layout.COMPUTED) == 7
                page.release(own)
                page.release(burst)
                with os.scandir("/proc/self/fd") as links:
                    assert [link for link in links if os.readlink(link.path).startswith("/memfd:aionn-")] == []
                anew = open_page()
                assert anew is not page
                anew.slot(Kind.BURST, "child").add(app_layout.COMPUTED, 9)
                with _found() as mine:
                    view = mine.read()
                    assert view is not None
                    assert (view.pid, view.total("computed")) == (os.getpid(), 0)  # that slot has been dropped
                close_page(anew)

            in_child(child)
            after = reader.read()
            assert before is not None
            assert after is not None
            assert [(slot.name, slot.counters, slot.beat_ns) for slot in after.slots] == [
                (slot.name, slot.counters, slot.beat_ns) for slot in before.slots
            ]
            with TraceReader(reader) as records:
                assert len(records.read()) == 1
            burst.add(app_layout.COMPUTED, 1)
            again = reader.read()
            assert again is not None
            assert again.total("computed") == 2
    finally:
        close_page(page)


def _found() -> FoundPage:
    page = find_page(os.getpid())
    assert page is not None
    return page


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_that_has_inherited_the_descriptor_is_not_shown_as_a_second_app() -> None:
    """A fork in C code, which runs no Python code in the child: only the page's own pid tells."""
    page = open_page()
    try:
        inherited = subprocess.Popen(
            [sys.executable, "-c", "print('ready', flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[page.fd],
        )
        assert inherited.stdout is not None
        assert inherited.stdout.readline() == b"ready\n"
        with os.scandir(f"/proc/{inherited.pid}/fd") as links:
            assert any(os.readlink(link.path).startswith("/memfd:aionn-stats") for link in links)
        assert find_page(inherited.pid) is None
        pages = found_pages()
        assert [found.pid for found in pages].count(os.getpid()) == 1
        assert inherited.pid not in [found.pid for found in pages]
        for found in pages:
            found.close()
        inherited.communicate(b"\n")
    finally:
        close_page(page)


def kill_tracer_and_app() -> None:
    with program(IDLE) as app, program(IDLE) as other, program(READER, app.pid) as reader:
        app.stdin.write("for _ in range(100): page.trace_note(1, 2, 3, __import__('time').monotonic_ns())\n")  # type: ignore[union-attr]
        app.stdin.write("print('written', flush=True)\n")  # type: ignore[union-attr]
        app.stdin.flush()  # type: ignore[union-attr]
        assert app.stdout is not None
        assert app.stdout.readline() == "written\n"
        apps, others = memfds(app.pid), memfds(other.pid)
        assert (len(apps), len(others), memfds(reader.pid) - apps) == (2, 1, set())  # a page and a ring, and a page
        page = find_page(app.pid)
        assert page is not None
        with page:
            reader.send_signal(signal.SIGKILL)
            reader.wait()
            view = page.read()
            assert view is not None
            # The dead tracer had asked for a minute. Nothing has to take that back.
            assert 0 < view.trace_until_ns < time.monotonic_ns() + 60 * 10**9
            app.send_signal(signal.SIGKILL)
            app.wait()
            late = page.read()  # what was mapped stays readable
            assert late is not None
            assert late.slots == view.slots
        with pytest.raises(FileNotFoundError):
            find_page(app.pid)
        still = find_page(other.pid)
        assert still is not None
        still.close()
        assert memfds() & (apps | others) == others
    assert memfds() & (apps | others) == set()


def test_kill_9_leaves_no_memory_and_disturbs_no_other_process() -> None:
    for _ in range(3):
        kill_tracer_and_app()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_kill_9_fifty_times() -> None:
    for _ in range(50):
        kill_tracer_and_app()


def test_a_page_whose_writer_died_within_a_change_is_not_read_for_ever() -> None:
    page = AppPage()
    try:
        with _found() as reader:
            assert reader.read() is not None
            page._words[layout.SEQUENCE] += 1
            assert reader.read() is None
    finally:
        page.close()
