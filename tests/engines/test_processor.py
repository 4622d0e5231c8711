"""What the CPU gives and is."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "nonsense"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_quota_cuts_the_usable_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: int) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
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
