"""The states of an execution: what holds its arguments gives them back once, whatever happens and in whatever order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aionn.runtime.executing.transitions import AFTER, HOLDING, NEXT, Act, State


def lives(state: State = State.WAITING, acts: tuple[Act, ...] = (), most: int = 9) -> Iterator[tuple[Act, ...]]:
    """Every sequence of acts from the beginning to the end, with at most so many of them."""
    if state is State.SETTLED:
        yield acts
    elif len(acts) < most:
        for act in Act:
            if (state, act) in NEXT:
                yield from lives(NEXT[state, act], (*acts, act), most)


def test_each_life_gives_back_what_it_has_placed_as_often_as_it_has_placed_it() -> None:
    kinds = set()
    for acts in lives():
        state, held, given_back = State.WAITING, 0, 0
        for act in acts:
            placed = state not in HOLDING and act is Act.PLACE
            state, over = AFTER[state, act]
            held += placed - over
            given_back += over
            assert held == (state in HOLDING)
        assert held == 0
        kinds.add((given_back, acts.count(Act.SETTLE)))
        assert acts.count(Act.SETTLE) == 1  # one outcome for the caller
    assert (0, 1) in kinds  # refused before anything was placed
    assert (2, 1) in kinds  # placed twice: no frame was free, or there was too little room


def test_nothing_is_given_back_while_a_driver_may_touch_it() -> None:
    with_the_driver = (State.SENT, State.LEFT)
    for state in with_the_driver:
        for act in Act:
            if (state, act) in NEXT:
                following, over = AFTER[state, act]
                assert act is Act.ANSWER or (following in with_the_driver and not over)


def test_a_caller_that_leaves_leaves_its_arguments_with_the_driver_until_the_answer() -> None:
    assert AFTER[State.SENT, Act.SETTLE] == (State.LEFT, False)
    assert AFTER[State.LEFT, Act.ANSWER] == (State.SETTLED, True)
    assert AFTER[State.PLACED, Act.SETTLE] == (State.SETTLED, True)


def test_from_every_state_there_is_a_way_to_the_end() -> None:
    ends = {State.SETTLED}
    while more := {state for (state, _), following in NEXT.items() if following in ends} - ends:
        ends |= more
    assert ends == set(State)


@pytest.mark.parametrize("state", State)
def test_what_is_not_in_the_table_cannot_happen(state: State) -> None:
    for act in Act:
        if (state, act) not in NEXT:
            with pytest.raises(RuntimeError, match=f"{state.name} got {act.name}"):
                AFTER[state, act]
    assert (state is State.SETTLED) == all((state, act) not in NEXT for act in Act)
