"""State directories that cannot be used: values and never exceptions, and the same ones confined and free."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.apps import run_app
from tests.caching.unusable_state import FAULTS

ROOT = Path(__file__).parents[2]

STORED = ["miss absent None", "hit None None", "miss absent None"]
EXPECTED = {
    "none": STORED,
    "loose": STORED,  # its mode is tightened
    "below_a_file": ["miss absent io_error"] * 3,
    "nowhere": ["miss absent io_error"] * 3,
    "read_only_before_the_first_use": ["miss absent no_permission"] * 3,
    "read_only_with_records": ["hit None None", "hit None None", "miss absent no_permission"],
    "full": ["miss absent no_space"] * 3,
    "full_with_a_folder": ["miss absent no_space"] * 3,
    "full_with_records": ["hit None None", "hit None None", "miss absent no_space"],
}
UNSAFE = ["miss absent unsafe"] * 3
"""What belongs to another account, is a symlink, or is not a folder."""


# The free driver can do all that the confined one can. So each fault is tried confined, and in soaks free, too.
CASES = [
    *((fault, "auto") for fault in FAULTS),
    *(pytest.param(fault, "off", marks=[] if fault in ("none", "read_only_with_records") else pytest.mark.soak) for fault in FAULTS),
]


@pytest.mark.parametrize(("fault", "sandbox"), CASES)
def test_a_state_directory_that_cannot_be_used_costs_compilations_only(fault: str, sandbox: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.caching.unusable_state", fault, sandbox, str(tmp_path)]
    done = run_app(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(f"the system does not allow it: {done.stderr}")
    assert (done.returncode, done.stdout.splitlines()) == (0, EXPECTED.get(fault, UNSAFE)), done.stderr
