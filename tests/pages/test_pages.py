"""Statistics pages: what a driver writes is what another process reads, and what is not a page is refused."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import threading
from collections.abc import Iterator

import pytest

from aionn.pages import layout
from aionn.pages._page import Slot, bucket_of
from aionn.pages.layout import LayoutError
from aionn.pages.page import DriverPage, PageReader, private_slot, until_beat_s


@pytest.fixture
def page() -> Iterator[tuple[DriverPage, PageReader]]:
    written = DriverPage()
    reader = PageReader(os.dup(written.fd), 0, os.dup(written.asked_fd))
    yield written, reader
    reader.close()
    reader.close()
    os.close(written.fd)
    os.close(written.asked_fd)


def test_a_page_says_whose_it_is_and_is_idle_at_first(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    activity = reader.read()
    assert (activity.state, activity.since_ns, activity.executing, activity.finished) == ("idle", 0, (), 0)
    assert activity.heartbeat_ns > 0
    written.beat()
    assert reader.read().heartbeat_ns > activity.heartbeat_ns
    assert reader.pid == os.getpid()
    with open("/proc/self/stat", encoding="utf-8") as file:
        assert reader.start_time == int(file.read().rpartition(")")[2].split()[19])


def test_an_execution_is_seen_from_its_beginning_to_its_end(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    one, other = written.slot(11), written.slot(12)
    first = one.begin()
    second = other.begin()
    activity = reader.read()
    assert activity.state == "executing"
    assert [(execution.number, execution.since_ns) for execution in activity.executing] == [(1, first), (1, second)]
    assert activity.since_ns == first
    one.end(first)
    assert [execution.since_ns for execution in reader.read().executing] == [second]
    other.end(second)
    again = one.begin()
    assert [(execution.number, execution.since_ns) for execution in reader.read().executing] == [(2, again)]
    one.end(again)
    activity = reader.read()
    assert (activity.state, activity.finished) == ("idle", 3)
    assert activity.ended_ns >= again


def test_a_dropped_execution_is_seen_and_does_not_count(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    slot = written.slot(11)
    slot.end(slot.begin())
    before = reader.read()
    began = slot.begin()
    assert [(execution.number, execution.since_ns) for execution in reader.read().executing] == [(2, began)]
    slot.drop()
    assert reader.read() == before
    again = slot.begin()
    assert [(execution.number, execution.since_ns) for execution in reader.read().executing] == [(2, again)]
    slot.end(again)
    assert reader.read().finished == 2
    slot.drop()  # after its end it changes nothing
    assert reader.read().finished == 2


def test_loading_and_compiling_are_states_and_executing_goes_before_them(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    slot = written.slot(1)
    with written.loading():
        assert reader.read().state == "loading"
        with written.compiling():
            since_ns = reader.read().since_ns
            with written.compiling():
                assert (reader.read().state, reader.read().since_ns) == ("compiling", since_ns)
            began_ns = slot.begin()
            assert reader.read().state == "executing"
            slot.end(began_ns)
            assert reader.read().state == "compiling"
        assert reader.read().state == "loading"
    assert reader.read().state == "idle"


def test_compiles_of_several_threads_are_all_counted(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page

    def work() -> None:
        for _ in range(2000):
            with written.compiling():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reader.read().state == "idle"
    assert reader._words[layout.COMPILES_BEGUN] == reader._words[layout.COMPILES_ENDED] == 8000


def test_a_released_models_slot_is_empty_for_the_next_one_and_its_last_run_is_not_shown(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    slot = written.slot(1)
    began_ns = slot.begin()
    written.release(slot)
    assert reader.read().state == "idle"
    next_one = written.slot(2)
    assert slot.end(began_ns) > 0  # the run that was in progress ends in no slot
    assert (reader.read().state, reader.read().finished) == ("idle", 0)
    next_one.end(next_one.begin())
    assert reader.read().finished == 1


def test_more_models_than_slots_are_not_shown_and_run_all_the_same(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    slots = [written.slot(number) for number in range(layout.SLOTS + 3)]
    began = [slot.begin() for slot in slots]
    assert len(reader.read().executing) == layout.SLOTS
    for slot, began_ns in zip(slots, began, strict=True):
        assert slot.end(began_ns) > 0
    written.release(slots[-1])
    written.release(slots[0])
    assert len([written.slot(1) for _ in range(2)]) == 2
    assert reader.read().finished == layout.SLOTS - 1


def test_a_duration_is_counted_in_the_bucket_whose_edges_enclose_it() -> None:
    edges = [ns for power in range(12, 36) for ns in (10**9 * 2**power // 2**30 + step for step in (-1, 0, 1))]
    for ns in [0, 1, 15_999_999_999, 16 * 10**9, 10**15, *edges, *(random.randrange(2 ** random.randrange(1, 45)) for _ in range(5000))]:
        bucket = bucket_of(ns)
        assert 0 <= bucket < layout.BUCKETS
        # The native clock's unit is one part in 10^9 too long.
        assert ns / 1e9 <= layout.longest_in_bucket_s(bucket) * (1 + 1e-8)
        assert bucket == 0 or ns / 1e9 >= layout.longest_in_bucket_s(bucket - 1) * (1 - 1e-8)


def test_a_quantile_is_known_from_enough_runs_on_and_is_at_most_a_quarter_octave_too_long(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    slot = written.slot(1)
    for _ in range(99):
        slot.end(slot.begin() - 1_000_000)
    assert reader.usual_s(0, 0.99, 100) is None
    slot.end(slot.begin() - 5_000_000_000)
    usual = reader.usual_s(0, 0.99, 100)
    assert usual is not None
    assert 0.001 <= usual <= 0.00125 * 1.25
    slot.end(slot.begin() - 5_000_000_000)
    slowest = reader.usual_s(0, 0.99, 100)
    assert slowest is not None
    assert slowest >= 5.0


def test_a_descriptor_that_is_not_a_page_is_refused_and_closed() -> None:
    def memfd(size: int, seals: int) -> int:
        fd = os.memfd_create("aionn-stats", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    both = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    reading, writing = os.pipe()
    os.close(writing)
    for fd, word in (
        (reading, "memfd"),
        (os.open("/dev/null", os.O_RDONLY), "memfd"),
        (memfd(layout.PAGE_BYTES, 0), "seals"),
        (memfd(layout.PAGE_BYTES - 1, both), "bytes"),
        (memfd(layout.PAGE_BYTES, both), "magic"),
    ):
        with pytest.raises(LayoutError, match=word):
            PageReader(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_huge_pages_are_refused_before_they_are_mapped() -> None:
    fd = os.memfd_create("aionn-stats", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    os.ftruncate(fd, layout.PAGE_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(LayoutError, match="huge pages"):
        PageReader(fd)


def test_nobody_but_its_driver_writes_to_a_page(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    reading = reader.for_reading()
    again = os.open(f"/proc/self/fd/{reading}", os.O_RDWR)
    for fd in (written.fd, again):
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", layout.HEARTBEAT * 8)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, layout.PAGE_BYTES)
    os.close(again)
    os.close(reading)
    before_ns = reader.read().heartbeat_ns
    written.beat()
    assert reader.read().heartbeat_ns > before_ns
    slot = written.slot(7)  # whose memory is reserved after the page was sealed
    slot.begin()
    assert reader.read().state == "executing"
    written.release(slot)


def test_a_second_memory_that_is_none_is_refused_and_closed(page: tuple[DriverPage, PageReader]) -> None:
    reading, writing = os.pipe()
    with pytest.raises(LayoutError, match="memfd"):
        PageReader(os.dup(page[0].fd), 0, reading)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    os.close(writing)


def test_stacks_steer_no_terminal(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    reader.clear_stacks()
    os.write(written.asked_fd, b'File "a\x1b[2J.py"\n\xff\r')
    assert reader.stacks() == 'File "a\\x1b[2J.py"\n\ufffd\\r'


def test_a_page_of_another_layout_is_refused(page: tuple[DriverPage, PageReader]) -> None:
    written, _ = page
    written._words[layout.HEADER_VERSION] += 1
    with pytest.raises(LayoutError, match="version"):
        PageReader(os.dup(written.fd))


def test_stacks_fill_their_room_and_no_more(page: tuple[DriverPage, PageReader]) -> None:
    written, reader = page
    reader.clear_stacks()
    assert reader.stacks() == ""
    os.write(written.asked_fd, b"x" * (layout.STACK_BYTES - 1))
    assert reader.stack_bytes() == layout.STACK_BYTES - 1
    assert os.write(written.asked_fd, b"yy") == 1
    with pytest.raises(OSError, match="not permitted"):
        os.write(written.asked_fd, b"z")
    assert reader.stacks() == "x" * (layout.STACK_BYTES - 1) + "y"
    reader.clear_stacks()
    os.write(written.asked_fd, b"again")
    assert reader.stacks() == "again"


def test_a_slot_checks_its_memory_and_is_a_clock_without_any() -> None:
    for memory, offset in ((bytearray(1023), 0), (bytearray(2048), 1025), (bytearray(2048), -8), (bytearray(2048), 4)):
        with pytest.raises(ValueError, match="1024 bytes"):
            Slot(memory, offset)
    with pytest.raises((TypeError, BufferError)):
        Slot(b"x" * 1024, 0)  # it is read-only
    with pytest.raises(TypeError):
        Slot.__new__(Slot)  # type: ignore[call-arg]
    slot = private_slot()
    with pytest.raises(TypeError):
        slot.end("soon")  # type: ignore[arg-type]
    slot.release()
    slot.release()
    assert slot.end(slot.begin()) >= 0


@pytest.mark.parametrize(("now_s", "left_s"), [(7.0, 1.0), (7.25, 0.75), (7.95, 1.05), (7.9999, 1.0001)])
def test_heartbeats_are_due_at_whole_seconds_also_after_a_timer_that_comes_early(
    monkeypatch: pytest.MonkeyPatch, now_s: float, left_s: float
) -> None:
    monkeypatch.setattr("aionn.pages.page.time.monotonic", lambda: now_s)
    assert until_beat_s() == pytest.approx(left_s)
