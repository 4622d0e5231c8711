"""Whatever a peer or a file brings, the answer is one that is documented."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz.choices import Target
from tests.fuzz.mutation import Finding, run_plainly
from tests.fuzz.targets import TARGETS, let_go

every_target = pytest.mark.parametrize("name", TARGETS)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    let_go()


@every_target
def test_a_short_run_finds_nothing(name: str) -> None:
    run_plainly(name, TARGETS[name], TARGETS[name].short_runs, seed=1)


def test_a_finding_carries_its_input() -> None:
    def one(data: bytes) -> None:
        if b"x" in data:
            raise KeyError("x")

    with pytest.raises(Finding, match=r"python -m tests\.fuzz broken --input \w+") as found:
        run_plainly("broken", Target(one, lambda: [b"abc", b"xyz"], 64, 0, 0), 10, seed=1)
    assert found.value.data == b"xyz"
    assert isinstance(found.value.__cause__, KeyError)


def test_packets_counters_and_descriptors_get_a_million_inputs() -> None:
    assert sum(TARGETS[name].soak_runs for name in ("requests", "results", "counters", "descriptors")) >= 1_000_000


@pytest.mark.soak
@pytest.mark.timeout(3600)
@every_target
def test_a_long_run_finds_nothing(name: str) -> None:
    """Guided by coverage where atheris is there, in a process of its own, since atheris ends it; plainly where it is not."""
    runs, seed = TARGETS[name].soak_runs, time.time_ns() % 2**31 + 1
    command = [sys.executable, "-m", "tests.fuzz", name, "--runs", str(runs), "--seed", str(seed)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True, check=False)
    print(done.stdout[-4000:], done.stderr[-4000:])
    assert done.returncode == 0, f"{' '.join(command[1:])} ended with {done.returncode}"
    if find_spec("atheris") is None:
        assert "by the plain loop, without coverage" in done.stdout
    else:
        assert re.search(rf"Done {runs} runs", done.stderr)
