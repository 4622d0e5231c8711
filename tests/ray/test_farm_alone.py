"""What the parts of the farm do in one process, without a cluster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import aionn
from aionn.caching.outcomes import MissReason, Refusal
from aionn.fleet import BuilderKey
from aionn.ray import flights, tasks
from aionn.ray.orders import Order, OrderResult, decode_state

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def order_for(store: Path) -> Order:
    return Order(b"k" * 32, "d", "1", b"m" * 32, str(store), b"t" * 32, "fast_single_answer", "medium", 0, False, 1, {}, 100)


async def test_what_became_of_an_order_stays_known_when_an_old_task_begins_late(tmp_path: Path) -> None:
    actor, order = flights.Flights(), order_for(tmp_path)
    flight = actor._flights[order.flight] = flights._Flight(order)
    flight.waiters[1] = math.inf
    flight.show("done", OrderResult(builder=b"b"))
    assert await actor.started(order.flight) == 0
    await actor.report(order.flight, "compiling")
    encoded = await actor.follow(order.flight, 1, flight.state.number)
    assert encoded is not None
    assert decode_state(encoded).result == OrderResult(builder=b"b")


@pytest.mark.parametrize(
    ("reason", "lost"),
    [(MissReason.ABSENT, True), (MissReason.WRONG_BYTES, True), (MissReason.UNREADABLE, True), (MissReason.IO_ERROR, False)],
)
async def test_a_model_is_sent_again_only_if_the_store_has_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: MissReason, lost: bool
) -> None:
    async def refused(*_: object) -> Refusal:
        return Refusal(reason, "it cannot be had")

    monkeypatch.setattr(tasks, "fetch_model", refused)
    made = await tasks._compiled(order_for(tmp_path), BuilderKey.generate("farm"), lambda _: None)
    assert ("it cannot be had" in made.refusal, made.model_lost) == (True, lost)


def test_a_farm_takes_a_store_that_the_nodes_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(aionn.CallerError, match="in memory"):
        aionn.ray.Farm("memory://")
    monkeypatch.chdir(tmp_path)
    Path("store").mkdir()
    farm: Any = aionn.ray.Farm("store", wait_s=math.inf)
    assert farm._address == str(tmp_path / "store"), "nodes have other working directories"
    assert farm.wait_s == math.inf
