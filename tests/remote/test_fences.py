"""A process that shares a fence cannot make another one wait that signals it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from aionn.remote.fences import FAILURE, make_fence, outcome_of, signal_fence

MOST = 2**64 - 2


@pytest.fixture
def bounded() -> Iterator[None]:
    """A call of the system that waits ends with an error."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError("the call waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("succeeded", [True, False])
@pytest.mark.parametrize("left", [0, 1, FAILURE - 1])
def test_a_filled_fence_that_waits_is_signalled_without_a_wait(left: int, succeeded: bool) -> None:
    fence = make_fence()
    os.eventfd_write(fence, MOST - left)
    os.set_blocking(fence, True)  # the flag belongs to the description, which a driver shares
    signal_fence(fence, succeeded=succeeded)
    assert outcome_of(fence) is False
    os.close(fence)


@pytest.mark.parametrize("already", [0, 1, FAILURE - 1])
def test_a_fence_with_room_gets_the_failure(already: int) -> None:
    fence = make_fence()
    os.eventfd_write(fence, already)
    signal_fence(fence, succeeded=False)
    assert os.eventfd_read(fence) == already + FAILURE
    os.close(fence)


@pytest.mark.parametrize(("already", "succeeded"), [(1, True), (FAILURE, True), (FAILURE, False), (FAILURE + 1, False)])
def test_a_fence_that_says_the_outcome_is_not_written_to(already: int, succeeded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that fills the counter after its own signal cannot make the app wait."""
    fence = make_fence()
    os.eventfd_write(fence, already)
    monkeypatch.setattr(os, "eventfd_write", lambda *_: pytest.fail("this write could wait"))
    signal_fence(fence, succeeded=succeeded)
    assert os.eventfd_read(fence) == already
    os.close(fence)


def test_a_fence_that_is_closed_is_not_signalled_silently() -> None:
    fence = make_fence()
    os.close(fence)
    with pytest.raises(OSError, match="Bad file descriptor"):
        signal_fence(fence, succeeded=True)
