"""Two processes that sleep at every chance, in both directions: a lost wake is a time-out, and fails.

The queues are tiny, so writer and reader both sleep all the time; several tasks wait at once, for one-in-flight tests
never showed the lost wakes that eight in flight did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import anyio
import pytest

from aionn.fmq import MessageQueue
from tests.fmq.service import Peer, peer

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

FAR_S = 25


@pytest.fixture(scope="module")
def service() -> Iterator[Peer]:
    with peer() as process:
        yield process


def soon() -> int:
    return time.monotonic_ns() + FAR_S * 10**9


async def echoed(service: Peer, how: str, times: int, capacity: int, in_flight: int) -> None:
    """`in_flight` tasks send and take `times` elements in all; the service sends each back."""
    requests, answers = MessageQueue.create(8, capacity), MessageQueue.create(8, capacity)
    service.attach(requests, "u8")
    service.attach(answers, "u8", name="answers")
    service.start("echo", times=times, how=how)
    left = iter(range(times))
    seen: list[int] = []

    async def lane() -> None:
        for number in left:
            await requests.write_blocking(number.to_bytes(8, "little"), soon())
            seen.append(int.from_bytes(await answers.read_blocking(1, soon()), "little"))

    async with anyio.create_task_group() as tasks:
        for _ in range(in_flight):
            tasks.start_soon(lane)
    assert await asyncio.to_thread(service.answer) == times
    assert sorted(seen) == list(range(times))
    requests.close()
    answers.close()


@pytest.mark.parametrize("how", ["asyncio", "uvloop", "thread"])
@pytest.mark.parametrize(("capacity", "in_flight"), [(1, 1), (1, 8), (3, 8), (8, 8)])
async def test_no_wake_is_lost_between_two_processes(service: Peer, how: str, capacity: int, in_flight: int) -> None:
    await echoed(service, how, 1500, capacity, in_flight)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["asyncio", "uvloop", "thread"])
@pytest.mark.parametrize(("capacity", "in_flight"), [(1, 1), (1, 8), (3, 8), (8, 8)])
async def test_no_wake_is_lost_in_sixty_thousand(service: Peer, how: str, capacity: int, in_flight: int) -> None:
    for _ in range(4):
        await echoed(service, how, 15_000, capacity, in_flight)
