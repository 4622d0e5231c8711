"""The wake protocol loses no wake in any interleaving; and the search is able to find the hangs that were met or feared."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fmq.wake_model import Protocol, search

pytestmark = pytest.mark.no_cover  # a search of a model, which runs no line of aionn

FMQ = Path(__file__).parents[2] / "aionn" / "fmq"

SIZES = [Protocol(messages=m, waiters=w, inline=i) for m in range(1, 6) for w in range(1, 4) for i in range(3) if m >= w + i]


@pytest.mark.parametrize("protocol", SIZES, ids=lambda p: f"{p.messages}-messages-{p.waiters}-waiters-{p.inline}-inline")
def test_the_shipped_protocol_never_sleeps_through_a_commit(protocol: Protocol) -> None:
    way, states = search(protocol)
    assert way is None
    assert states > 20 * protocol.messages  # it did search


@pytest.mark.parametrize(
    ("fault", "protocol"),
    [
        ("no fence at all", Protocol(waker_fence=False, sleeper_fence=False)),
        ("no fence in the waker", Protocol(waker_fence=False)),
        ("no fence in the sleeper", Protocol(sleeper_fence=False)),
        ("a stale wake sleeps again without arming", Protocol(rearms=False)),
        ("an inline completion leaves the others unarmed", Protocol(settles=False)),
    ],
)
def test_the_search_finds_the_hang_when_the_fault_is_put_back(fault: str, protocol: Protocol) -> None:
    way, _ = search(protocol)
    assert way is not None, fault
    repaired = replace(protocol, waker_fence=True, sleeper_fence=True, rearms=True, settles=True)
    assert search(repaired)[0] is None


def test_a_fence_on_one_side_is_missed_with_one_message_and_one_waiter_alone() -> None:
    smallest = Protocol(messages=1, waiters=1, inline=0)
    assert search(smallest)[0] is None
    assert search(replace(smallest, waker_fence=False))[0] is not None
    assert search(replace(smallest, sleeper_fence=False))[0] is not None


def body_of(function: str, file: str = "ring.h") -> str:
    found = re.search(rf"(static )?(inline )?\w[\w \*]+[ \*]{function}\(.*?\n}}\n", (FMQ / file).read_text(), re.DOTALL)
    assert found is not None
    return re.sub(r"/\*.*?\*/", "", found.group(), flags=re.DOTALL)


def in_order(text: str, *parts: str) -> bool:
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
    return True


def test_the_exchange_commits_only_through_ring_h() -> None:
    """So that each of its packets takes the steps W1 to W4, and what it reads is given back as any other element."""
    assert in_order(body_of("exchange_write", "exchange.h"), "ring_begin_write", "exchange_copy_in", "return ring_commit_write(r, bytes)")
    for function, file in (("answer_at_once", "_request.c"), ("flight_look", "_flight.c"), ("take", "_lane.c")):
        assert in_order(body_of(function, file), "exchange_peek", "ring_commit_read")
    for file in ("exchange.h", "_exchange.c", "_flight.c", "_request.c", "_caller.c"):
        assert not re.search(r"atomic_|->(read|written|control|flag|data)\b", (FMQ / file).read_text())
