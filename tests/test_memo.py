"""A memo never grows past its size, and forgets the oldest entry first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aionn.memo import Memo


def test_a_full_memo_forgets_its_oldest_entry() -> None:
    memo: Memo[str, int] = Memo(2)
    memo["a"], memo["b"] = 1, 2
    memo["a"] = 3  # an entry that is there costs none of the others
    assert memo == {"a": 3, "b": 2}
    memo["c"] = 4
    assert memo == {"b": 2, "c": 4}


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 6), st.integers())))
def test_a_memo_holds_the_last_keys_in_the_order_of_their_coming(most: int, assignments: list[tuple[int, int]]) -> None:
    memo: Memo[int, int] = Memo(most)
    expected: list[tuple[int, int]] = []
    for key, value in assignments:
        memo[key] = value
        if key in dict(expected):
            expected = [(known, value if known == key else old) for known, old in expected]
        else:
            expected = [*expected, (key, value)][-most:]
        assert list(memo.items()) == expected
