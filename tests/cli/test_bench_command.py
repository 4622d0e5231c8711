"""`aionn bench`: short runs of the real thing, and what its comparison says about them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import psutil
import pytest

from aionn.cli import main
from aionn.cli.bench import changes, probability_of_chance
from aionn.cli.bench_subjects import (
    LEAST_ROUNDS,
    Echo,
    Measured,
    first_answer_ns,
    measure_cache,
    measure_stages,
    measure_start,
    rounds,
    trips,
    worker,
    write_model,
)
from aionn.cli.printing import NotDoneError
from aionn.testing import FakeDevice, identity_model
from tests.cli.test_commands import aionn_logger  # noqa: F401 -- autouse
from tests.leaks import driver_pids, ended, leak_check

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


def report(name: str, rounds_s: Sequence[float], rival: bool = False) -> dict[str, Any]:
    return {"name": name, "rival": rival, "rounds_p50_s": list(rounds_s)}


def test_bursts_are_measured_beside_their_rivals_and_an_older_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "burst", "--seconds", "0.1", "--json"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said)
    measures = {one["name"]: one for one in found["measures"]}
    sizes = ("64 B", "1.2 MB")
    assert measures.keys() == {f"{kind} {size}" for kind in ("burst", "to_thread", "pipe") for size in sizes}
    assert {name for name, one in measures.items() if one["rival"]} == {
        f"{kind} {size}" for kind in ("to_thread", "pipe") for size in sizes
    }
    for one in measures.values():
        assert len(one["rounds_p50_s"]) >= LEAST_ROUNDS
        assert one["repetitions"] >= 20 * LEAST_ROUNDS
        assert 0 < one["p50_s"] <= one["p99_s"]
    assert {"cpu", "architecture", "usable_cpus", "governor", "kernel", "load", "versions"} == found["machine"].keys()
    assert found["machine"]["versions"].keys() >= {"python", "aionn", "numpy", "uvloop"}
    for one in found["measures"]:  # an older run on a machine that was far quicker
        one["rounds_p50_s"] = [second / 100 for second in one["rounds_p50_s"]]
    found["machine"]["cpu"] = "another CPU"
    (tmp_path / "old.json").write_text(json.dumps(found), encoding="utf-8")
    assert main(["bench", "burst", "--seconds", "0.1", "--compare", str(tmp_path / "old.json")]) == 1
    out, err = capsys.readouterr()
    assert "* without aionn" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("burst", "pipe", "to_thread"))].count("burst") == 2
    assert "the older run was on another CPU (another CPU)" in err
    last = err.splitlines()[-1]
    assert last.startswith(f"aionn: slower than in '{tmp_path}/old.json': burst 64 B takes ")
    assert "burst 1.2 MB takes" in last
    assert "pipe" not in last  # what the rivals take is not aionn's loss
    assert driver_pids() == []


def test_an_equal_run_is_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (1, "n")}))
    command = ["bench", str(tmp_path / "model.onnx"), "--device", "reference", "--shape", "x=1x64", "--seconds", "0.1", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["measures"]] == ["burst on reference", "compute() on reference", "onnxruntime in to_thread"]
    for one in found["measures"]:  # a slower machine
        one["rounds_p50_s"] = [second * 100 for second in one["rounds_p50_s"]]
    (tmp_path / "old.json").write_text(json.dumps(found), encoding="utf-8")
    assert main([*command, "--compare", str(tmp_path / "old.json")]) == 0
    compared = json.loads(capsys.readouterr().out)["compared"]
    assert [one["lost"] for one in compared] == [False] * 3
    assert all(one["chance"] > 0.9 for one in compared)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such-subject"], "'no-such-subject' is neither a subject nor a file; give burst, cache, stages or the path of a model"),
        (["burst", "--seconds", "0"], "--seconds 0 is not a time"),
        (["burst", "--shape", "x=1"], "--shape is for the inputs of a model"),
        (["burst", "--compare", "missing.json"], "'missing.json' cannot be read (No such file or directory)"),
        (["burst", "--compare", "text.json"], "'text.json' is not a report of aionn bench; write one with aionn bench --json > text.json"),
        (["burst", "--compare", "list.json"], "'list.json' is not a report of aionn bench"),
        (["burst", "--compare", "later.json"], "'later.json' is a report of another release"),
        (["burst", "--compare", "deep.json"], "'deep.json' is not a report of aionn bench"),
        *((["burst", "--compare", f"times{number}.json"], "is a report of another release") for number in range(6)),
        (["model.onnx", "--shape", "y=1"], "--shape: the model has no input 'y'; its inputs are x"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is_measured(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").write_bytes(identity_model({"x": (1, "n")}))
    Path("text.json").write_text("{]", encoding="utf-8")
    Path("list.json").write_text("[]", encoding="utf-8")
    Path("later.json").write_text(json.dumps({"format": 99, "measures": [], "machine": {"cpu": "x"}}), encoding="utf-8")
    Path("deep.json").write_text("[" * 100_000, encoding="utf-8")
    for number, times in enumerate(('["1"]', '"12"', '{"1": 2}', f"[1{'0' * 400}]", "[Infinity]", "[true]")):
        report = f'{{"format": 1, "machine": {{"cpu": "x"}}, "measures": [{{"name": "burst 64 B", "rounds_p50_s": {times}}}]}}'
        Path(f"times{number}.json").write_text(report, encoding="utf-8")
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert sentence in err


def test_an_older_run_of_another_subject_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {"format": 1, "measures": [report("verified hit", [1.0] * 5)], "machine": {"cpu": "x"}}
    (tmp_path / "old.json").write_text(json.dumps(old), encoding="utf-8")
    (tmp_path / "model.onnx").write_bytes(identity_model({"x": (1, 16)}))
    arguments = [
        "bench",
        str(tmp_path / "model.onnx"),
        "--device",
        "reference",
        "--seconds",
        "0.01",
        "--compare",
        str(tmp_path / "old.json"),
    ]
    assert main(arguments) == 2
    assert "has none of these measures; compare runs of the same subject" in capsys.readouterr().err


@pytest.mark.parametrize(("few", "many"), [(5, 5), (5, 7), (6, 6)])
def test_the_chance_is_that_of_all_orders(few: int, many: int) -> None:
    """Beside the exact test, which looks at each way to choose the ranks."""
    random = np.random.default_rng(3)
    for shift in (-0.5, 0.0, 0.8, 2.0):
        before, now = list(random.normal(0, 1, few)), list(random.normal(shift, 1, many))

        def wins(old: Sequence[float], new: Sequence[float]) -> int:
            return sum(b > a for a in old for b in new)

        together, found = [*before, *now], wins(before, now)
        chosen = list(itertools.combinations(range(few + many), few))
        as_large = sum(
            wins([together[i] for i in picked], [together[i] for i in range(few + many) if i not in picked]) >= found for picked in chosen
        )
        assert probability_of_chance(before, now) == pytest.approx(as_large / len(chosen), abs=0.02)


def test_a_loss_needs_size_and_significance() -> None:
    steady = [1.0, 1.01, 0.99, 1.02, 0.98]
    small = [second * 1.09 for second in steady]
    large = [second * 1.2 for second in steady]
    noisy = [0.7, 1.3, 0.9, 1.4, 1.15]
    for now, lost in ((steady, False), (small, False), (large, True), (noisy, False), ([0.5] * 5, False)):
        (change,) = changes([report("a", steady)], [report("a", now), report("b", now)])
        assert change.lost == lost, now
        assert change.ratio == pytest.approx(statistics.median(now) / 1.0)
    assert probability_of_chance([1.0] * 5, [1.0] * 5) == 1.0
    ties = probability_of_chance([1.0, 1.0, 2.0, 2.0, 3.0], [2.0, 2.0, 3.0, 3.0, 3.0])
    assert 0.01 < ties < 0.2


@pytest.mark.anyio
async def test_all_kinds_take_turns_within_each_round() -> None:
    order: list[str] = []

    def take(name: str) -> Any:
        async def one(seconds: float) -> Sequence[int]:
            order.append(name)
            return [len(order)]

        return one

    found = await rounds({"a": take("a"), "b": take("b")}, {"c": take("c")}, 0.001, 1.0)
    assert order == ["a", "b", "c"] * (1 + LEAST_ROUNDS)  # the first round does not count
    assert [(one.name, one.rival) for one in found] == [("a", False), ("b", False), ("c", True)]
    assert [ns for one in found for ns in itertools.chain(*one.rounds)] == [*range(4, 19, 3), *range(5, 19, 3), *range(6, 19, 3)]


@pytest.mark.anyio
async def test_a_kind_that_fills_its_time_repeats_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, now_ns = 0, 1_000

    async def trip() -> None:
        nonlocal calls, now_ns
        calls += 1
        now_ns += 1_000_000

    monkeypatch.setattr("aionn.cli.bench_subjects.time", SimpleNamespace(perf_counter_ns=lambda: now_ns))
    assert len(await trips(trip)(0.0)) == calls == 20
    assert await trips(trip)(0.05) == [1_000_000] * 50


def test_percentiles_are_those_of_all_rounds_together() -> None:
    one = Measured("a", rounds=[range(1, 51), range(51, 101)])
    assert (one.p50_s, one.p99_s) == (51e-9, 100e-9)
    assert one.medians_s() == pytest.approx([25.5e-9, 75.5e-9])


@pytest.mark.anyio
async def test_the_pipe_returns_what_it_gets_and_its_end_is_an_error() -> None:
    with leak_check():
        with worker("echo") as sock:
            echo = Echo(sock)
            for size in (64, 1_228_800, 64):
                sent, back = os.urandom(size), bytearray(size)
                await echo.trip(memoryview(sent), memoryview(back))
                assert back == sent
        with worker("nonsense") as sock, pytest.raises(NotDoneError, match="the worker process of the rival 'pipe' has ended"):
            await Echo(sock).trip(memoryview(bytes(1 << 22)), memoryview(bytearray(1 << 22)))


@pytest.mark.anyio
async def test_fresh_processes_answer_or_say_why_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dense.onnx"
    inputs = write_model(path)
    np.savez(tmp_path / "x.npz", *inputs.values())
    with leak_check():
        assert await first_answer_ns("session", str(path), str(tmp_path / "x.npz"), *inputs) > 0
        with pytest.raises(NotDoneError, match="the fresh process for 'aionn' ended without an answer"):
            await first_answer_ns("aionn", str(tmp_path / "missing.onnx"), "reference", "", str(tmp_path / "x.npz"), *inputs)
    said = capfd.readouterr().err
    assert "missing.onnx" in said
    assert "Traceback" not in said


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.cli.bench_subjects.LEAST_ROUNDS", 1)
    monkeypatch.setattr("aionn.cli.bench_subjects.MOST_ROUNDS", 1)


@pytest.mark.anyio
async def test_hits_are_measured_beside_compiles(tmp_path: Path, one_round: None) -> None:
    path = tmp_path / "dense.onnx"
    write_model(path)
    found = await measure_cache("onnxruntime", path, tmp_path / "cache", 0.01)
    assert [one.name for one in found] == ["verified hit", "compile, no cache", "onnxruntime session in to_thread"]
    assert all(one.p50_s > 0 for one in found)
    with pytest.raises(NotDoneError, match="device 'reference' does not cache this model"):
        await measure_cache("reference", path, tmp_path / "cache", 0.01)


@pytest.mark.anyio
async def test_starts_of_fresh_processes_are_measured(tmp_path: Path, one_round: None) -> None:
    path = tmp_path / "dense.onnx"
    inputs = write_model(path)
    found = await measure_start("reference", path, inputs, tmp_path, 0.01, hits=False)
    assert [one.name for one in found] == ["first answer, no cache"]
    assert all(one.p50_s > 0.05 for one in found)  # Python itself takes a part of that


@pytest.mark.anyio
async def test_the_time_until_a_better_stage_serves_is_measured(tmp_path: Path, one_round: None) -> None:
    path = tmp_path / "dense.onnx"
    inputs = write_model(path)
    until, longest = await measure_stages(path, inputs, 0.01)
    assert (until.name, longest.name) == ("until openvino serves", "longest answer meanwhile")
    assert 0 < longest.p50_s < until.p50_s


@pytest.mark.anyio
async def test_an_interrupt_ends_the_benchmark_and_its_workers(fake: FakeDevice) -> None:
    command = [sys.executable, "-m", "aionn", "bench", "burst", "--device", fake.name, "--seconds", "60"]
    process = await anyio.open_process(command, start_new_session=True)
    async with process:
        await fake.heard("run")
        found = psutil.Process(process.pid).children()
        assert len(found) == 3  # the driver, its template and the worker
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        assert process.stderr is not None
        assert [part async for part in process.stdout] == []
        assert b"".join([part async for part in process.stderr]) == b"aionn: interrupted\n"
        assert await process.wait() == 130
    for child in found:
        assert await ended(child.pid, 30)


def test_without_an_engine_that_caches_the_rest_is_measured(one_round: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "reference", "--seconds", "0.05", "--json"]) == 0
    out, err = capsys.readouterr()
    names = [one["name"] for one in json.loads(out)["measures"] if not one["rival"]]
    assert names == ["burst 64 B", "burst 1.2 MB", "first answer, no cache"]
    assert "aionn: no hits are measured: device 'reference' does not cache this model" in err
