"""Every metric from slots that the test writes: names, labels, buckets, and limits that hold whatever names an app makes up."""

from __future__ import annotations

import gc
import os
import struct
import sys

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from aionn.caching.outcomes import MissReason
from aionn.pages import app_layout
from aionn.pages._page import BurstSlot, bucket_of
from aionn.pages.app_layout import Kind
from aionn.pages.app_page import AppPage
from aionn.pages.totals import MEASURES, MOST_NAMES, MOST_SERIES, OCTAVE_EDGES_S, Names, Sums, octaves, seconds_in
from tests.metrics.samples import families, scrape, value, values

WHERE = {"runtime": "shop", "model": "detector", "device": "onnxruntime", "stage": "first"}
TEXTS = ("detector", "onnxruntime", "first", "door", "shop")


def collected(registry: CollectorRegistry) -> list[Metric]:
    return list(registry.collect())


def fill(slot: BurstSlot) -> None:
    for number, name in enumerate(("sent", "computed", "failed", "late", "refused", "died", "hung", "copied_bytes")):
        slot.add(app_layout.COUNTERS[name], 10 * (number + 1))
    for number, name in enumerate(("dropped_replaced", "dropped_late", "dropped_rejected")):
        slot.add(app_layout.COUNTERS[name], number + 1)
    slot.add(app_layout.DROPPED, 10)
    for _ in range(6):
        slot.answered(3_000_000, 1_000_000)
    slot.took(app_layout.AGES, 40_000_000)


def test_a_burst_and_its_past_are_one_series(page: AppPage, registry: CollectorRegistry) -> None:
    burst, past = page.slot(Kind.BURST, *TEXTS), page.past(Kind.PAST_BURSTS, *TEXTS)
    single = page.slot(Kind.SINGLE, "detector", "onnxruntime", "first", "", "shop")
    for slot in (burst, past, single):
        fill(slot)
    page.gauge(burst, 4096, 3)
    now = collected(registry)
    assert value(now, "aionn_executions_total", **WHERE, path="burst", status="ok") == 40
    assert {dict(labels)["status"]: count for labels, count in values(now, "aionn_executions_total", **WHERE, path="single").items()} == {
        "ok": 20,
        "execution": 30,
        "deadline": 40,
        "caller": 50,
        "driver_died": 60,
        "driver_hung": 70,
    }
    assert value(now, "aionn_frames_dropped_total", runtime="shop", model="detector", burst="door", reason="rejected") == 6
    assert value(now, "aionn_frames_dropped_total", runtime="shop", model="detector", burst="door", reason="other") == 8
    on = {label: WHERE[label] for label in ("runtime", "model", "device")}
    assert value(now, "aionn_copied_bytes_total", **on) == 240
    assert value(now, "aionn_in_flight", **on) == 2 * (10 - 6)
    assert (value(now, "aionn_bursts", **on), value(now, "aionn_shared_memory_bytes", **on)) == (1, 4096)
    assert value(now, "aionn_frames_free", **on) == 3
    assert value(now, "aionn_execution_seconds_count", **WHERE) == 18
    assert value(now, "aionn_execution_seconds_sum", **WHERE) == pytest.approx(18 * 0.003, rel=0.13)
    assert value(now, "aionn_device_seconds_sum", **WHERE) == pytest.approx(18 * 0.001, rel=1e-12)
    assert value(now, "aionn_frame_age_seconds_count", runtime="shop", model="detector", burst="door") == 2
    page.release(burst)  # its counts go nowhere, since this test gave it no parent
    assert value(collected(registry), "aionn_executions_total", **WHERE, path="burst", status="ok") == 20


def test_what_ends_goes_on_under_the_same_labels(page: AppPage, registry: CollectorRegistry) -> None:
    burst = page.slot(Kind.BURST, *TEXTS, parent=page.past(Kind.PAST_BURSTS, *TEXTS))
    fill(burst)
    before = {name: family.samples for name, family in families(scrape(registry)).items() if family.type in ("counter", "histogram")}
    page.release(burst)
    after = {name: family.samples for name, family in families(scrape(registry)).items() if family.type in ("counter", "histogram")}
    assert before == after


def test_a_burst_without_texts_has_those_of_its_compilation(page: AppPage, registry: CollectorRegistry) -> None:
    runtime = page.slot(Kind.RUNTIME, "shop", "serving")
    compilation = page.slot(Kind.COMPILATION, "detector", parent=runtime)
    burst = page.slot(Kind.BURST, "", "onnxruntime", "first", parent=compilation)
    fill(burst)
    assert value(collected(registry), "aionn_executions_total", **WHERE, path="burst", status="ok") == 20


def fill_lasting(page: AppPage) -> BurstSlot:
    """Count in slots of a device, a stage and a cache. Returns the device's."""
    device = page.lasting(Kind.DEVICE, "onnxruntime", "cpu", "", "1.24;avx2", "shop")
    for number, name in enumerate(app_layout.DEVICE_COUNTERS):
        device.add(app_layout.DEVICE_COUNTERS[name], number + 1)
    device.add(app_layout.REASONS + list(MissReason).index(MissReason.WRONG_BYTES), 3)
    device.add(app_layout.REASONS, 4)
    device.took(app_layout.CALL_TIMES, 2_500_000_000)
    page.gauge(device, 2)
    low = page.lasting(Kind.DEVICE, "onnxruntime", "", "low", "", "shop")
    low.add(app_layout.STARTS, 1)
    device.describe(app_layout.PID, struct.pack("=Q", os.getpid()))
    stage = page.lasting(Kind.STAGE, "detector", "serving", "openvino", "", "shop")
    stage.add(app_layout.STAGE_COUNTERS["serving"], 2)
    stage.took(app_layout.CALL_TIMES, 1_000_000)
    cache = page.lasting(Kind.CACHE, "models", "", "", "", "shop")
    cache.add(app_layout.EVICTED, 5)
    cache.add(app_layout.REASONS + list(MissReason).index(MissReason.NO_SPACE), 6)
    page.gauge(cache, 123456, 7)
    return device


def test_devices_stages_and_caches(page: AppPage, registry: CollectorRegistry) -> None:
    device = fill_lasting(page)
    now = collected(registry)
    on = {"runtime": "shop", "device": "onnxruntime"}
    assert value(now, "aionn_driver_info", **on, type="cpu", version="1.24;avx2") == 1
    assert value(now, "aionn_driver_up", **on) == 1
    assert value(now, "aionn_driver_starts_total", **on) == 2
    ends = {dict(labels)["cause"]: count for labels, count in values(now, "aionn_driver_ends_total", **on).items()}
    assert ends == {"exit": 2, "signal": 3, "hung": 4, "protocol": 5, "closed": 6}
    outcomes = {
        (dict(labels)["outcome"], dict(labels)["reason"]): count for labels, count in values(now, "aionn_compilations_total", **on).items()
    }
    assert outcomes == {
        ("hit", ""): 7,
        ("miss", "absent"): 4,
        ("miss", "wrong_bytes"): 3,
        ("declined", ""): 9,
        ("no_cache", ""): 10,
        ("failed", ""): 11,
    }
    assert (value(now, "aionn_compiling", **on), value(now, "aionn_compilation_seconds_count", **on)) == (2, 1)
    assert value(now, "aionn_driver_resident_memory_bytes", **on) > 1_000_000
    assert value(now, "aionn_driver_cpu_seconds_total", **on) > 0
    assert value(now, "aionn_driver_threads", **on) >= 1
    assert value(now, "aionn_driver_open_fds", **on) >= 3
    of = {"runtime": "shop", "model": "detector", "stage": "openvino"}
    states = {dict(labels)["state"]: count for labels, count in values(now, "aionn_stage_state", **of).items()}
    assert states == dict.fromkeys(app_layout.STAGE_STATES, 0) | {"serving": 1}
    assert value(now, "aionn_stage_transitions_total", **of, state="serving") == 2
    assert value(now, "aionn_stage_swap_seconds_count", **of) == 1
    there = {"runtime": "shop", "cache": "models"}
    assert (value(now, "aionn_cache_bytes", **there), value(now, "aionn_cache_entries", **there)) == (123456, 7)
    assert value(now, "aionn_cache_refused_total", **there) == value(now, "aionn_cache_refused_total", **there, reason="no_space") == 6
    assert value(now, "aionn_cache_evicted_total", **there) == 5

    before = value(now, "aionn_driver_cpu_seconds_total", **on)
    device.describe(app_layout.PID, struct.pack("=Q", 0))
    now = collected(registry)
    assert value(now, "aionn_driver_up", **on) == 0
    assert value(now, "aionn_driver_cpu_seconds_total", **on) == before  # as of the last look
    assert values(now, "aionn_driver_threads", **on) == values(now, "aionn_driver_info", **on) == {}


def test_every_metric_has_the_labels_of_the_table(page: AppPage, registry: CollectorRegistry) -> None:
    burst = page.slot(Kind.BURST, *TEXTS)
    fill(burst)
    burst.add(app_layout.JOINED_RUNS, 4)
    burst.add(app_layout.JOINED_ROWS, 32)
    fill_lasting(page)
    found = families(scrape(registry))
    assert [value(list(found.values()), f"aionn_joined_{what}_total", runtime="shop", model="detector") for what in ("runs", "rows")] == [
        4,
        32,
    ]
    assert {name.removeprefix("aionn_").removesuffix("_info") for name in found} == MEASURES.keys()
    kinds = {"counter": "counter", "gauge": "gauge", "histogram": "histogram", "info": "gauge"}
    for name, measure in MEASURES.items():
        family = found[f"aionn_{name}_info" if measure.kind == "info" else f"aionn_{name}"]
        assert family.type == kinds[measure.kind]
        assert {frozenset(sample.labels) - {"le"} for sample in family.samples} == {frozenset(measure.labels)}
        assert family.documentation == measure.text
    buckets = [sample.labels["le"] for sample in found["aionn_frame_age_seconds"].samples if "le" in sample.labels]
    assert [float(edge) for edge in buckets] == [*OCTAVE_EDGES_S, float("inf")]


@pytest.mark.parametrize("power", range(-18, 4))
def test_classic_buckets_have_no_error(power: int) -> None:
    """Whatever durations there are, each is counted below just those edges that it does not reach."""
    edge_ns = 2.0**power * 1e9
    durations = [int(edge_ns * factor) for factor in (1.001, 1.25, 1.49999, 1.75, 1.999)]
    buckets = [0] * 90
    for ns in (1, 17_000_000_000, *durations):
        buckets[bucket_of(ns)] += 1
    below = dict(zip((*OCTAVE_EDGES_S, float("inf")), octaves(buckets), strict=True))
    assert below[2.0**power] == 1
    assert below[2.0 ** (power + 1)] == 6
    assert (below[16.0], below[float("inf")]) == (6, 7)
    own = [0] * 90
    for ns in durations:
        own[bucket_of(ns)] += 1
    assert seconds_in(own) == pytest.approx(sum(durations) / 1e9, rel=0.125)


def test_a_thousand_names_make_no_more_series_and_no_more_memory(page: AppPage, registry: CollectorRegistry) -> None:
    """Row O7 on a page: 1,000 models and 1,000 bursts."""

    def burst(number: int, name: str) -> None:
        texts = (page.named("model", f"model{number}", "shop"), "onnxruntime", "first", page.named("burst", name, "shop"), "shop")
        past = page.past(Kind.PAST_BURSTS, *texts)
        past.add(app_layout.COMPUTED, 1)
        past.took(app_layout.AGES, 1_000_000)

    def series() -> int:
        return sum(len(family.samples) for family in registry.collect())

    for number in range(70):
        burst(number, "")
    for number in range(260):
        burst(0, f"burst{number}")
    before = series()
    file_bytes = os.stat(f"/proc/self/fd/{page.fd}").st_blocks
    total = value(collected(registry), "aionn_executions_total", status="ok")
    series()
    gc.collect()
    blocks = sys.getallocatedblocks()
    for number in range(1000):
        burst(number, "")
        burst(0, f"burst{number}")
    assert series() == before
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 2000  # less than one object for each new name
    assert os.stat(f"/proc/self/fd/{page.fd}").st_blocks == file_bytes
    now = collected(registry)
    assert value(now, "aionn_executions_total", status="ok") == total + 2000
    models = {dict(labels)["model"] for labels in values(now, "aionn_executions_total", status="ok")}
    assert len(models) == 65
    assert "other" in models
    assert len({dict(labels)["burst"] for labels in values(now, "aionn_frame_age_seconds_count")}) == 257


def test_names_that_live_slots_have_are_bounded_too() -> None:
    names = Names()
    shown = [names.shown("model", f"model{number}", "shop") for number in range(1000)]
    assert shown[: MOST_NAMES["model"]] == [f"model{number}" for number in range(64)]
    assert set(shown[64:]) == {"other"}
    assert [names.shown("burst", f"burst{number}", "shop") for number in range(1000)].count("") == 1000 - 256
    assert names.shown("model", "model999", "other shop") == "model999"


def test_series_are_bounded_whatever_their_labels_say() -> None:
    sums = Sums()
    for number in range(3 * MOST_SERIES):
        sums.add("driver_starts", ("shop", f"device{number}"), 1)
        sums.add_times("compilation_seconds", ("shop", f"device{number}"), [1] * 90)
    assert len(sums.values["driver_starts"]) == len(sums.times["compilation_seconds"]) == MOST_SERIES + 1
    assert sums.values["driver_starts"]["other", "other"] == 2 * MOST_SERIES
    assert sums.times["compilation_seconds"]["other", "other"][0] == 2 * MOST_SERIES


def test_what_found_no_room_is_counted_as_other(page: AppPage, registry: CollectorRegistry) -> None:
    runtime = page.slot(Kind.RUNTIME, "shop", "serving")
    taken = []
    while not (lost := scrape_lost(registry)):
        taken += [page.slot(Kind.BURST, *TEXTS) for _ in range(100)]
    for slot in taken:
        slot.add(app_layout.COMPUTED, 1)
    page.beat(runtime)
    now = collected(registry)
    assert value(now, "aionn_executions_total", status="ok") == len(taken)
    assert value(now, "aionn_executions_total", status="ok", model="other", path="other") == lost
    for slot in taken:
        page.release(slot)


def scrape_lost(registry: CollectorRegistry) -> int:
    return int(value(collected(registry), "aionn_statistics_slots_lost_total"))
