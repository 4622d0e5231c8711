"""A child by `os.fork` ends as it likes, and its parent's runtime goes on: drivers, streams, compiles, locks, files, the loop itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.apps import run_app
from tests.leaks import leak_check

ROOT = Path(__file__).parent.parent.parent
EXIT_CODES = {"return": 0, "raise": 1, "multiprocessing": 0}


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize(
    ("child", "load"),
    [
        *((child, "busy") for child in ("sys.exit", "return", "raise", "close", "use", "collect", "own", "multiprocessing")),
        ("sys.exit", "quiet"),
        ("return", "quiet"),
    ],
)
def test_a_child_of_fork_touches_nothing_of_its_parents(child: str, load: str, loop: str, tmp_path: Path) -> None:
    with leak_check():
        app = run_app(
            [sys.executable, "-W", "ignore:.*fork.*:DeprecationWarning", "-m", "tests.journeys.forking_app", child, loop, load, tmp_path],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert app.returncode == 0, app.stderr
    assert app.stdout.split("\n") == [f"child {EXIT_CODES.get(child, 7)}", "hit", "closed", ""], app.stderr
    if child == "raise":
        assert "ZeroDivisionError: the child's own\n" in app.stderr
    elif load == "quiet":  # else asyncio may run other tasks of the parent's in the child for a moment, and complain
        assert app.stderr == ""
