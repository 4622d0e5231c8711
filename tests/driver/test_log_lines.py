"""What a driver logs, on its way to the app's log: bounded in number and length, whole where it can be, and never silently short."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aionn.driver import process
from aionn.driver.process import MAX_BYTES, PER_SECOND, LogLines

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger of the test's, below the one that drivers watch."""
    found = logging.getLogger("aionn.driver.test_log_lines")
    yield found
    found.handlers.clear()


class Sent:
    """What reaches the app."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []
        self.more = anyio.Event()

    def __call__(self, level: int, name: str, text: str) -> None:
        self.lines.append((level, name, text))
        if "more lines" in text:
            self.more.set()

    @property
    def texts(self) -> list[str]:
        return [text for _, _, text in self.lines]


async def test_ten_thousand_lines_in_a_second_become_fifty_and_one(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is long here, so that a slow machine logs all lines in it."""
    monkeypatch.setattr(process, "SECOND_S", 3600.0)
    sent = Sent()
    lines = LogLines(sent)
    logger.addHandler(lines)
    loop = asyncio.get_running_loop()
    timers: list[tuple[float, Any]] = []
    monkeypatch.setattr(lines, "_loop", Recording(loop, timers))

    def log() -> None:
        for number in range(10_000):
            logger.error("line %d", number)

    await anyio.to_thread.run_sync(log)
    await turned()
    assert sent.texts == [f"line {number}" for number in range(PER_SECOND)]
    ((seconds, over),) = timers  # one timer, whatever is left out
    assert 0 < seconds <= 3600
    over()
    await turned()
    assert sent.lines[PER_SECOND:] == [(logging.WARNING, logger.name, f"{10_000 - PER_SECOND} more lines in one second were left out")]


async def turned() -> None:
    """Return when everything that was given to the loop before has run."""
    over = anyio.Event()
    asyncio.get_running_loop().call_soon_threadsafe(over.set)
    await over.wait()


class Recording:
    """A loop whose timers are noted. Everything else is the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timers: list[tuple[float, Any]]) -> None:
        self._loop, self._timers = loop, timers

    def call_soon_threadsafe(self, call: Any, *given: Any) -> Any:
        return self._loop.call_soon_threadsafe(call, *given)

    def call_later(self, seconds: float, call: Any, *given: Any) -> None:
        self._timers.append((seconds, lambda: call(*given)))


async def test_how_many_were_left_out_comes_without_another_line(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECOND_S", 0.3)
    sent = Sent()
    logger.addHandler(LogLines(sent))
    for number in range(PER_SECOND + 7):
        logger.error("line %d", number)
    with anyio.fail_after(30):
        await sent.more.wait()
    left_out = int(sent.texts[-1].partition(" ")[0])
    assert len(sent.texts) - 1 + left_out == PER_SECOND + 7


async def test_the_next_second_says_at_once_what_the_one_before_left_out(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer of the second before comes late then, and sends nothing more."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sent, timers = Sent(), list[tuple[float, Any]]()
    lines = LogLines(sent)
    monkeypatch.setattr(lines, "_loop", Recording(asyncio.get_running_loop(), timers))
    logger.addHandler(lines)
    for _ in range(PER_SECOND + 2):
        logger.error("first")
    now = 101.5
    for _ in range(PER_SECOND + 3):
        logger.error("second")
    await turned()
    timers[0][1]()
    await turned()
    assert sent.texts == ["first"] * PER_SECOND + ["2 more lines in one second were left out"] + ["second"] * PER_SECOND
    timers[1][1]()
    await turned()
    assert sent.texts[-1] == "3 more lines in one second were left out"


@pytest.mark.parametrize("letter", ["x", "ä", "語"])
async def test_a_long_text_keeps_its_ends_within_the_bound(letter: str, logger: logging.Logger) -> None:
    sent = Sent()
    logger.addHandler(LogLines(sent))
    logger.error("begin %s end", letter * 50_000)
    logger.error("%s", letter * (MAX_BYTES // len(letter.encode())))
    logger.info("below the level")
    await turned()
    long, whole = sent.texts
    assert len(long.encode()) <= MAX_BYTES
    assert long.startswith("begin ")
    assert long.endswith(" end")
    assert f"[{50_000 * len(letter.encode()) + 10} bytes in all]" in long
    assert whole == letter * (MAX_BYTES // len(letter.encode()))


async def test_a_line_that_is_left_out_is_not_formatted(logger: logging.Logger) -> None:
    formatted = 0

    class Costly:
        def __str__(self) -> str:
            nonlocal formatted
            formatted += 1
            return "costly"

    sent = Sent()
    logger.addHandler(LogLines(sent))
    logger.propagate = False
    try:
        for _ in range(3 * PER_SECOND):
            logger.error("%s", Costly())
    finally:
        logger.propagate = True
    assert PER_SECOND <= formatted <= 2 * PER_SECOND  # a second may have begun meanwhile
