"""What the CPU gives and is."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import pytest

from aionn.engines.processor import Flushing, instruction_set, usable_cpus


def denormals_live() -> bool:
    return bool((np.array([1e-39], np.float32) * np.float32(0.5))[0] != 0)


def test_denormals_are_zero_in_the_block_and_only_there() -> None:
    flushing = Flushing()
    for _ in range(2):
        assert denormals_live()
        with flushing:
            assert not denormals_live()
        assert denormals_live()


def test_an_exception_leaves_the_block_as_any_other_way() -> None:
    with pytest.raises(ValueError, match="through"), Flushing():
        raise ValueError("through")
    assert denormals_live()


V1 = "36 31 0:33 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "30 1 0:26 / /cg rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mount", "own", "files", "cpus"),
    [
        (V2, "0::/", {}, 8),
        (V2, "0::/", {"cpu.max": "max 100000\n"}, 8),
        (V2, "0::/", {"cpu.max": "250000 100000\n"}, 3),
        (V2, "0::/", {"cpu.max": "10000 100000\n"}, 1),
        (V2, "0::/", {"cpu.max": "nonsense"}, 8),
        (V2, "0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        (V1, "1:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        (V1, "1:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        (V1, "1:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "100000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_quota_cuts_the_usable_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, own: str, files: dict[str, str], cpus: int
) -> None:
    written = {"proc/self/mountinfo": mount, "proc/self/cgroup": f"{own}\n", **{f"cg/{name}": content for name, content in files.items()}}
    for name, content in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cpus(tmp_path) == cpus


def test_other_features_are_another_instruction_set(tmp_path: Path) -> None:
    machines = {}
    for name, flags in (("old", "sse2 avx"), ("new", "sse2 avx avx512f"), ("same", "avx sse2")):
        (tmp_path / name).write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
        machines[name] = instruction_set(tmp_path / name)
    assert machines["old"] == machines["same"] != machines["new"]
    assert instruction_set() == instruction_set()


def test_the_instruction_set_needs_no_proc_and_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "processor", None)  # it may start one
    assert instruction_set(tmp_path / "missing").startswith(f"{platform.machine()}-")
