"""ring.h and exchange.h by themselves, in C, under the sanitizers.

Fails, not skips, where gcc can link a sanitizer but the test cannot run.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent / "native"
FMQ = Path(__file__).parents[2] / "aionn" / "fmq"
COMPILER = shutil.which("gcc") or shutil.which("cc")
# ThreadSanitizer does not model fences and gcc says so: what it checks here are the counters' release and acquire.
# `test_weak_memory` checks the fences.
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-tsan")
FLAGS = ("-std=c11", "-O1", "-g", *WARNINGS, "-pthread", "-fno-sanitize-recover=all", f"-I{FMQ}", f"-I{NATIVE}")
ADDRESS = "-fsanitize=address,undefined"
THREAD = "-fsanitize=thread"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


def compiled(program: str, sanitizer: str, build: Path) -> Path:
    """Compile once per module and sanitizer."""
    if COMPILER is None:
        pytest.fail("no C compiler: aionn is built from C, so its tests need one; install gcc")
    executable = build / f"{program}-{sanitizer.rpartition('=')[2].replace(',', '-')}"
    if not executable.exists():
        command = [COMPILER, *FLAGS, sanitizer, str(NATIVE / f"{program}.c"), "-o", str(executable)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode and ("cannot find" in made.stderr and "san" in made.stderr):
            pytest.skip(f"this compiler has no runtime for {sanitizer}: {made.stderr.splitlines()[-1]}")
        assert made.returncode == 0, made.stderr
    return executable


def run(executable: Path, *arguments: object) -> str:
    # Without address-space randomization: older TSan runtimes cannot map their shadow under the kernel's wider one.
    setarch = shutil.which("setarch")
    prefix = [setarch, "-R"] if setarch and "thread" in executable.name else []
    ended = subprocess.run([*prefix, str(executable), *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "WARNING: ThreadSanitizer" not in ended.stderr
    return ended.stdout


@pytest.mark.parametrize("seed", [1, 20261120])
def test_poked_counters_never_lead_outside_the_data(build: Path, seed: int) -> None:
    run(compiled("counters", ADDRESS, build), seed, 300)


@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD])
@pytest.mark.parametrize("how", ["eventfd", "futex", "overwrite"])
def test_two_threads_lose_nothing_and_tear_nothing(build: Path, sanitizer: str, how: str) -> None:
    run(compiled("threads", sanitizer, build), 20_000, how)


@pytest.mark.parametrize("seed", [1, 20261121])
def test_the_exchange_takes_what_a_plain_model_takes_and_reads_nothing_else(build: Path, seed: int) -> None:
    run(compiled("exchange", ADDRESS, build), "packets", seed, 300)


@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD])
def test_an_exchange_loses_no_wake(build: Path, sanitizer: str) -> None:
    run(compiled("exchange", sanitizer, build), "threads", 1, 5_000)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_poked_counters_for_a_million_mutations(build: Path) -> None:
    # 200 steps of which every third pokes, twice per round, and more between begin and commit: over a million pokes.
    run(compiled("counters", ADDRESS, build), 7, 10_000)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_exchange_against_a_million_hostile_packets(build: Path) -> None:
    run(compiled("exchange", ADDRESS, build), "packets", 7, 10_000)
