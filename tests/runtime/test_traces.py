"""Traces of real apps and real drivers: what a file has of each frame, from which processes, and by all three ways. Rows O13 and O14."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.pages import record_reader
from aionn.pages.app_layout import TRACE_RECORDS
from aionn.pages.app_page import AppPage
from aionn.pages.finding import find_page
from aionn.testing import FakeDevice, identity_model
from tests.apps import App, run_app
from tests.pages.tracing import tracing
from tests.trace_format import FormatError, check, read

FRAMES = 1008
X = {"x": np.arange(4, dtype=np.float32)}


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": (4,)}))


async def eight_at_a_time(burst: aionn.Burst, frames: int) -> None:
    for _ in range(frames // 8):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(burst.compute(X))


def phases_of(events: list[dict[str, Any]]) -> dict[tuple[int, str], dict[str, Decimal]]:
    """The length of each phase of each request in flight, in microseconds, with that of the whole as "frame"."""
    found: dict[tuple[int, str], dict[str, Decimal]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "be" and event["cat"] != "span":
            lengths = found[event["pid"], event["id2"]["local"]]
            lengths[event["name"]] = lengths.get(event["name"], Decimal(0)) + event["ts"] * (1 if event["ph"] == "e" else -1)
    return found


def flows_of(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    return flows


@pytest.mark.anyio
async def test_eight_in_flight_on_two_devices_make_a_file_that_nests_with_each_frame_from_end_to_end(tmp_path: Path) -> None:
    async with aionn.Runtime(name="twofold") as runtime:
        one = await runtime.compile(model(), devices=("reference",), name="first")
        other = await runtime.compile(model(), devices=("onnxruntime",), name="second")
        async with one.burst(depth=8, name="door") as door, other.burst(depth=8, name="yard") as yard:
            await asyncio.gather(door.compute(X), yard.compute(X))
            with trace.record() as recording:
                await asyncio.gather(eight_at_a_time(door, FRAMES // 2), eight_at_a_time(yard, FRAMES // 2))
        drivers = {device.name: device.pid for device in runtime.devices if device.pid}
    assert recording.lost == 0
    assert len(recording.frames) == FRAMES
    in_flight = [sum(other.sent_ns <= frame.sent_ns < other.settled_ns for other in recording.frames) for frame in recording.frames]
    assert max(in_flight) >= 7  # the case did occur; the first of eight may be answered at once
    recording.write_chrome(tmp_path / "t.json.gz")
    events = check(tmp_path / "t.json.gz")["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        os.getpid(): "app twofold",
        drivers["reference"]: "driver reference",
        drivers["onnxruntime"]: "driver onnxruntime",
    }
    flows = flows_of(events)
    assert len(flows) == FRAMES
    for flow in flows.values():
        assert [event["ph"] for event in sorted(flow, key=lambda event: event["ts"])] == ["s", "t", "f"]
        assert [event["pid"] == os.getpid() for event in sorted(flow, key=lambda event: event["ts"])] == [True, False, True]
    phases = phases_of(events)
    assert len(phases) == FRAMES
    for lengths in phases.values():
        assert lengths.keys() == {"frame", "queue", "driver", "return"}
        assert abs(lengths["queue"] + lengths["driver"] + lengths["return"] - lengths["frame"]) < 5
        assert lengths["frame"] > 0
    about = Counter((event["cat"], event["args"]["device"]) for event in events if event["ph"] == "b" and event["name"] == "frame")
    assert about == {("door (first)", "reference"): FRAMES // 2, ("yard (second)", "onnxruntime"): FRAMES // 2}
    for name, pid in drivers.items():
        runs = [event for event in events if event["ph"] == "X" and event["name"] == "execute" and event["pid"] == pid]
        assert len(runs) == FRAMES // 2
        assert all(run["args"]["device"] == name and run["args"]["burst"] in ("door", "yard") for run in runs)


@pytest.mark.anyio
async def test_what_is_recorded_takes_the_way_of_what_is_not(both_ways: bool) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",), name="same")
        async with compilation.burst(name="path") as burst:
            await burst.compute(X)
            with trace.record() as recording:
                for _ in range(20):
                    await burst.compute(X)
    lanes = {frame.lane for frame in recording.frames}
    assert len(recording.frames) == 20
    assert len(lanes) == 1
    assert next(iter(lanes)).startswith("lane" if both_ways else "listener of burst")
    spans = defaultdict(list)
    for span in recording.spans:
        spans[span.name].append(span)
    assert len(spans["burst.execute"]) == len(spans["burst.queue_wait"]) == len(spans["burst.return"]) == 20
    executed = spans["burst.execute"][0]
    assert executed.pid != os.getpid()
    assert executed.attributes | {"queue": 0, "identity": 0} == {
        "model": "same",
        "device": "reference",
        "stage": "reference",
        "burst": "path",
        "runtime": recording.frames[0].about["runtime"],
        "queue": 0,
        "identity": 0,
    }


@pytest.mark.anyio
async def test_a_driver_that_starts_meanwhile_is_recorded_from_its_first_step(tmp_path: Path, surroundings: None) -> None:
    with trace.record() as recording:
        async with aionn.Runtime(state_dir=tmp_path / "state") as runtime:
            for _ in range(2):
                compilation = await runtime.compile(model(), devices=("onnxruntime",), cache_dir=tmp_path / "cache", name="kept")
                await compilation.compute(X)
                async with compilation.burst(name="short") as burst:
                    await burst.compute(X)
                await compilation.aclose()
    ours = {span.name for span in recording.spans if span.pid == os.getpid()}
    theirs = {span.name for span in recording.spans if span.pid != os.getpid()}
    assert {"compile", "driver.start", "prepare", "compute", "burst.connect", "burst.queue_wait", "burst.return"} <= ours
    assert {"driver.compile", "driver.save", "driver.load", "cache.verify", "burst.execute"} <= theirs
    assert all(span.attributes["device"] == "onnxruntime" for span in recording.spans if span.pid != os.getpid())
    assert [span.attributes["model"] for span in recording.spans if span.name in ("compile", "prepare")] == ["kept"] * 3
    assert {frame.about["model"] for frame in recording.frames} == {"kept"}
    assert Counter(frame.about.get("burst") for frame in recording.frames) == {"short": 2, None: 2}  # None: behind `compute`
    recording.write_chrome(tmp_path / "t.json")
    check(tmp_path / "t.json")


@pytest.mark.anyio
async def test_a_stream_has_its_frames_from_their_capture_on(tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",))
        async with compilation.burst(name="stream") as burst:
            noted = []

            async def source() -> AsyncIterator[Any]:
                for number in range(10):
                    if number % 2:
                        yield X
                        continue
                    frame = await burst.lease()
                    frame["x"][...] = X["x"]
                    frame.captured_ns = time.monotonic_ns() - 1_000_000
                    noted.append(frame.captured_ns)
                    yield frame

            with trace.record() as recording:
                async for _ in burst.map(source()):
                    pass
                await burst.compute(X)  # of no stream
    frames = recording.frames
    assert len(frames) == 11
    assert [frame.captured_ns for frame in frames[:10:2]] == noted
    assert all(0 < frame.captured_ns <= frame.sent_ns for frame in frames[:10])
    assert frames[10].captured_ns == 0
    recording.write_chrome(tmp_path / "t.json")
    events = check(tmp_path / "t.json")["traceEvents"]
    assert Counter(len(flow) for flow in flows_of(events).values()) == {4: 10, 3: 1}
    assert sum(event["ph"] == "b" and event["name"] == "capture" for event in events) == 10


@pytest.mark.anyio
async def test_drops_of_two_bursts_do_not_add_up(tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",), name="m")
        with trace.record() as recording:
            for name, frames in (("one", 3), ("two", 5)):
                async with compilation.burst(name=name) as burst:
                    results = burst.map([X] * frames, deadline_s=1e-9)
                    with pytest.raises(aionn.DeadlineError):
                        await anext(results)
                    await results.aclose()
    recording.write_chrome(tmp_path / "t.json")
    events = check(tmp_path / "t.json")["traceEvents"]
    drops = {event["name"]: event["args"] for event in events if event["ph"] == "C" and event["name"].startswith("stream.dropped")}
    assert drops.keys() == {"stream.dropped [m one]", "stream.dropped [m two]"}
    assert all(sum(series.values()) < 8 for series in drops.values())


@pytest.mark.anyio
async def test_a_driver_that_is_killed_leaves_its_records_and_a_file_that_holds(tmp_path: Path) -> None:
    with FakeDevice() as fake:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(model(), devices=(fake.name,))
            async with compilation.burst() as burst:
                with trace.record() as recording:
                    for _ in range(5):
                        await burst.compute(X)
                    fake.hang()
                    call = asyncio.create_task(burst.compute(X))
                    await fake.heard("run")
                    runtime._opened._record.drivers_end()  # or the driver might be killed before the first look at its rings
                    pid = next(device.pid for device in runtime.devices if device.name == fake.name)
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                    with pytest.raises(aionn.DriverDiedError):
                        await call
    assert len(recording.frames) == 6
    assert [bool(frame.answered_ns) for frame in recording.frames[:5]] == [True] * 5
    assert recording.frames[5].settled_ns == 0
    recording.write_chrome(tmp_path / "t.json")
    events = check(tmp_path / "t.json")["traceEvents"]
    assert [event["args"].get("finished", True) for event in events if event["ph"] == "b" and event["name"] == "frame"] == [True] * 5 + [
        False
    ]


@pytest.mark.anyio
async def test_what_a_recording_has_no_room_for_is_counted_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_reader, "MOST_BYTES", 64 * 20)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",))
        async with compilation.burst() as burst:
            await burst.compute(X)
            with trace.record() as recording:
                for _ in range(200):
                    await burst.compute(X)
                runtime._opened._record.drivers_end()
                await burst.compute(X)
    assert recording.lost > 0
    recording.write_chrome(tmp_path / "t.json")
    found = check(tmp_path / "t.json")
    assert found["otherData"]["lost_records"] == recording.lost
    assert [event["args"]["lost"] for event in found["traceEvents"] if event["ph"] == "i"] == [recording.lost]


@pytest.mark.anyio
async def test_a_second_recording_has_nothing_of_the_first_and_counts_none_of_it_as_lost() -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=("reference",))
        async with compilation.burst() as burst:
            with trace.record() as first:
                for _ in range(TRACE_RECORDS // 2 + 9):  # the app's ring overwrites its oldest records
                    await burst.compute(X)
            with trace.record() as second:
                for _ in range(7):
                    await burst.compute(X)
    assert len(first.frames) > 0  # on a busy machine it may lose some, and says so
    assert (len(second.frames), second.lost) == (7, 0)
    assert all(frame.sent_ns and frame.taken_ns and frame.answered_ns and frame.settled_ns for frame in second.frames)


def test_a_recording_ends_its_thread_and_asks_for_nothing_more() -> None:
    async def main() -> None:
        async with aionn.Runtime() as runtime:
            page = runtime._opened.session.page
            with trace.record():
                assert page.traced_until_ns > time.monotonic_ns()
                assert "aionn trace" in [thread.name for thread in threading.enumerate()]
                with trace.record():
                    pass
                assert page.traced_until_ns > 0  # the inner one has not ended the outer one
            assert page.traced_until_ns == 0
            assert "aionn trace" not in [thread.name for thread in threading.enumerate()]
            assert not trace.active

    aionn.run(main)


# --- AIONN_TRACE ------------------------------------------------------------------------------------------------------------

APP = """
import asyncio, signal, sys
import numpy as np
import aionn
from aionn.testing import identity_model

async def main():
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    async with aionn.Runtime(name="traced app", start=()) as runtime:
        model = aionn.Model.from_onnx(identity_model({"x": (4,)}))
        compilation = await runtime.compile(model, devices=("reference",), name="m")
        async with compilation.burst(name="cam") as burst:
            await burst.compute({"x": np.zeros(4, np.float32)})
            print("ready", flush=True)
            while not over.is_set():
                await burst.compute({"x": np.zeros(4, np.float32)})
                await asyncio.sleep(0.001)
    async with aionn.Runtime(name="again", start=()) as runtime:
        pass
aionn.run(main)
"""


@contextmanager
def app(**environment: str) -> Iterator[subprocess.Popen[str]]:
    """An app that computes a frame each millisecond, until SIGTERM."""
    command = [sys.executable, "-c", APP]
    with App(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_variable_writes_a_file_when_sigterm_closes_the_runtime(tmp_path: Path) -> None:
    with app(AIONN_TRACE=f"{tmp_path}/{{pid}}.json.gz") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"{process.pid}.2.json.gz", f"{process.pid}.json.gz"]
    events = check(tmp_path / f"{process.pid}.json.gz")["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "b" and event["name"] == "frame"} == {"cam (m)"}
    assert {"driver.compile", "driver.start", "compile", "execute"} <= {event["name"] for event in events}
    assert sorted(event["args"]["name"] for event in events if event["name"] == "process_name") == ["app traced app", "driver reference"]
    check(tmp_path / f"{process.pid}.2.json.gz")


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with aionn.Runtime(start=()):
            pass

    monkeypatch.setenv("AIONN_TRACE", str(tmp_path / "missing" / "t.json"))
    aionn.run(main)
    (record,) = [record for record in caplog.records if record.name == "aionn.trace"]
    assert "name another file" in record.getMessage()
    assert not trace.active


# --- from outside -----------------------------------------------------------------------------------------------------------


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_app([sys.executable, "-m", "aionn", "trace", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_a_running_app_is_traced_from_outside_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    with app() as process:
        done = command("--pid", process.pid, "--seconds", 0.7, "-o", path, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        told = json.loads(done.stdout)
        assert told["frames"] > 10
        assert (told["pid"], told["lost_records"]) == (process.pid, 0)
        page = find_page(process.pid)
        assert page is not None
        with page:
            view = page.read()
            assert view is not None
            assert view.trace_until_ns == 0
        assert process.poll() is None
    assert sorted(told["processes"].values()) == ["app traced app", "driver reference"]
    events = check(path)["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "b" and event["name"] == "frame"} == {"cam (m)"}
    assert len({event["pid"] for event in events if event["ph"] == "X"}) == 2


def test_python_spans_of_an_app_reach_a_tracer_outside(tmp_path: Path) -> None:
    """The app writes them as records once its heartbeat has seen the tracer."""

    async def main() -> trace.Recording:
        recording = trace.Recording()
        async with aionn.Runtime() as runtime:
            page = find_page(os.getpid())
            assert page is not None
            collector = record_reader.RecordReader(page)

            async def look() -> None:
                while True:  # else a compile that takes longer than `ASK_NS` is recorded in part only
                    await anyio.sleep(record_reader.LOOK_S)
                    collector.look()

            runtime._opened._record._tracer.beat()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(look)
                await runtime.compile(model(), devices=("reference",), name="seen")
                tasks.cancel_scope.cancel()
            runtime._opened._record._tracer.beat()
            recording.pending.append(collector.close())
            runtime._opened._record._tracer.beat()
            assert not trace.active
        return recording

    recording = aionn.run(main)
    spans = {span.name: span for span in recording.spans}
    assert {"compile", "prepare", "driver.compile"} <= spans.keys()
    assert spans["compile"].attributes == {"model": "seen", "preference": "fast_single_answer"}
    assert spans["compile"].pid == os.getpid() != spans["driver.compile"].pid


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--pid", 2**22 + 1), "there is no process"),
        (("--pid", os.getpid()), "has no open aionn runtime"),
        (("--pid", os.getpid(), "--seconds", "0"), "above 0"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_a_sentence(arguments: tuple[Any, ...], sentence: str, tmp_path: Path) -> None:
    done = command(*arguments, "-o", tmp_path / "t.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_users_process_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from aionn.cli import top_reading
    from aionn.cli import tracing as cli
    from aionn.cli.printing import UsageError

    if os.getuid() != 0:
        with pytest.raises(UsageError, match="belongs to another user"):
            cli.trace_process(1, 1.0, str(tmp_path / "t.json"), False)
    else:

        def refused(pid: int) -> None:
            raise PermissionError(13, "Permission denied", f"/proc/{pid}/fd")

        monkeypatch.setattr(top_reading, "find_page", refused)
        with pytest.raises(UsageError, match="belongs to another user"):
            cli.trace_process(1, 1.0, str(tmp_path / "t.json"), False)


# --- the file -----------------------------------------------------------------------------------------------------------------


def test_spans_that_overlap_in_a_thread_are_async_and_those_that_nest_are_slices(tmp_path: Path) -> None:
    recording = trace.Recording()
    far = 10_000_000 * 10**9 + 1  # a machine that runs for months: a float of microseconds would round this
    for name, started, ended in (("outer", 0, 100), ("inner", 10, 20), ("across", 15, 30), ("empty", 40, 40), ("next", 100, 101)):
        recording.keep(trace.Span(name, far + started, far + ended))
    recording.write_chrome(tmp_path / "t.json")
    events = check(tmp_path / "t.json")["traceEvents"]
    assert {event["name"]: event["ph"] for event in events if event["ph"] in "Xb"} == {
        "outer": "X",
        "inner": "X",
        "across": "b",
        "empty": "X",
        "next": "X",
    }
    (inner,) = [event for event in events if event["name"] == "inner"]
    assert (inner["ts"] * 1000, inner["dur"] * 1000) == (far + 10, 10)


def test_a_file_that_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    recording = trace.Recording()
    recording.keep(trace.Span("one", 1, 2))
    recording.write_chrome(tmp_path / "t.json")
    recording.write_chrome(tmp_path / "t.json.gz")
    assert (
        json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
        == json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    )


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 0, "dur": 0}, "shorter"),
        ({"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 5, "dur": 10}, "overlaps"),
        ({"ph": "X", "name": "x", "pid": 1, "ts": 20, "dur": 1}, "has no"),
        ({"ph": "X", "name": "x", "pid": 2, "tid": 1, "ts": 20, "dur": 1}, "without a name"),
        ({"ph": "b", "name": "x", "pid": 1, "tid": 1, "ts": 5, "cat": "c", "id2": {"local": "1"}}, "never ends"),
        ({"ph": "e", "name": "x", "pid": 1, "tid": 1, "ts": 5, "cat": "c", "id2": {"local": "1"}}, "ends nothing"),
        ({"ph": "s", "name": "x", "pid": 1, "tid": 1, "ts": 15, "cat": "c", "id": 1}, "in no slice"),
        ({"ph": "s", "name": "x", "pid": 1, "tid": 1, "ts": 5, "cat": "c", "id": 1}, "a flow goes"),
    ],
)
def test_the_validator_finds_what_is_wrong(change: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    recording = trace.Recording()
    recording.keep(trace.Span("one", 0, 10_000, pid=1, thread_id=1))
    path = tmp_path / "t.json"
    recording.write_chrome(path)
    check(path)
    content = json.loads(path.read_text())
    content["traceEvents"].append(change)
    path.write_text(json.dumps(content))
    assert read(path)
    with pytest.raises(FormatError, match=wrong):
        check(path)


def test_records_that_make_no_sense_are_counted_and_no_more() -> None:
    page = AppPage()
    try:
        found = find_page(os.getpid())
        assert found is not None
        collector = record_reader.RecordReader(found)
        with tracing(found, time.monotonic_ns() + 10**12):
            now = time.monotonic_ns()
            page.trace_note(3, 1, 77, now, now, 50)  # an event without its text
            page.trace_note(3, 1, 78, now, now, 8)
            page.trace_note(4, 78, int.from_bytes(b"[1, 2, 3", "little"), now)
            page.trace_note(99, 1, 1, now)
            page.trace_note(6, 1, 1, now)  # settled, and never sent
        recording = trace.Recording()
        recording.pending.append(collector.close())
        assert (recording.lost, recording.spans, len(recording.frames)) == (2, [], 1)
    finally:
        page.close()
