"""The headers of aionn/pages by themselves, in C: under the sanitizers, and under a weak memory model in all interleavings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.fmq.test_native import ADDRESS, COMPILER, THREAD, run

NATIVE = Path(__file__).parent / "native"
CHECKER = Path(__file__).parents[1] / "fmq" / "native"
PAGES = Path(__file__).parents[2] / "aionn" / "pages"
HAL = PAGES.parent / "hal"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


def compiled(program: str, build: Path, *flags: str) -> Path:
    """Compile once per module and flags."""
    if COMPILER is None:
        pytest.fail("no C compiler: aionn is built from C, so its tests need one; install gcc")
    executable = build / "-".join([program, *(re.sub(r"\W", "-", flag) for flag in flags)])
    if not executable.exists():
        warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-tsan")
        paths = (f"-I{NATIVE}", f"-I{CHECKER}", f"-I{HAL}", f"-I{PAGES}")
        command = [COMPILER, "-std=c11", "-g", *warnings, "-pthread", *flags, *paths, str(NATIVE / f"{program}.c"), "-o", str(executable)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode and ("cannot find" in made.stderr and "san" in made.stderr):
            pytest.skip(f"this compiler has no runtime for {flags}: {made.stderr.splitlines()[-1]}")
        assert made.returncode == 0, made.stderr
    return executable


@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD])
@pytest.mark.parametrize("how", ["off", "counts", "threads"])
def test_the_frame_paths_functions_under_a_sanitizer(build: Path, sanitizer: str, how: str) -> None:
    run(compiled("slots", build, "-O1", "-fno-sanitize-recover=all", sanitizer), how)


def weak(build: Path) -> list[str]:
    return run(compiled("weak_pages", build, "-O2")).splitlines()


def test_ring_and_sequence_hold_in_all_interleavings_of_a_weak_memory(build: Path) -> None:
    programs = [line for line in weak(build) if line.startswith("program ")]
    assert len(programs) == 4
    assert all(line.endswith(": holds") for line in programs), "\n".join(programs)
    assert sum(int(line.split()[2]) for line in programs) > 10_000  # it did search


def test_each_memory_order_of_ring_and_sequence_is_needed(build: Path) -> None:
    weakened = [line.split()[1:] for line in weak(build) if line.startswith("weakened ")]
    assert [found for found in weakened if found[2] != "wrong"] == []
    sites = {(function, order.rstrip(":")) for function, order, *_ in weakened}
    assert sites == {
        ("trace_ring_put", "release"),
        ("trace_ring_take", "acquire"),
        ("page_publish", "release"),
        ("sequence_begin", "release"),
        ("sequence_now", "acquire"),
        ("sequence_copy", "acquire"),
    }
    sources = "".join((HAL / f"{name}.h").read_text() for name in ("words", "sequence", "trace_ring", "burst_slot", "model_slot"))
    ordered = re.findall(r"memory_order_(?:acquire|release|acq_rel|seq_cst)", re.sub(r"/\*.*?\*/", "", sources, flags=re.DOTALL))
    assert len(weakened) == len(ordered)  # none was left out
    assert re.findall(r"atomic_(?:load|store|exchange|fetch_\w+)\(", sources) == []  # what the checker would not see


def test_the_checker_finds_a_reader_that_does_not_look_for_the_intent(build: Path, tmp_path: Path) -> None:
    source = (HAL / "trace_ring.h").read_text()
    assert source.count("if (page_load(&memory->intent) - *cursor <= TRACE_RECORDS) {") == 1
    (tmp_path / "trace_ring.h").write_text(source.replace("if (page_load(&memory->intent) - *cursor <= TRACE_RECORDS) {", "if (true) {"))
    for name in ("words.h", "burst_slot.h", "sequence.h"):
        (tmp_path / name).write_text((HAL / name).read_text())
    lines = run(compiled("weak_pages", tmp_path, "-O2", f"-I{tmp_path}")).splitlines()
    assert [line for line in lines if line.startswith("program tracing_when_lapped") and line.endswith(": wrong")]


@pytest.mark.soak
def test_what_each_call_costs(build: Path) -> None:
    print(run(compiled("cost", build, "-O2")))
