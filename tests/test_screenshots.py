"""The pictures of the documentation: made from real commands and the real live page, and fit to be published."""

from __future__ import annotations

import re
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


def words_of(picture: Path) -> str:
    """Return the text of the moving picture, and check what holds for it wherever it was made."""
    content = picture.read_text(encoding="utf-8")
    assert len(content) < 300_000
    assert str(SCRIPT.parent.parent) not in content
    assert set(re.findall(r'href="(.{16})', content)) == {"data:image/webp;"}  # a page fetches nothing from elsewhere
    for moving in ("@keyframes moves{to{transform:translateX(-", "@media (prefers-color-scheme: dark)", 'class="band"', 'class="swap"'):
        assert moving in content
    return " ".join(" ".join(xml.etree.ElementTree.fromstring(content).itertext()).split())


SHOWN = ("somebody speaks", "openvino serves", "onnxruntime died", "onnxruntime ready", "(signal 9)", "A new driver has taken over.")


def test_the_moving_picture_shows_the_swap_and_the_death() -> None:
    words = words_of(SCRIPT.parent / "pictures" / "live.svg")
    assert [shown for shown in SHOWN if shown not in words] == []


@pytest.mark.soak  # a minute of a browser, in which a better stage must take over
def test_the_moving_picture_is_made_from_the_live_page(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--only", "live", "--into", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    words = words_of(tmp_path / "live.svg")
    assert [shown for shown in SHOWN if shown not in words] == []


def test_what_is_no_picture_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--only", "sunset", "--into", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--only 'sunset': the pictures are top, bench, doctor, swap, live" in done.stderr
    assert list(tmp_path.iterdir()) == []
