"""The states of an execution, and which act leads from one to another. No I/O, no loop and no memory is needed to follow them.

    WAITING    for its turn, a driver, a frame or device memory; it holds nothing
    PLACED     its arguments have their places, which it holds; no driver knows of it
    SENT       a driver may touch what it holds
    ANSWERED   the driver has answered, or never will; what it holds can be read
    LEFT       its caller has an outcome, and the driver may still touch what it holds
    SETTLED    its caller has an outcome; it holds nothing

An execution whose outputs had too little room is answered, and waits again (`WIDEN`). A started one keeps what it has placed, and is
placed again at once in a wider frame: the app may have changed its arguments since.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import NoReturn


class State(IntEnum):
    """Where an execution stands. A number, because the hash of other enumerations takes long."""

    WAITING = auto()
    PLACED = auto()
    SENT = auto()
    ANSWERED = auto()
    LEFT = auto()
    SETTLED = auto()


class Act(IntEnum):
    """What happens to an execution.

    `SETTLE` is its outcome for its caller: outputs, an error, a deadline or a cancellation. `PUT_BACK` gives back what was placed, because
    no frame was free, or a swap has begun.
    """

    PLACE = auto()
    PUT_BACK = auto()
    SEND = auto()
    ANSWER = auto()
    WIDEN = auto()
    SETTLE = auto()


WAITING, PLACED, SENT, ANSWERED, LEFT, SETTLED = State
PLACE, PUT_BACK, SEND, ANSWER, WIDEN, SETTLE = Act  # an execution names its acts often, and each look into an enumeration takes long

NEXT = {
    (WAITING, PLACE): PLACED,
    (WAITING, SETTLE): SETTLED,
    (PLACED, PUT_BACK): WAITING,
    (PLACED, SEND): SENT,
    (PLACED, SETTLE): SETTLED,
    (SENT, ANSWER): ANSWERED,
    (SENT, SETTLE): LEFT,
    (ANSWERED, WIDEN): WAITING,
    (ANSWERED, PLACE): PLACED,
    (ANSWERED, SETTLE): SETTLED,
    (LEFT, ANSWER): SETTLED,
}
"""The state after an act. What is missing here cannot happen."""

HOLDING = frozenset((PLACED, SENT, ANSWERED, LEFT))
"""In these states an execution holds its arguments. It gives them back when it leaves them."""


class _After(dict[tuple[State, Act], tuple[State, bool]]):
    def __missing__(self, now: tuple[State, Act]) -> NoReturn:
        raise RuntimeError(f"an execution that is {now[0].name} got {now[1].name}; this is a fault of aionn")


AFTER = _After({now: (following, now[0] in HOLDING and following not in HOLDING) for now, following in NEXT.items()})
"""The state after an act, and whether the execution gives its arguments back with it. An act that cannot happen raises `RuntimeError`."""
