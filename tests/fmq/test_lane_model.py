"""Lanes lose no wake and return each burst once, in any interleaving; and the search finds the fault when an ingredient is left out."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from tests.fmq.lane_model import Protocol, search
from tests.fmq.test_wake_model import body_of, in_order

pytestmark = pytest.mark.no_cover  # a search of a model, which runs no line of aionn

# A lane need not join, so a search with joins visits all that the same one without joins does.
SHIPPED = {
    "one lane and one burst": Protocol(("kk",), lanes=1, jobs=1),
    "one lane and two bursts": Protocol(("k", "k"), lanes=1),
    "one lane, two bursts and recalls": Protocol(("k", "u"), lanes=1, recalls=1, looks=False),
    "two lanes and one burst": Protocol(("kk",)),
    "two lanes that recalls meet": Protocol(("kk",), recalls=1, looks=False),
    "two lanes that look, and a recall": Protocol(("k",), recalls=1),
    "two lanes, a job, a recall and the stop": Protocol(("k",), recalls=1, jobs=1, stops=True, looks=False),
    "no further ahead than allowed": Protocol(("kkk",), ahead=1, looks=False),
    "device memory between other requests": Protocol(("ksk",), looks=False),
    "a request that is not known between others": Protocol(("kuk",), looks=False),
    "two requests that wait for each other": Protocol(("kk",), together=True),
    "requests of two bursts that wait for each other": Protocol(("k", "k"), together=True, looks=False),
    "a request that waits for two jobs": Protocol(("k",), together=True, jobs=2),
    "a lane that joins": Protocol(("kk", "k"), lanes=1, joins=2, looks=False),
    "a lane that joins, and a request of another kind": Protocol(("k", "ok"), lanes=1, joins=2, looks=False),
    "a lane that joins, and a request that is not known": Protocol(("k", "u"), lanes=1, joins=1, looks=False),
    "a lane that joins, and recalls": Protocol(("k", "k"), lanes=1, joins=1, recalls=1, looks=False),
    "a lane that joins, a job and the stop": Protocol(("k", "k"), lanes=1, joins=1, jobs=1, stops=True, looks=False),
    "two lanes that join": Protocol(("k", "k"), joins=1, looks=False),
    "a step that waits": Protocol(("k", "w"), lanes=1),
    "a step that waits for a request that the task serves": Protocol(("u", "w"), lanes=1, looks=False),
    "a step that waits, and two lanes": Protocol(("k", "w"), looks=False),
    "a step that waits, and recalls": Protocol(("k", "w"), lanes=1, recalls=1, looks=False),
    "steps that wait, and a lane that joins": Protocol(("kk", "wk"), lanes=1, joins=1, looks=False),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_lanes_never_sleep_through_what_they_owe(name: str) -> None:
    way, states = search(SHIPPED[name])
    assert way is None, "\n".join(way or [])
    assert states > 2000  # it did search


WITHOUT = {
    "arms_when_empty": Protocol(("kk",), lanes=1),
    "enqueues_at_lend": Protocol(("k",), lanes=1),
    "wakes_at_lend": Protocol(("k",), lanes=1),
    "wakes_to_share": Protocol(("kk",), together=True),
    "shares": Protocol(("kk",), together=True),
    "wakes_for_more": Protocol(("k", "k"), together=True, looks=False),
    "wakes_for_jobs": Protocol(("k",), together=True, jobs=2),
    "looks_again": Protocol(("kk",), lanes=1),
    "keeps_what_came": Protocol(("k",), lanes=1),
    "checks_jobs_last": Protocol(("k",), lanes=1, jobs=1),
    "counts_sleep_first": Protocol(("k",), lanes=1, jobs=1),
    "tells_when_idle": Protocol(("ku",), looks=False),
    "unqueues": Protocol(("k",), lanes=1, recalls=1),
    "arms_in_join": Protocol(("k", "k"), lanes=1, joins=1, looks=False),
    "keeps_in_join": Protocol(("k", "ok"), lanes=1, joins=1, looks=False),
    "enqueues_joined": Protocol(("k", "kk"), joins=1, ahead=1, looks=False),
    "notes": Protocol(("k", "w"), lanes=1, looks=False),
}


@pytest.mark.parametrize("ingredient", [pytest.param(one, marks=pytest.mark.soak) if one == "enqueues_joined" else one for one in WITHOUT])
def test_without_one_of_its_ingredients_the_protocol_fails(ingredient: str) -> None:
    protocol = WITHOUT[ingredient]
    assert search(protocol)[0] is None
    without: dict[str, Any] = {ingredient: False}
    way, _ = search(replace(protocol, **without))
    assert way is not None


def test_each_ingredient_of_the_model_has_its_fault() -> None:
    ingredients = [field.name for field in fields(Protocol) if field.default is True and field.name != "looks"]
    assert sorted(WITHOUT) == sorted(ingredients)


def test_the_native_code_takes_the_steps_of_the_model_in_their_order() -> None:
    top = body_of("lane_next", "_lane.c")
    assert in_order(
        top, "finish(", "last->lanes != lanes", "Py_DECREF", "lanes->jobs &&", "choose(", "sleep_for_events(", "take(", "share(", "idle("
    )
    assert in_order(body_of("sleep_for_events", "_lane.c"), "sleeping++", "anticipate_sleep(", "sleeping--", "collect")
    assert in_order(body_of("anticipate_sleep", "_anticipate.c"), "Py_BEGIN_ALLOW_THREADS", "epoll_wait", "Py_END_ALLOW_THREADS")
    assert in_order(body_of("anticipate_finish", "_anticipate.c"), "running--", "lanes_call_once(&listener->idle)", "look(")
    assert in_order(body_of("choose", "_lane.c"), "lanes_collect", "lanes_enqueue(lanes, last)", "lanes_dequeue", "lanes_wake_one")
    assert in_order(body_of("share", "_lane.c"), "arm(listener)", "lanes_enqueue", "lanes_wake_one")
    assert in_order(body_of("lanes_lend", "_lanes.c"), "EPOLL_CTL_ADD", "lanes_enqueue", "lanes_wake_one")
    assert in_order(body_of("answer_one", "_lane.c"), "running--", "write_held", "listener_note(", "lanes_call_once(&listener->idle)")
    assert in_order(body_of("finish", "_lane.c"), "answer_one(lane, &first", "answer_one(lane, &lane->joined[i]", "lanes_enqueue")
    assert in_order(
        body_of("lane_join", "_lane.c"), "lanes_enqueue(lanes, lane->run.serves)", "collect_all(", "take_ready(", "all_wait(", "sleeping++"
    )
    assert in_order(body_of("lane_join", "_lane.c"), "Py_BEGIN_ALLOW_THREADS", "anticipate_wait(", "sleeping--", "lanes_collect(")
    assert in_order(body_of("take", "_lane.c"), "exchange_peek(", "exchange_claim(", "ring_commit_read(")
    assert in_order(body_of("copy_out", "_transfer.c"), "ring_begin_read(", "ring_claim(", "ring_copy_out(", "ring_commit_read(")
    assert in_order(body_of("take_ready", "_lane.c"), "lanes_dequeue", "take(", "arm(listener)", "lanes_enqueue")
    assert in_order(body_of("listener_note", "_listener.c"), "outcomes[", "wake_waiting(")
    assert in_order(body_of("wake_waiting", "_listener.c"), "waits = false", "lanes_enqueue", "ring_signal")
