"""The benchmark of starts still runs, counts memory as it says, refuses wrong answers, and leaves no file or process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
import pytest

from tests.bench import starts, starts_models
from tests.bench.starts_models import MADE, Subject
from tests.bench.starts_processes import WorkerError, descendants, group_bytes

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "tests.bench", "starts", "--rounds", "1", "--models", "silero", "--json"]
PATIENCE_S = 60.0
MEGABYTES = 1 << 20


def test_starts_give_a_ratio_and_leave_no_file(tmp_path: Path) -> None:
    command = [*COMMAND, "--row", "P11", "--kinds", "ort+hit"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {check["what"] for check in found["checks"]} == {"silero: hit / plain ort"}
    assert all(check["judged"] > 0 for check in found["checks"])
    assert list(tmp_path.iterdir()) == []


def test_the_large_model_is_made_on_demand_only() -> None:
    done = subprocess.run([*COMMAND, "--row", "P15"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert [row for row, why in json.loads(done.stdout)["absent"] if "--large" in why] == ["P15"]


def test_the_rows_are_known_to_the_benchmark_of_real_life() -> None:
    command = [sys.executable, "-m", "tests.bench", "real", "--row", "P15", "--rounds", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert [row for row, _ in json.loads(done.stdout)["absent"]] == ["P15"]


def test_interrupted_starts_end_all_their_processes(tmp_path: Path) -> None:
    """The interrupt comes while an app has a driver."""

    def default_interrupt() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    command = [*COMMAND, "--row", "P12", "--kinds", "no cache+hit"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_interrupt,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as bench:
        try:
            ends = time.monotonic() + PATIENCE_S
            children: list[psutil.Process] = []
            while len(children) < 2 and time.monotonic() < ends:
                time.sleep(0.001)
                children = psutil.Process(bench.pid).children(recursive=True)
            bench.send_signal(signal.SIGINT)
            stdout, stderr = bench.communicate(timeout=PATIENCE_S)
        finally:
            bench.kill()
    assert len(children) == 2
    assert bench.returncode == starts.INTERRUPTED, stderr
    assert json.loads(stdout)["checks"] == []
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
    assert list(tmp_path.iterdir()) == []


def a_bench(directory: Path) -> starts.Bench:
    return starts.Bench(Subject("tiny", directory / "tiny.onnx", {}), directory, from_onnx=False)


def test_a_result_that_differs_from_the_other_kinds_is_refused(tmp_path: Path) -> None:
    bench = a_bench(tmp_path)
    bench.checked("ort", {"checksum": 100.0})
    bench.checked("openvino", {"checksum": 100.5})
    with pytest.raises(WorkerError, match="differ"):
        bench.checked("no cache", {"checksum": 90.0, "outcome": "NO_CACHE"})


@pytest.mark.parametrize(
    ("kind", "outcome"), [("hit", "MISS"), ("miss", "HIT"), ("no cache", "HIT"), ("lag", "MISS"), ("warm", "HIT, MISS")]
)
def test_a_kind_whose_cache_did_something_else_is_refused(tmp_path: Path, kind: str, outcome: str) -> None:
    with pytest.raises(WorkerError, match=outcome):
        a_bench(tmp_path).checked(kind, {"outcome": outcome})


def test_each_miss_finds_a_cache_of_no_other_run(tmp_path: Path) -> None:
    bench = a_bench(tmp_path)
    folders = [bench.given("miss")[folder] for _ in range(2) for folder in ("cache_dir", "state_dir")]
    assert len(set(folders)) == 4
    assert bench.given("warm")["cache_dir"] == bench.given("hit")["cache_dir"]


HOLDER = """
import mmap, os
MEGABYTES = 1 << 20
print(flush=True)
input()
fd = os.memfd_create("held")
for _ in range(32):
    os.write(fd, bytes(range(256)) * (MEGABYTES // 256))
print(flush=True)
input()
memory = mmap.mmap(fd, 32 * MEGABYTES)
assert sum(memory[:: mmap.PAGESIZE]) >= 0  # every page is present now
print(flush=True)
input()
"""


def test_shared_memory_counts_once_even_where_no_process_maps_it() -> None:
    """In a process that no other one shares pages with: a share of pages changes when another process ends."""
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        seen = []
        for _ in range(3):
            holder.stdout.readline()
            seen.append(group_bytes([holder.pid]))
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        before, held, mapped = seen
    assert 31 * MEGABYTES < held - before < 40 * MEGABYTES
    assert abs(mapped - held) < 8 * MEGABYTES


def test_a_process_that_a_child_started_is_found() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        found = descendants(os.getpid())
        child.stdin.close()
    assert child.pid in found
    assert len(descendants(os.getpid())) < len(found)


def test_the_models_that_are_made_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones of the same make, in ONNX Runtime."""
    for name, value in {"WIDTH": 16, "LAYERS": 2, "LARGE_LAYERS": 1, "TABLE_ROWS": 100, "CHUNK_ROWS": 64}.items():
        monkeypatch.setattr(starts_models, name, value)
    for model in ("transformer", "large"):
        starts_models.make(tmp_path, model)
        session = onnxruntime.InferenceSession(tmp_path / f"{model}.onnx", providers=["CPUExecutionProvider"])
        ((name, (dtype, shape)),) = MADE[model].items()
        extents = [16 if extent == 1024 else extent for extent in shape]
        (output,) = session.run(None, {name: np.arange(np.prod(extents)).reshape(extents).astype(dtype) % 7})
        assert output.shape == (1, 64, 16)
        assert np.isfinite(output).all()
        assert np.abs(output).sum() > 0
    table = np.fromfile(tmp_path / "large.data", np.float32, 100 * 16).reshape(100, 16)
    assert table[:, 0].tolist() == [0.0] * 64 + [64.0] * 36
