"""Caches whose modes, or whose volume, keep their own account from writing. The work is done in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.apps import run_app

ROOT = Path(__file__).parents[2]


def unprivileged(scenario: str, directory: Path) -> None:
    done = run_app(
        [sys.executable, "-m", "tests.caching.unprivileged", scenario, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"the system does not allow it: {done.stderr}")
    assert done.returncode == 0, done.stderr


def test_an_entry_directory_of_a_wrong_mode_is_healed(tmp_path: Path) -> None:
    unprivileged("heal", tmp_path)


@pytest.mark.parametrize("what", ["mode", "mode all", "volume", "volume all"])
def test_a_read_only_cache_hits_and_a_miss_in_it_is_one_warning(tmp_path: Path, what: str) -> None:
    unprivileged(what, tmp_path)
