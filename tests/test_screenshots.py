"""The pictures of terminals: made from the real command while a real app runs, and fit to be published."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests.real_models import carried

SCRIPT = Path(__file__).parent.parent / "docs" / "screenshots.py"

pytestmark = pytest.mark.usefixtures("surroundings")


def test_the_picture_of_top_shows_a_real_app_and_no_path(tmp_path: Path) -> None:
    carried("silero")
    carried("detector")
    command = [sys.executable, str(SCRIPT), "--only", "top", "--seconds", "0.5", "--into", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    picture = tmp_path / "top.svg"
    content = picture.read_text(encoding="utf-8")
    text = " ".join("".join(xml.etree.ElementTree.fromstring(content).itertext()).replace("\xa0", " ").split())
    for shown in ("$ aionn top", "doorbell pid", "onnxruntime", "silero_vad", "text_detector", "fps"):
        assert shown in text
    assert str(SCRIPT.parent.parent) not in content
    assert "url(" not in content.replace("url(#", "")  # a page fetches nothing from elsewhere
    assert len(content) < 100_000


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--only", "sunset", "--into", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--only 'sunset': the pictures are top, bench, doctor, swap" in done.stderr
    assert list(tmp_path.iterdir()) == []
