"""ring.h under a weak memory model: no lost wake and no torn byte in any interleaving, and each memory order is needed.

x86 gives more order than ring.h asks for, and ThreadSanitizer does not model fences, so neither can show a missing one.
`native/weak_memory.h` interprets the atomics of the C code itself; `native/weak.c` has the programs that are searched.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

NATIVE = Path(__file__).parent / "native"
FMQ = Path(__file__).parents[2] / "aionn" / "fmq"
FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror")

UNNOTICED = {
    "ring_arm update armed": "the swap takes an arming back; it orders nothing, and only its atomicity is used",
    "ring_disarm update reads ? &r->control->reader_armed : &r->control->writer_armed": "as in ring_arm",
    "ring_wake_armed update armed": "its atomicity lets one of two wakers write; the fence before it orders the rest",
    "ring_expect_futex update &r->control->futex_bits": "the fence behind it orders it",
    "ring_arm load r->flag": "whoever then takes the bits does so by a read-modify-write that acquires",
    "ring_skip_to_newest_half load r->written": "the next ring_counters acquires before a byte is read",
}
"""Orders of ring.h that are stronger than the programs need, with the reason. None of them is a fence, and none is on the usual path
of a frame."""


class Weakening(NamedTuple):
    """One operation of ring.h with a weaker order, and the program that noticed it."""

    site: str
    order: str
    weaker: str
    violation: str
    program: str


def build(program: str, folder: Path, *flags: str) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler: aionn is built from C, so its tests need one; install gcc")
    executable = folder / program
    command = [compiler, *FLAGS, *flags, f"-I{FMQ}", f"-I{NATIVE}", str(NATIVE / f"{program}.c"), "-o", str(executable)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return executable


def run(executable: Path, *arguments: str) -> list[str]:
    ended = subprocess.run([str(executable), *arguments], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr + ended.stdout[-4000:]
    return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run(build("weak", tmp_path_factory.mktemp("weak"), "-O2"))


@pytest.fixture(scope="module")
def weakenings(lines: list[str]) -> list[Weakening]:
    pattern = re.compile(r"weakened (.*) (\w+) (\w+): (\w+) (\S+)")
    return [Weakening(*found.groups()) for line in lines if (found := pattern.fullmatch(line))]


def test_the_checker_knows_what_c11_allows(tmp_path: Path) -> None:
    """Small programs of which it is known; a checker that allows too little would pass everything."""
    outcomes = dict(line.split() for line in run(build("litmus", tmp_path)))
    assert {name for name, outcome in outcomes.items() if outcome == "forbidden"} == {
        "store_buffering_two_fences",
        "passing",
        "fenced",
        "carried",
        "coherent",
        "swapping",
        "crossing_fenced",
        "racing",
        "sleeping_woken",
    }
    assert {name for name, outcome in outcomes.items() if outcome == "allowed"} == {
        "store_buffering",
        "store_buffering_one_fence",
        "store_buffering_acq_rel_fences",
        "passing_relaxed",
        "passing_release_only",
        "passing_acquire_only",
        "fenced_release_only",
        "fenced_acquire_only",
        "carried_relaxed",
        "crossing",
        "racing_relaxed",
        "racing_release_only",
        "sleeping",
    }


def test_the_ring_holds_in_all_interleavings_of_a_weak_memory(lines: list[str]) -> None:
    programs = [line for line in lines if line.startswith("program ")]
    assert len(programs) == 15
    assert all(line.endswith(": holds") for line in programs), "\n".join(lines)
    states = sum(int(line.split()[2]) for line in programs)
    assert states > 100_000  # it did search


@pytest.mark.soak
def test_a_ring_that_a_lane_reads_until_its_task_takes_it_back_holds_in_larger_programs(tmp_path: Path) -> None:
    programs = run(build("weak", tmp_path, "-O2"), "large")
    assert len(programs) == 2
    assert all(line.endswith(": holds") for line in programs), "\n".join(programs)


def test_a_lane_and_the_task_that_takes_the_ring_back_need_their_lock(tmp_path: Path) -> None:
    programs = run(build("weak", tmp_path, "-O2", "-DWITHOUT_GIL"), "first")
    found = [line for line in programs if line.startswith("program ") and not line.endswith(": holds")]
    assert [line.split()[1] for line in found] == ["lane_and_task"]


def test_each_fence_of_the_ring_is_needed(weakenings: list[Weakening]) -> None:
    fences = [weakening for weakening in weakenings if " fence " in weakening.site]
    removed = {fence.site.split()[0] for fence in fences if fence.weaker == "none"}
    assert removed == {
        "ring_progress",
        "ring_arm",
        "ring_flag_wake",
        "ring_expect_futex",
        "ring_close",
        "ring_begin_write",
        "ring_overrun",
        "ring_claim",
        "ring_unclaimed",
    }
    assert [fence for fence in fences if fence.violation == "unnoticed"] == []
    lost_wakes = {fence.site.split()[0] for fence in fences if fence.violation == "asleep"}
    assert lost_wakes == removed - {"ring_begin_write", "ring_overrun", "ring_claim", "ring_unclaimed"}


def test_each_memory_order_of_the_ring_is_needed_or_explained(weakenings: list[Weakening]) -> None:
    assert {weakening.site for weakening in weakenings if weakening.violation == "unnoticed"} == set(UNNOTICED)
    noticed = {(weakening.site, weakening.violation) for weakening in weakenings if weakening.violation != "unnoticed"}
    assert ("ring_commit_read store r->read", "race") in noticed  # the writer overwrites what is still being read
    assert {violation for site, violation in noticed if site == "ring_commit_write store r->written"} <= {"race", "wrong"}


def test_no_ordered_operation_of_the_ring_is_left_out(weakenings: list[Weakening]) -> None:
    source = re.sub(r"/\*.*?\*/", "", (FMQ / "ring.h").read_text(), flags=re.DOTALL)
    ordered = re.findall(r"memory_order_(?:acquire|release|acq_rel|seq_cst)|atomic_(?:exchange|fetch_\w+)\(", source)
    sites = [weakening for weakening in weakenings if weakening.weaker in ("none", "relaxed")]
    assert len(sites) == len(ordered)
    plain = re.findall(r"atomic_(?:load|store)\(|\+\+\*|__atomic_(?!load_n|store_n)\w+", source)
    assert plain == []  # what the checker would not see


MUTATIONS = {
    "the writer wakes before it publishes": (
        r"(    atomic_store_explicit\(r->written, r->write_at \+ bytes, memory_order_release\);\n)(.*?    if \(bytes\)\n.*?\n)",
        r"\2\1",
        "asleep",
    ),
    "the reader frees room and wakes no writer": (r"ring_progress\(r, RING_NOT_FULL\)", "(void)0", "asleep"),
    "a sleeper looks before it arms": (
        r"(    atomic_store_explicit\(armed, bits.*?\n    atomic_thread_fence.*?\n)(    bool corrupt = .*?\n)",
        r"\2\1",
        "asleep",
    ),
    "a sleeper does not look again": (
        r"bool corrupt = ring_available\(r, &readable, &writable\) != RING_OK;",
        "bool corrupt = false; readable = writable = 0;",
        "asleep",
    ),
    "a waker takes the arming and does not signal": (r"(atomic_exchange\(armed, 0\)\)\n\s*)ring_signal\(fd\)", r"\1(void)fd", "asleep"),
    "the end is believed before the last element is looked for": (
        r"if \(!ring_is_closed\(r\)\)\n\s*return RING_LESS;",
        "return ring_is_closed(r) ? RING_CLOSED : RING_LESS;",
        "wrong",
    ),
    "a thread does not look for the end before it sleeps": (r"if \(ring_is_closed\(r\)\)[^\n]*\n\s*return EAGAIN;", "", "asleep"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_checker_runs_the_c_code_and_finds_a_fault_put_into_it(mutation: str, tmp_path: Path) -> None:
    pattern, replacement, violation = MUTATIONS[mutation]
    source, count = re.subn(pattern, replacement, (FMQ / "ring.h").read_text(), flags=re.DOTALL)
    assert count == 1
    (tmp_path / "ring.h").write_text(source)
    shutil.copy(FMQ / "exchange.h", tmp_path)
    found = next(line for line in run(build("weak", tmp_path, f"-I{tmp_path}"), "first") if not line.endswith(": holds"))
    assert found.startswith("program ")
    assert found.endswith(f": {violation}")
