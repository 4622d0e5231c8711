"""F21: `examples/ray_farm.py` runs as documented, and leaves nothing: no process, no file, nothing in /dev/shm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import leak_check, left_running
from tests.ray.cluster import ENVIRONMENT

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_farm.py"
pytestmark = [pytest.mark.fleet, pytest.mark.soak, pytest.mark.timeout(200)]  # it starts a cluster


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder with a short path, because Ray makes sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="f21"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_the_example_shows_hits_and_leaves_nothing(temporary: Path) -> None:
    mark = uuid.uuid4().hex
    others = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    environment = {**others, "AIONN_TEST_MARK": mark, "TMPDIR": str(temporary)}
    with leak_check():
        command = [sys.executable, "-W", "error", str(EXAMPLE), "--json"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL, env=environment)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [(one["app"], one["outcome"], one["detail"]) for one in found] == [
        (app, "HIT", "compiled by builder 'farm'") for app in ("first", "first", "second", "second")
    ]
    assert left_running("AIONN_TEST_MARK", mark) == []
    assert list(temporary.iterdir()) == []
