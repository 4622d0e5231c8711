"""The protocol of lanes (lanes_object.h) searched exhaustively: apps, the tasks of their bursts, lanes, jobs, recalls, the stop.

Everything under the GIL is one party's until it releases the GIL; only apps go on meanwhile. So a lane's steps are split where an app
can see or change what they touch: the armed word and the queue. Stores land at once here. `test_weak_memory` has the memory orders.

    app        W1 commit      W3 swap armed to 0      W4 if it was set: the eventfd, which is an event of epoll while the burst is lent
    task       back: a packet that is not known, once no lane runs a request      lend: enqueue, wake a lane      recall, at any moment
    lane       top: jobs, stop      choose: collect events, dequeue      take      share or idle: arm, look      sleep      finish
               join: take more requests of the same kind to the one that it has, arm or keep the bursts without one, wait for more

Requests are known ("k"), known and of another kind ("o"), known and with device memory ("s"), or not known ("u"). One more ("w") is known
and waits for the first request of burst 0, as a chain's step does. An event is edge-triggered, and one lane takes it.

Checked in each state: `returned` is called once for each lend; the task serves a packet only while no lane runs a request of its burst; a
request with device memory runs alone; no burst stands in `ready` twice. A hang is a state from which nothing can move though a request,
a job, a return or the end is owed. `search` returns the first fault, with the way there, or None.

The faults that can be put back are the fields of `Protocol` that are True.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.fmq.wake_model import explore


class Burst(NamedTuple):
    """One burst: its app, its queue and its task."""

    to_send: str
    app_at: str = "W1"
    queue: str = ""
    armed: bool = False
    event: bool = False  # in epoll
    task_at: str = "lend"
    recalls: int = 0  # that the task may still make
    lent: bool = False
    queued: bool = False
    exclusive: bool = False
    running: tuple[int, ...] = ()  # numbers of requests
    taken: int = 0
    over: bool = False  # its first request
    waits: bool = False  # for the first request of burst 0


class Lane(NamedTuple):
    """One lane. `at` is its next step; `burst` is the one that it serves or looks at."""

    at: str = "top"
    burst: int = -1
    last: int = -1
    number: int = 0
    exclusive: bool = False
    after_job: bool = False
    looked: bool = False
    then: str = ""  # the step after arming
    event: int = -1  # the burst whose event it took from epoll
    kind: str = ""
    joined: tuple[tuple[int, int], ...] = ()  # bursts and numbers of the requests that it has taken to the first one
    misses: int = 0  # bursts that `join` has put back since it took one


class State(NamedTuple):
    """Everything that matters, hashable."""

    bursts: tuple[Burst, ...]
    lanes: tuple[Lane, ...]
    gil: int = -1  # the lane that holds it in the middle of its steps
    ready: tuple[int, ...] = ()
    sleeping: int = 0
    signal: bool = False
    jobs: int = 0  # counted natively
    job_queue: int = 0  # in Python
    announces: int = 0  # that are still to come
    looking: bool = False
    stops: bool = False  # whether `stop` may come
    stopped: bool = False
    wrong: str = ""


@dataclass(frozen=True)
class Protocol:
    """The shipped protocol, or one with a fault put back; and the size of the search."""

    sends: tuple[str, ...] = ("kk", "k")
    lanes: int = 2
    recalls: int = 0
    jobs: int = 0
    stops: bool = False
    ahead: int = 2
    joins: int = 0  # requests that a lane may take to the first one
    together: bool = False  # a run ends only when all requests have been taken, and all jobs have begun
    looks: bool = True  # a lane may look for a while before it arms
    arms_when_empty: bool = True
    enqueues_at_lend: bool = True
    wakes_at_lend: bool = True
    wakes_to_share: bool = True
    shares: bool = True
    wakes_for_more: bool = True  # a lane that takes one of several bursts or jobs wakes another lane
    wakes_for_jobs: bool = True  # a lane that takes a request before a job wakes another lane
    looks_again: bool = True  # at the burst whose request it has run
    keeps_what_came: bool = True  # what arming has found is enqueued
    checks_jobs_last: bool = True  # no Python code runs between the look at `jobs` and the sleep
    counts_sleep_first: bool = True  # `sleeping` is counted before the GIL is released
    tells_when_idle: bool = True  # the task that waits for the runs in flight
    unqueues: bool = True  # a burst that is given back leaves `ready`
    arms_in_join: bool = True  # a burst in which `join` finds no request
    keeps_in_join: bool = True  # a burst stays in `ready` whose request `join` took, or left
    enqueues_joined: bool = True  # bursts of a joined run are looked at again
    notes: bool = True  # a request that is over puts the bursts into `ready` that wait for it


def start(p: Protocol) -> State:
    return State(
        tuple(Burst(sent, recalls=p.recalls) for sent in p.sends), tuple(Lane() for _ in range(p.lanes)), announces=p.jobs, stops=p.stops
    )


# ---- what several steps do ------------------------------------------------------------------------------------------------------


def _burst(s: State, which: int, /, **changes: Any) -> State:
    bursts = s.bursts
    changed = Burst._make(_changed(bursts[which], BURST, changes))
    return State._make(((*bursts[:which], changed, *bursts[which + 1 :]), *s[1:]))


def _lane(s: State, which: int, /, **changes: Any) -> State:
    lanes = s.lanes
    changed = Lane._make(_changed(lanes[which], LANE, changes))
    return State._make((s.bursts, (*lanes[:which], changed, *lanes[which + 1 :]), *s[2:]))


BURST = {name: place for place, name in enumerate(Burst._fields)}
LANE = {name: place for place, name in enumerate(Lane._fields)}


def _changed(party: Iterable[Any], places: Mapping[str, int], changes: Mapping[str, Any]) -> list[Any]:
    """Do what `_replace` does, in half the time: a search makes some hundred thousand of them."""
    values = [*party]
    for name, value in changes.items():
        values[places[name]] = value
    return values


def _wake_one(s: State) -> State:
    return s._replace(signal=True) if s.sleeping else s


def _enqueue(s: State, b: int) -> State:
    if s.bursts[b].queued:
        return s
    if b in s.ready:
        return s._replace(wrong="a burst stands in `ready` twice")
    return _burst(s, b, queued=True)._replace(ready=(*s.ready, b))


def _collect(s: State, found: Iterator[int]) -> State:
    for b in found:
        s = _enqueue(s, b) if s.bursts[b].lent else s
    return s


def _note(p: Protocol, s: State, b: int, number: int) -> State:
    """A request is over."""
    if number:
        return s
    s = _burst(s, b, over=True)
    for other, burst in enumerate(s.bursts):
        if burst.waits and not b and p.notes:
            s = _burst(s, other, waits=False)
            if burst.lent:
                s = _enqueue(s, other)
                s = s._replace(signal=True) if s.sleeping or s.looking else s
    return s


def _tell_returned(s: State, b: int) -> State:
    burst = s.bursts[b]
    if burst.task_at != "lent":
        return s._replace(wrong=f"`returned` was called at {burst.task_at}")
    return _burst(s, b, task_at="back")


def _give_back(p: Protocol, s: State, b: int) -> State:
    if not s.bursts[b].lent:
        return s
    if p.unqueues:
        s = _burst(s, b, queued=False)._replace(ready=tuple(other for other in s.ready if other != b))
    return _tell_returned(_burst(s, b, lent=False, event=False), b)


# ---- the parties without lanes --------------------------------------------------------------------------------------------------


def _app_steps(s: State) -> Iterator[tuple[str, State]]:
    for b, burst in enumerate(s.bursts):
        if burst.app_at == "W1" and burst.to_send:
            sent = _burst(s, b, queue=burst.queue + burst.to_send[0], to_send=burst.to_send[1:], app_at="W3")
            yield f"app {b} commits {burst.to_send[0]}", sent
        elif burst.app_at == "W3":
            yield f"app {b}: armed is {burst.armed}", _burst(s, b, armed=False, app_at="W4" if burst.armed else "W1")
        elif burst.app_at == "W4":
            yield f"app {b} signals", _burst(s, b, event=burst.lent, app_at="W1")


def _loop_steps(p: Protocol, s: State) -> Iterator[tuple[str, State]]:
    for b, burst in enumerate(s.bursts):
        if burst.task_at == "back" and burst.queue[:1] != "u":
            yield f"task {b} has nothing to serve", _burst(s, b, task_at="lend")
        elif burst.task_at == "back" and burst.running:
            yield f"task {b} waits for the runs", _burst(s, b, task_at="waits")
        elif burst.task_at in ("back", "idle"):
            served = s._replace(wrong="the task served a packet beside a run") if burst.running else s
            served = _burst(served, b, queue=burst.queue[1:], taken=burst.taken + 1, task_at="lend")
            yield f"task {b} serves a packet", _note(p, served, b, burst.taken)
        elif burst.task_at == "lend" and s.stopped:
            yield f"task {b} goes on without lanes", _burst(s, b, task_at="alone")
        elif burst.task_at == "lend":
            lent = _burst(s, b, lent=True, task_at="lent")
            lent = _enqueue(lent, b) if p.enqueues_at_lend else lent
            yield f"task {b} lends", _wake_one(lent) if p.wakes_at_lend else lent
        elif burst.task_at == "lent" and burst.recalls:
            yield f"task {b} recalls", _give_back(p, _burst(s, b, recalls=burst.recalls - 1), b)
    if s.announces and not s.stopped:
        yield "a job", _wake_one(s._replace(announces=s.announces - 1, job_queue=s.job_queue + 1, jobs=s.jobs + 1))
    if s.stops and not s.stopped:
        stopped = s._replace(stopped=True)
        for b in range(len(s.bursts)):
            stopped = _give_back(p, stopped, b)
        yield "stop", _wake_one(stopped)


# ---- a lane ---------------------------------------------------------------------------------------------------------------------


def _top(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    lane = s.lanes[n]
    if s.stopped or (s.jobs and not lane.after_job):
        s = _enqueue(s, lane.last) if lane.last >= 0 else s
        s = s._replace(jobs=max(0, s.jobs - 1))
        if s.stopped or (p.wakes_for_more and (s.jobs or s.ready)):
            s = _wake_one(s)
        yield "takes a job", _lane(s, n, at="pop", last=-1, after_job=True)._replace(gil=-1)
    elif p.checks_jobs_last:
        yield "has no job", _lane(s, n, at="choose")
    else:
        yield "has no job, and drops a burst", _lane(s, n, at="choose")._replace(gil=-1)


def _choose(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    lane = s.lanes[n]
    lent = [b for b, burst in enumerate(s.bursts) if burst.lent]
    if lane.last >= 0 and s.bursts[lane.last].lent and len(lent) == 1 and not s.bursts[lane.last].queued:
        yield "looks again", _lane(s, n, at="take", burst=lane.last, last=-1)
        return
    if len(lent) > (0 if lane.after_job else 1):
        found = [b for b in lent if s.bursts[b].event]
        for b in found:
            s = _burst(s, b, event=False)
        s = _collect(s._replace(signal=False), iter(found))
    s = _enqueue(s, lane.last) if lane.last >= 0 and s.bursts[lane.last].lent else s
    if s.ready:
        b, rest = s.ready[0], s.ready[1:]
        s = _burst(s, b, queued=False)._replace(ready=rest)
        if not s.bursts[b].lent:
            s = s._replace(wrong="a burst that is not lent stands in `ready`")
        s = _wake_one(s) if (rest and p.wakes_for_more) or (s.jobs and p.wakes_for_jobs) else s
        yield f"chooses {b}", _lane(s, n, at="take", burst=b, last=-1)
    elif lane.after_job:
        yield "has nothing but jobs", _lane(s, n, at="top", last=-1, after_job=False)
    else:
        s = s._replace(sleeping=s.sleeping + 1) if p.counts_sleep_first else s
        yield "sleeps", _lane(s, n, at="asleep" if p.counts_sleep_first else "dozes", last=-1)._replace(gil=-1)


def _is_later(p: Protocol, burst: Burst) -> bool:
    """Whether a lane that runs a request of this burst must end that run first."""
    first = burst.running[0] if burst.running else burst.taken
    return burst.exclusive or burst.taken - first >= p.ahead or (burst.queue[:1] == "s" and bool(burst.running))


def _take(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    b = s.lanes[n].burst
    burst = s.bursts[b]
    if _is_later(p, burst):
        yield "leaves it to the lane that runs it", _lane(s, n, at="top", burst=-1)
    elif burst.queue[:1] == "w" and not s.bursts[0].over:
        yield "leaves it until burst 0 goes on", _lane(_burst(s, b, waits=True), n, at="top", burst=-1)
    elif not burst.queue:
        yield "finds nothing", _lane(s, n, at="idle")
    elif burst.queue[0] == "u":
        yield "gives it back", _lane(_give_back(p, s, b), n, at="top", burst=-1)
    else:
        alone = burst.queue[0] == "s"
        taken = _burst(
            s, b, queue=burst.queue[1:], running=(*burst.running, burst.taken), taken=burst.taken + 1, exclusive=alone, armed=burst.armed
        )
        shares = p.shares and p.lanes > 1 and not alone
        taken = _lane(
            taken,
            n,
            number=burst.taken,
            exclusive=alone,
            kind=burst.queue[0].replace("w", "k"),
            at="arm" if shares else "run",
            then="run" if shares else "",
        )
        yield f"takes {burst.queue[0]}", taken if shares else taken._replace(gil=-1)


def _idle(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    lane, b = s.lanes[n], s.lanes[n].burst
    if p.looks and not lane.looked and not s.looking and not s.jobs:
        looked = _lane(s, n, looked=True)
        if sum(burst.lent for burst in s.bursts) == 1:
            yield "looks", _lane(looked, n, at="looks")._replace(looking=True, gil=-1)
        else:
            yield "looks, and polls for the others", _lane(looked, n, at="polls")._replace(looking=True, gil=-1)
    if p.arms_when_empty:
        yield "arms", _lane(s, n, at="arm", then="top")
    else:
        yield "does not arm", _lane(s, n, at="top", burst=-1)
    assert b >= 0


def _arm(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    lane = s.lanes[n]
    burst = s.bursts[lane.burst]
    if not burst.lent:
        yield "need not arm", _armed(s, n)
    elif lane.at == "arm":
        yield "S1", _lane(_burst(s, lane.burst, armed=True), n, at="armed")
    elif not burst.queue:
        yield "S3 nothing", _armed(s, n)
    else:
        s = _burst(s, lane.burst, armed=False)
        s = _enqueue(s, lane.burst) if p.keeps_what_came else s
        if lane.then == "run":
            s = _wake_one(s) if p.wakes_to_share else s
        yield "S3 it has come", _armed(s, n, there=True)


def _armed(s: State, n: int, *, there: bool = False) -> State:
    then = s.lanes[n].then
    if then == "run":
        return _lane(s, n, at="run", then="")._replace(gil=-1)
    return _lane(s, n, at="top", then="", burst=-1)


def _answer(p: Protocol, s: State, b: int, ended: int) -> State:
    burst = s.bursts[b]
    left = tuple(number for number in burst.running if number != ended)
    armed = burst.armed and not (p.lanes > 1 and burst.lent)  # this lane looks, so no other one need be woken
    s = _note(p, _burst(s, b, running=left, exclusive=False, armed=armed), b, ended)
    if not s.bursts[b].running and s.bursts[b].task_at == "waits" and p.tells_when_idle:
        s = _burst(s, b, task_at="idle")
    return s


def _finish(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    lane, b = s.lanes[n], s.lanes[n].burst
    if lane.exclusive and len(s.bursts[b].running) > 1:
        s = s._replace(wrong="a request with device memory did not run alone")
    s = _answer(p, s, b, lane.number)
    for other, number in lane.joined:
        s = _answer(p, s, other, number)
        s = _enqueue(s, other) if s.bursts[other].lent and p.enqueues_joined else s
    last = b if s.bursts[b].lent and p.looks_again else -1
    yield f"answers {b}", _lane(s, n, at="top", burst=-1, last=last, number=0, exclusive=False, looked=False, kind="", joined=())


# ---- a lane that joins requests to the one that it has ---------------------------------------------------------------------------


def _begin_join(s: State, n: int) -> State:
    lane = s.lanes[n]
    s = _enqueue(s, lane.burst) if s.bursts[lane.burst].lent else s
    return _lane(_collect_all(s), n, at="join", misses=0)


def _collect_all(s: State) -> State:
    if sum(burst.lent for burst in s.bursts) <= 1:
        return s
    found = [b for b, burst in enumerate(s.bursts) if burst.lent and burst.event]
    for b in found:
        s = _burst(s, b, event=False)
    return _collect(s._replace(signal=False), iter(found))


def _join(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    lane = s.lanes[n]
    if len(lane.joined) >= p.joins or lane.misses >= len(s.ready):
        yield "has joined what there is", _lane(s, n, at="joined")
        return
    b, rest = s.ready[0], s.ready[1:]
    burst = s.bursts[b]
    s = _burst(s, b, queued=False)._replace(ready=rest)
    kept, missed = _kept_in_join(p, s, b), _lane(s, n, misses=lane.misses + 1)
    if _is_later(p, burst) or (burst.queue and burst.queue[0] not in f"u{lane.kind}w"):
        yield f"leaves {b}", _kept_in_join(p, missed, b)
    elif burst.queue[:1] == "w" and (not s.bursts[0].over or lane.kind != "k"):
        waiting = missed if s.bursts[0].over else _burst(missed, b, waits=True)
        yield f"leaves {b} until burst 0 goes on", _kept_in_join(p, waiting, b)
    elif not burst.queue and (b == lane.burst or not p.arms_in_join):
        yield f"finds nothing in {b}", s
    elif not burst.queue:
        yield f"arms {b}", _lane(_burst(s, b, armed=burst.armed or burst.lent), n, at="join_armed", event=b)
    elif burst.queue[0] == "u":
        yield f"gives {b} back", _give_back(p, s, b)
    else:
        running, joined = (*burst.running, burst.taken), (*lane.joined, (b, burst.taken))
        taken = _burst(kept, b, queue=burst.queue[1:], running=running, taken=burst.taken + 1)
        yield f"joins {burst.queue[0]} of {b}", _lane(taken, n, joined=joined, misses=0)


def _kept_in_join(p: Protocol, s: State, b: int) -> State:
    return _enqueue(s, b) if s.bursts[b].lent and p.keeps_in_join else s


def _join_armed(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    lane = s.lanes[n]
    b = lane.event
    s = _lane(s, n, at="join", event=-1)
    if s.bursts[b].lent and s.bursts[b].queue:
        s = _lane(_burst(s, b, armed=False), n, misses=lane.misses + 1)
        yield "S3 it has come", _enqueue(s, b) if p.keeps_what_came else s
    else:
        yield "S3 nothing", s


def _joined(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    lane = s.lanes[n]
    all_wait = all(burst.running or not burst.lent for burst in s.bursts)
    yield "joins no more", _lane(s, n, at="joined_run")._replace(gil=-1)
    if len(lane.joined) < p.joins and not s.jobs and not s.stopped and not all_wait:
        yield "waits for more", _lane(s, n, at="join_waits")._replace(sleeping=s.sleeping + 1, gil=-1)


WITH_GIL = {
    "top": _top,
    "choose": _choose,
    "take": _take,
    "idle": _idle,
    "arm": _arm,
    "armed": _arm,
    "run": _finish,
    "join": _join,
    "join_armed": _join_armed,
    "joined": _joined,
    "joined_run": _finish,
}


def _without_gil(s: State, n: int) -> Iterator[tuple[str, State]]:
    """The steps that a lane makes while it does not hold the GIL: waiting for epoll."""
    lane = s.lanes[n]
    if lane.at in ("asleep", "join_waits") or (lane.at == "polls" and lane.event < 0):
        awake = {"asleep": "awake", "join_waits": "join_awake", "polls": "polled"}[lane.at]
        if s.signal:
            yield "is signalled", _lane(s, n, at=awake)._replace(signal=False)
        for b, burst in enumerate(s.bursts):
            if burst.event:
                yield f"gets the event of {b}", _lane(_burst(s, b, event=False), n, at=awake, event=b)
        if lane.at in ("polls", "join_waits"):
            yield "looks no longer", _lane(s, n, at=awake)


def _lane_steps(p: Protocol, s: State, n: int) -> Iterator[tuple[str, State]]:
    lane = s.lanes[n]
    yield from _without_gil(s, n)
    if s.gil not in (-1, n) or lane.at in ("asleep", "polls", "join_waits", "ended"):
        return
    held = s._replace(gil=n)
    if lane.at == "run" and p.joins and not s.sleeping and not s.looking and lane.kind != "s":
        yield "joins", _begin_join(held, n)
    if (
        lane.at in ("run", "joined_run")
        and p.together
        and (s.announces or s.job_queue or any(burst.to_send or burst.queue for burst in s.bursts))
    ):
        return
    if lane.at in WITH_GIL:
        yield from WITH_GIL[lane.at](p, held, n)
    elif lane.at == "dozes":
        yield "counts its sleep", _lane(s, n, at="asleep")._replace(sleeping=s.sleeping + 1)
    elif lane.at in ("awake", "polled"):
        slept = lane.at == "awake"
        held = _collect(held._replace(sleeping=s.sleeping - slept, looking=s.looking and slept), iter([lane.event] * (lane.event >= 0)))
        if not slept and s.bursts[lane.burst].lent:
            held = _enqueue(held, lane.burst)
        yield "goes on", _lane(held, n, at="top", event=-1, burst=-1)
    elif lane.at == "join_awake":
        held = _collect(held._replace(sleeping=s.sleeping - 1), iter([lane.event] * (lane.event >= 0)))
        yield "looks for more", _lane(_collect_all(_lane(held, n, event=-1)), n, at="join", misses=0)
    elif lane.at == "looks":
        held = _enqueue(held, lane.burst) if s.bursts[lane.burst].lent else held
        yield "has looked", _lane(held._replace(looking=False), n, at="top", burst=-1)
    elif lane.at == "pop" and s.job_queue:
        yield "begins a job", _lane(s._replace(job_queue=s.job_queue - 1), n, at="job")
    elif lane.at == "pop":
        yield "finds no job", _lane(s, n, at="ended" if s.stopped else "top", looked=False)
    elif lane.at == "job":
        yield "ends a job", _lane(s, n, at="top", looked=False)


def _steps(p: Protocol, s: State) -> list[tuple[str, State]]:
    if s.wrong:
        return []
    steps = list(_app_steps(s))
    if s.gil < 0:
        steps += _loop_steps(p, s)
    for n in range(len(s.lanes)):
        steps += [(f"lane {n} {name}", _in_order(following)) for name, following in _lane_steps(p, s, n)]
    return steps


def _in_order(s: State) -> State:
    """Two lanes are alike, so one of the two states that differ by their numbers stands for both. On a way the numbers may change."""
    if len(s.lanes) < 2 or s.lanes[0] <= s.lanes[1]:
        return s
    return s._replace(lanes=s.lanes[::-1], gil=s.gil if s.gil < 0 else 1 - s.gil)


def _nothing_is_owed(s: State) -> bool:
    if s.wrong or s.job_queue:
        return False
    if s.stopped:
        return all(lane.at == "ended" for lane in s.lanes) and all(burst.task_at == "alone" for burst in s.bursts)
    return all(not burst.queue and not burst.running and burst.lent for burst in s.bursts)


def search(p: Protocol) -> tuple[list[str] | None, int]:
    """The way to a fault, or None; and how many states were seen."""
    return explore(start(p), lambda s: _steps(p, s), _nothing_is_owed)
