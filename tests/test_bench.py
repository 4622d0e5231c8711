"""The benchmark of real life still runs: each kind of row answers or says why not, and an interrupted run leaves no process behind."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.bench.real import ROWS
from tests.bench.real_report import INTERRUPTED, Check, rows_among

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "tests.bench", "real", "--rounds", "1", "--json"]
PATIENCE_S = 60.0


def test_a_check_is_judged_by_the_median_of_its_rounds() -> None:
    assert Check("P1", "ratio", (0.9, 1.0, 5.0), 1.0).reached
    assert not Check("P1", "ratio", (0.9, 1.01, 5.0), 1.0).reached
    assert Check("P7", "gain", (0.1, 1.3, 1.4), 1.3, at_least=True).reached


def test_a_check_of_runs_must_be_reached_in_that_share_of_them() -> None:
    nine, eight = (*[1.0] * 9, 9.0), (*[1.0] * 8, 9.0, 9.0)
    assert Check("P3", "hot", nine, 1.5, runs=0.9).reached
    assert not Check("P3", "hot", eight, 1.5, runs=0.9).reached


def test_unknown_rows_are_refused() -> None:
    assert rows_among(ROWS)("p1,P20") == {"P1", "P20"}
    with pytest.raises(argparse.ArgumentTypeError, match="P99"):
        rows_among(ROWS)("P99")


def test_each_kind_of_row_gives_a_ratio_or_says_why_not() -> None:
    """One row of each module, two frames each."""
    rows = {"P1", "P6", "P7", "P10", "P20"}
    done = subprocess.run([*COMMAND, "--frames", "2", "--row", ",".join(rows)], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {check["row"] for check in found["checks"]} | {row for row, _ in found["absent"]} == rows
    assert {"P1", "P6", "P7", "P10"} <= {check["row"] for check in found["checks"]} <= set(ROWS)
    assert len(found["machine"]) == 3


def test_an_interrupted_bench_ends_all_its_processes() -> None:
    def default_interrupt() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with subprocess.Popen(
        [*COMMAND, "--row", "P1"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=default_interrupt
    ) as bench:
        try:
            ends = time.monotonic() + PATIENCE_S
            children: list[psutil.Process] = []
            while len(children) < 2 and time.monotonic() < ends:  # the worker of the rival, and the driver
                time.sleep(0.01)
                children = psutil.Process(bench.pid).children(recursive=True)
            bench.send_signal(signal.SIGINT)
            stdout, stderr = bench.communicate(timeout=PATIENCE_S)
        finally:
            bench.kill()
    assert len(children) == 2
    assert bench.returncode == INTERRUPTED, stderr
    assert json.loads(stdout)["checks"] == []
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
