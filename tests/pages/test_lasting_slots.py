"""Slots that last: they keep what ended slots have counted, by name, until the page is closed; and a reader keeps it even longer."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from aionn.pages import app_layout
from aionn.pages._page import BurstSlot, bucket_of
from aionn.pages.app_layout import AGES, ANSWERED, COMPUTED, LOST, SENT, Kind, PageView
from aionn.pages.app_page import AppPage, close_page, open_page
from aionn.pages.finding import FoundPage, find_page


def look(found: FoundPage) -> PageView:
    view = found.read()
    assert view is not None
    return view


def test_a_slot_that_follows_another_parent_leaves_its_counts_with_the_one_before(page: AppPage, found: FoundPage) -> None:
    old = page.past(Kind.PAST_BURSTS, "vad", "onnxruntime", "quick", "door", "app")
    new = page.past(Kind.PAST_BURSTS, "vad", "openvino", "better", "door", "app")
    burst = page.slot(Kind.BURST, "vad", "onnxruntime", "quick", "door", "app")
    burst.follow(old)
    for _ in range(3):
        burst.add(SENT, 1)
        burst.answered(2_000_000, 1_000_000)
    burst.add(SENT, 2)  # in flight
    burst.add(LOST, 1)
    burst.took(AGES, 5_000_000)
    burst.computed(64)
    burst.follow(new)
    shown = {(slot.kind, slot.stage): slot for slot in look(found).slots}
    assert shown[Kind.PAST_BURSTS, "quick"].counters["answered"] == 3
    assert shown[Kind.PAST_BURSTS, "quick"].counters["sent"] == 4
    assert shown[Kind.PAST_BURSTS, "quick"].in_flight == 0
    assert shown[Kind.BURST, "quick"].in_flight == 1
    assert shown[Kind.PAST_BURSTS, "quick"].ages[bucket_of(5_000_000)] == 1
    burst.answered(2_000_000, 1_000_000)
    burst.computed(64)
    assert [burst.get(word) for word in (SENT, ANSWERED, COMPUTED, LOST)] == [5, 4, 2, 1]
    view = look(found)
    assert (view.total("sent"), view.total("answered"), view.total("computed"), view.total("copied_bytes")) == (5, 4, 2, 128)
    page.release(burst)
    shown = {(slot.kind, slot.stage): slot for slot in look(found).slots}
    assert shown[Kind.PAST_BURSTS, "better"].counters["computed"] == 1
    assert [burst.get(word) for word in (SENT, ANSWERED, COMPUTED, LOST)] == [5, 4, 2, 1]
    assert look(found).total("computed") == 2


def test_following_the_same_parent_changes_nothing(page: AppPage, found: FoundPage) -> None:
    past = page.past(Kind.PAST_SINGLES, "vad", "reference", "reference", "", "app")
    single = page.slot(Kind.SINGLE, "vad")
    for _ in range(3):
        single.follow(past)
        single.computed(1)
    assert next(slot for slot in look(found).slots if slot.kind is Kind.SINGLE).counters["computed"] == 3
    with pytest.raises(TypeError, match="BurstSlot"):
        single.follow(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="first word of a histogram"):
        single.took(AGES + 1, 1)


def test_a_slot_that_lasts_is_found_again_by_its_texts(page: AppPage, found: FoundPage) -> None:
    device = page.lasting(Kind.DEVICE, "onnxruntime", "", "low", "", "app")
    device.add(app_layout.STARTS, 2)
    device.add(app_layout.REASONS + 3, 1)
    page.gauge(device, 7, 8)
    assert page.lasting(Kind.DEVICE, "onnxruntime", "", "low", "", "app") is device
    assert page.lasting(Kind.DEVICE, "onnxruntime", "", "", "", "app") is not device
    view = next(slot for slot in look(found).slots if slot.stage == "low")
    assert (view.kind, view.name, view.runtime, view.gauges) == (Kind.DEVICE, "onnxruntime", "app", (7, 8))
    assert (view.counters["starts"], view.reasons[3], sum(view.reasons), view.executes) == (2, 1, 1, False)
    assert look(found).total("sent") == 0


def test_a_thousand_names_take_a_bounded_number_of_slots_and_lose_no_count(page: AppPage, found: FoundPage) -> None:
    for number in range(1000):
        burst = page.slot(Kind.BURST)
        burst.follow(page.past(Kind.PAST_BURSTS, f"model {number}", "reference", "reference", "", "app"))
        burst.computed(1)
        page.release(burst)
    slots = [slot for slot in look(found).slots if slot.kind is Kind.PAST_BURSTS]
    assert len(slots) == 65
    assert next(slot for slot in slots if slot.name == "other").counters["computed"] == 1000 - 64
    for number in range(1000):
        burst = page.slot(Kind.BURST)
        burst.follow(page.past(Kind.PAST_BURSTS, "model 1", "reference", "reference", f"camera {number}", "app"))
        burst.computed(1)
        page.release(burst)
    view = look(found)
    slots = [slot for slot in view.slots if slot.kind is Kind.PAST_BURSTS]
    assert len(slots) == 65 + 256
    assert next(slot for slot in slots if slot.name == "model 1" and not slot.burst).counters["computed"] == 1 + 1000 - 256
    assert (view.total("computed"), view.slots_lost) == (2000, 0)


def test_counts_are_kept_even_where_no_slot_is_left(page: AppPage, found: FoundPage) -> None:
    runtime = page.slot(Kind.RUNTIME, "crowded")
    held = [page.slot(Kind.BURST) for _ in range(app_layout.SLOTS)]
    past = page.past(Kind.PAST_BURSTS, "vad", "reference", "reference", "", "app")
    page.release(held.pop(0))
    burst = page.slot(Kind.BURST)
    burst.follow(past)
    burst.computed(1)
    page.release(burst)
    page.beat(runtime)
    view = look(found)
    assert (view.slots[0].kind, view.slots[0].counters["computed"], view.total("computed")) == (Kind.OTHER, 1, 1)


def test_a_reader_keeps_the_last_counts_of_a_page_that_was_closed() -> None:
    written = open_page()
    reader = find_page(os.getpid())
    assert reader is not None
    with reader:
        burst = written.slot(Kind.BURST, "vad")
        burst.follow(written.past(Kind.PAST_BURSTS, "vad", "reference", "reference", "", "app"))
        burst.computed(64)
        single = written.slot(Kind.SINGLE, "vad")
        single.follow(written.past(Kind.PAST_SINGLES, "vad", "reference", "reference", "", "app"))
        single.computed(64)
        written.release(burst)
        close_page(written)
        assert find_page(os.getpid()) is None
        view = look(reader)
        assert view.total("computed") == 2
        assert {slot.kind for slot in view.slots} == {Kind.OTHER, Kind.PAST_BURSTS, Kind.PAST_SINGLES, Kind.SINGLE}
        assert single.get(COMPUTED) == 1
        single.computed(64)  # late, and for its owner alone
        assert (single.get(COMPUTED), look(reader).total("computed")) == (2, 2)
    del written
    gc.collect()


def test_a_slot_without_a_page_follows_and_counts(page: AppPage) -> None:
    alone = BurstSlot()
    alone.follow(page.past(Kind.PAST_BURSTS, "vad", "reference", "reference", "", "app"))
    alone.computed(np.int64(3).item())
    assert alone.get(COMPUTED) == 1
