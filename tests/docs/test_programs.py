"""Each whole program of README.md and docs/ runs as it stands, in a process, and leaves nothing behind. Shown output is compared."""

from __future__ import annotations

import doctest
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.apps import App, run_app
from tests.docs.pages import ROOT, Block, blocks, outputs, programs
from tests.docs.worlds import environment, fill
from tests.leaks import leak_check

TIMEOUT_S = 90
MOST_NOT_RUN = 12
"""Blocks that do not run in the tests. A page has a reason for each; the number may grow only by decision."""

_ELLIPSIS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
COMMANDS = [block for block in blocks() if block.language == "sh" and block.mark == "run"]


def run(arguments: list[str], folder: Path, start: Callable[..., Any] = subprocess.run) -> subprocess.CompletedProcess[str]:
    ran: subprocess.CompletedProcess[str] = start(
        arguments, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    return ran


def check(block: Block, ran: subprocess.CompletedProcess[str]) -> None:
    """Fail if the program failed, or printed something else than the page shows."""
    assert ran.returncode == 0, f"{block.place} ended with {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    shown = outputs().get(block.place)
    if shown is not None:
        same = doctest.OutputChecker().check_output(shown.text, ran.stdout, _ELLIPSIS)
        assert same, f"{shown.place} shows\n{shown.text}\nbut the program printed\n{ran.stdout}\n{ran.stderr}"


@pytest.fixture
def world(tmp_path: Path) -> Path:
    fill(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", programs(), ids=lambda block: block.place)
def test_the_program_runs(block: Block, world: Path) -> None:
    with leak_check():
        (world / "program.py").write_text(block.text, encoding="utf-8")
        ran = run([sys.executable, "program.py"], world, run_app)
    check(block, ran)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.place)
def test_the_commands_run(block: Block, world: Path) -> None:
    with leak_check():
        ran = run(["bash", "-euo", "pipefail", "-c", block.text], world)
    check(block, ran)


STAND_IN = """
import threading
import soundfile

class InputStream:
    def __init__(self, samplerate, channels, blocksize, dtype, callback):
        assert (samplerate, channels, dtype) == (16_000, 1, "float32")
        self._size, self._callback = blocksize, callback
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        self._closed.set()
        self._thread.join()

    def _listen(self):
        samples, _ = soundfile.read("speech.wav", dtype="float32", always_2d=True)
        starts = iter(range(0, len(samples) - self._size, self._size))
        while not self._closed.wait(0.001):
            if (start := next(starts, None)) is not None:
                self._callback(samples[start : start + self._size], self._size, None, None)
"""
"""A module `sounddevice` whose microphone hears the recording."""


def test_the_microphone_of_the_tutorial_is_listened_to(world: Path) -> None:
    (block,) = (block for block in programs() if "sounddevice" in block.text)
    (world / "program.py").write_text(block.text, encoding="utf-8")
    (world / "sounddevice.py").write_text(STAND_IN, encoding="utf-8")
    command = [sys.executable, "program.py", "--microphone"]
    with (
        leak_check(),
        App(command, cwd=world, env=environment(world), stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as program,
    ):
        assert program.stdout is not None
        try:
            heard = [program.stdout.readline() for _ in range(2)]
            program.send_signal(signal.SIGINT)  # Ctrl-C
            *_, last = program.stdout
            program.wait(TIMEOUT_S)
        finally:
            program.kill()
    assert (heard, last, program.returncode) == (["you speak\n", "silence\n"], "bye\n", 0)


def test_few_blocks_are_left_out_and_each_has_a_reason() -> None:
    left_out = [block for block in blocks() if block.language == "python" and block.mark.startswith("not run")]
    assert [block.place for block in left_out if not block.reason] == []
    assert len(left_out) <= MOST_NOT_RUN, [block.place for block in left_out]


@pytest.mark.parametrize("block", [block for block in blocks() if block.source], ids=lambda block: block.place)
def test_a_part_of_a_file_is_shown_as_it_stands_there(block: Block) -> None:
    assert block.text.strip() in (ROOT / block.source).read_text(encoding="utf-8"), (
        "write the page with `python -m tests.bench versus --write`"
    )


def test_every_output_that_is_shown_is_compared() -> None:
    compared = {block.place for block in outputs().values()}
    assert [block.place for block in blocks() if block.mark == "output" and block.place not in compared] == []
    assert set(outputs()) <= {block.place for block in [*programs(), *COMMANDS]}


def counts() -> str:
    """Return how many blocks of Python the pages have, and how they run, in one line."""
    kinds = Counter(
        "not run" if block.reason else "as fragments" if block.is_fragment else "as parts of a file" if block.source else "as programs"
        for block in blocks()
        if block.language == "python"
    )
    kinds["of shell commands"] = len(COMMANDS)
    return "blocks of the pages: " + ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


if __name__ == "__main__":
    print(counts())
