"""An app's page: what it counts is what another process reads, and slots change hands without a torn name or a lost count."""

from __future__ import annotations

import gc
import os
import time
from importlib.metadata import version

import pytest

from aionn.pages import _page, app_layout, layout
from aionn.pages._page import BurstSlot, bucket_of
from aionn.pages.app_layout import COUNTERS, Kind, PageView, TraceKind
from aionn.pages.app_page import AppPage, close_page, open_page
from aionn.pages.finding import FoundPage, find_page
from aionn.pages.page import Slot, private_slot


def look(found: FoundPage) -> PageView:
    view = found.read()
    assert view is not None
    return view


def test_the_layout_is_the_native_codes() -> None:
    for name in ("SENT", "ANSWERED", "COMPUTED", "FAILED", "COPIED_BYTES", "DRIVER_BUSY_NS", "LOST", "DROPPED", "CONNECTIONS"):
        assert getattr(_page, f"SLOT_{name}") == getattr(app_layout, name) == COUNTERS[name.lower()]
    assert (_page.SLOT_CALL_TIMES, _page.SLOT_SERVICE_TIMES) == (app_layout.CALL_TIMES, app_layout.SERVICE_TIMES)
    assert (_page.SLOT_WORDS, _page.PAGE_HEADER_BYTES) == (app_layout.SLOT_WORDS, layout.SLOT_OFFSET)
    assert (_page.PAGE_PID, _page.PAGE_START) == (layout.HEADER_PID, layout.HEADER_START)
    assert (_page.PAGE_TRACE_UNTIL, _page.PAGE_SEQUENCE) == (layout.TRACE_UNTIL, layout.SEQUENCE)
    assert layout.SLOTS_USED == _page.PAGE_SLOTS_USED
    assert (_page.TRACE_RECORDS, _page.TRACE_BYTES) == (app_layout.TRACE_RECORDS, app_layout.TRACE_BYTES)
    assert _page.TRACE_SETTLED == TraceKind.SETTLED


def test_a_process_has_one_page_and_the_last_user_closes_it(page: AppPage, found: FoundPage) -> None:
    assert open_page() is page
    close_page(page)
    view = look(found)
    assert (view.pid, view.release, view.slots_lost) == (os.getpid(), version("aionn"), 0)
    assert view.time_namespace == os.stat("/proc/self/ns/time").st_ino
    assert [slot.kind for slot in view.slots] == [Kind.OTHER]
    other = open_page()
    assert other is page
    close_page(page)
    assert os.readlink(f"/proc/self/fd/{page.fd}").startswith("/memfd:aionn-stats")


def test_the_end_of_the_last_user_leaves_no_descriptor_and_no_mapping() -> None:
    written = open_page()
    slot = written.slot(Kind.BURST, "left")
    slot.add(app_layout.COMPUTED, 3)
    written.release(slot)
    close_page(written)
    assert slot.get(app_layout.COMPUTED) == 3
    del written
    gc.collect()
    assert find_page(os.getpid()) is None
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert "aionn-stats" not in maps.read()


def test_a_slot_has_its_names_and_counts_as_long_as_it_is_in_use(page: AppPage, found: FoundPage) -> None:
    runtime = page.slot(Kind.RUNTIME, "nightly")
    compilation = page.slot(Kind.COMPILATION, "detector", "onnxruntime", parent=runtime)
    burst = page.slot(Kind.BURST, "tür" * 40, "onnxruntime", "first", parent=compilation)
    burst.add(app_layout.SENT, 3)
    burst.answered(5_000_000, 2_000_000)
    burst.answered(9_000_000, -1)
    shown = {slot.kind: slot for slot in look(found).slots}
    view = shown[Kind.BURST]
    assert (shown[Kind.RUNTIME].name, shown[Kind.COMPILATION].name, shown[Kind.COMPILATION].device) == (
        "nightly",
        "detector",
        "onnxruntime",
    )
    assert (view.name, view.device, view.stage) == ("tür" * 16, "onnxruntime", "first")
    assert (view.parent, shown[Kind.COMPILATION].parent) == (shown[Kind.COMPILATION].number, shown[Kind.RUNTIME].number)
    assert 0 < view.since_ns <= time.monotonic_ns()
    counters = dict.fromkeys(COUNTERS, 0) | {"sent": 3, "answered": 2, "driver_busy_ns": 2_000_000}
    assert view.counters == counters
    assert view.in_flight == 1
    assert [bucket for bucket, count in enumerate(view.call_times) if count] == [bucket_of(5_000_000), bucket_of(9_000_000)]
    assert [bucket for bucket, count in enumerate(view.service_times) if count] == [bucket_of(2_000_000)]
    page.rename(burst, "door", "openvino", "second")
    view = next(slot for slot in look(found).slots if slot.kind is Kind.BURST)
    assert (view.name, view.device, view.stage, view.counters) == ("door", "openvino", "second", counters)


def test_the_counts_of_an_ended_slot_go_to_its_parent_and_its_room_to_the_next(page: AppPage, found: FoundPage) -> None:
    compilation = page.slot(Kind.COMPILATION, "detector")
    numbers = set()
    for _ in range(3 * app_layout.SLOTS):
        burst = page.slot(Kind.BURST, "door", parent=compilation)
        numbers.add(burst.get(app_layout.NUMBER))
        burst.answered(1_000_000, 1_000)
        burst.add(app_layout.COMPUTED, 1)
        assert look(found).total("answered") == len(numbers)
        page.release(burst)
        page.release(burst)
        assert burst.get(app_layout.COMPUTED) == 1
        burst.add(app_layout.DROPPED, 5)  # late, and counted for no other slot
    view = look(found)
    assert view.slots_lost == 0
    assert [slot.kind for slot in view.slots] == [Kind.OTHER, Kind.COMPILATION]
    assert (view.total("computed"), view.total("dropped")) == (len(numbers), 0)
    assert sum(view.slots[1].call_times) == view.slots[1].counters["answered"] == len(numbers)


def test_a_slot_that_is_only_dropped_leaves_the_page_too(page: AppPage, found: FoundPage) -> None:
    compilation = page.slot(Kind.COMPILATION, "detector")
    for _ in range(2 * app_layout.SLOTS):
        page.slot(Kind.BURST, "dropped", parent=compilation).add(app_layout.DROPPED, 1)
    view = look(found)
    assert (view.slots_lost, view.total("dropped"), len(view.slots)) == (0, 2 * app_layout.SLOTS, 2)


def test_700_bursts_are_counted_though_the_page_has_fewer_slots(page: AppPage, found: FoundPage) -> None:
    runtime = page.slot(Kind.RUNTIME, "crowded")
    bursts = [page.slot(Kind.BURST, f"burst {number}", parent=runtime) for number in range(700)]
    assert app_layout.SLOTS < 700
    for number, burst in enumerate(bursts):
        for _ in range(number):
            burst.answered(1_000_000, 1_000)
            burst.add(app_layout.COMPUTED, 1)
    page.beat(runtime)
    total = sum(range(700))
    view = look(found)
    assert view.slots_lost == 700 - (app_layout.SLOTS - 2)
    assert view.total("computed") == total
    assert view.slots[0].kind is Kind.OTHER
    assert sum(view.slots[0].call_times) == view.slots[0].counters["answered"] > 0
    assert [burst.get(app_layout.COMPUTED) for burst in bursts] == list(range(700))
    for number, burst in reversed([*enumerate(bursts)]):
        page.release(burst)
        if number % 10 == 0:  # what is lost would be missing later, too
            page.beat(runtime)
            view = look(found)
            assert view.total("computed") == total
    assert [slot.kind for slot in view.slots] == [Kind.OTHER, Kind.RUNTIME]
    assert page.slot(Kind.BURST, "again").get(app_layout.KIND) == Kind.BURST


def test_a_heartbeat_says_when_its_loop_was_last_alive(page: AppPage, found: FoundPage) -> None:
    one, other = page.slot(Kind.RUNTIME, "one"), page.slot(Kind.RUNTIME, "other")
    before = time.monotonic_ns()
    page.beat(one)
    beats = {slot.name: slot.beat_ns for slot in look(found).slots}
    assert before <= beats["one"] <= time.monotonic_ns()
    assert beats["other"] == 0
    page.beat(other)
    assert {slot.name: slot.beat_ns for slot in look(found).slots}["other"] >= beats["one"]


@pytest.mark.parametrize("lacking", ["os.memfd_create", "aionn.pages.app_page.own_start_time", "aionn.pages.app_page.time_namespace_of"])
def test_without_memory_or_proc_everything_is_counted_and_nothing_raises(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(12, "no memory")

    monkeypatch.setattr(lacking, refused)
    page = AppPage()
    slot = page.slot(Kind.BURST, "unseen")
    slot.add(app_layout.COMPUTED, 1)
    page.rename(slot, "renamed")
    page.beat(slot)
    page.release(slot)
    page.close()
    assert (page.fd, slot.get(app_layout.COMPUTED)) == (-1, 1)


def test_without_memory_for_a_slot_it_is_counted_among_the_others(page: AppPage, found: FoundPage, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(12, "no memory")

    runtime = page.slot(Kind.RUNTIME, "crowded")
    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    slot = page.slot(Kind.BURST, "unseen")
    slot.add(app_layout.COMPUTED, 1)
    page.beat(runtime)
    assert (look(found).slots_lost, look(found).total("computed")) == (1, 1)


def test_a_slot_refuses_what_does_not_fit() -> None:
    slot = BurstSlot()
    for counter in (0, 47, 96, 2**40):
        with pytest.raises(ValueError, match="expected 48 to 95"):
            slot.add(counter, 1)
    with pytest.raises(ValueError, match="expected 0 to 383"):
        slot.get(384)
    for word, content in ((-1, bytes(8)), (0, bytes(7)), (47, bytes(16)), (2**60, bytes(8))):
        with pytest.raises(ValueError, match="whole words"):
            slot.describe(word, content)
    for memory, offset in ((bytearray(8192), 8192 - 2040), (bytearray(8192), 4100), (bytearray(8192), -8), (bytearray(8192), 0)):
        with pytest.raises(ValueError, match=r"expected|behind"):
            BurstSlot(None, memory, offset)
    with pytest.raises((TypeError, BufferError)):
        BurstSlot(None, bytes(8192), 4096)
    with pytest.raises(TypeError, match="BurstSlot"):
        BurstSlot(None, None, 0, object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Trace"):
        BurstSlot(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="BurstSlot"):
        slot.become_sum_of([1])  # type: ignore[list-item]
    with pytest.raises(OverflowError):
        slot.add(app_layout.SENT, -1)


@pytest.mark.parametrize("slot", [BurstSlot(), private_slot()])
def test_native_code_gets_a_slot_through_its_buffer(slot: BurstSlot | Slot) -> None:
    with memoryview(slot) as exported:
        assert exported.readonly
        assert exported.nbytes == 24
        assert bytes(exported[:8]) == (0x746F6C7367706E61).to_bytes(8, "little")
