"""The faults of `tests/mutations.py`: each kind changes what it says, a mark changes nothing, and equal code gives an equal draw."""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from typing import Any

import pytest

from tests import mutations
from tests.mutations import Place, Places, drawn, faulty, marked, numbered, places_of

SOURCE = '''
"""A module whose constants are left alone, ä."""
LEFT_ALONE = 3

class Made:
    default: int = 4

    def __init__(self) -> None:
        self.found = 0

    def add(self, one: int, other: int = 5) -> int:
        """Return a sum."""
        self.found += 1
        one = max(one, one)
        if one < 7 and other:
            raise ValueError(f"ä {one + 1}")
        try:
            return min(one, other) + 2
        except KeyError:
            raise
        except TypeError:
            return -1
        finally:
            self.found = True
'''

FAULTS = {
    ("removed statement", "self.found += 1", ""),
    ("removed statement", "raise", ""),
    ("removed statement", 'raise ValueError(f"ä {one + 1}")', ""),
    ("removed statement", "self.found = True", ""),
    ("negated condition", "one < 7 and other", "not (one < 7 and other)"),
    ("changed comparison", "one < 7", "(one) <= (7)"),
    ("and for or", "one < 7 and other", "(one < 7) or (other)"),
    ("swapped arguments", "min(one, other)", "min(other, one)"),
    ("changed arithmetic", "min(one, other) + 2", "(min(one, other)) - (2)"),
    ("off by one", "0", "1"),
    ("off by one", "1", "2"),
    ("off by one", "7", "8"),
    ("off by one", "2", "3"),
    ("changed constant", "True", "False"),
    ("removed handler", "return -1", "raise"),
    ("removed finally", "self.found = True", ""),
}


def run(source: str, ran: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(builtins, mutations.RAN, ran.append, raising=False)
    names: dict[str, Any] = {}
    exec(compile(source, "made.py", "exec"), names)
    return names["Made"]()


def test_each_kind_of_fault_is_found_and_is_python() -> None:
    places = Places("made.py", SOURCE).found
    assert {(place.kind, place.old, place.new) for place in places} == FAULTS
    for place in places:
        text = faulty(SOURCE, place)
        ast.parse(text)
        assert text.count(f"{mutations.RAN}(0)") == 1


def test_marks_change_nothing_and_say_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    places = dict(enumerate(Places("made.py", SOURCE).found))
    ran: list[int] = []
    made = run(marked(SOURCE, places), ran, monkeypatch)
    assert (made.add(9, 4), made.found) == (6, True)
    assert {places[number].kind for number in ran} == {kind for kind, _, _ in FAULTS} - {"removed handler"}
    assert not any(places[number].old.startswith("raise") for number in ran)
    with pytest.raises(ValueError, match="ä 4"):
        made.add(3)
    assert any(places[number].old.startswith("raise") for number in ran)


def test_a_fault_says_that_it_ran_before_it_does_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    (place,) = (one for one in Places("made.py", SOURCE).found if one.kind == "changed arithmetic")
    ran: list[int] = []
    made = run(faulty(SOURCE, place), ran, monkeypatch)
    assert ran == []
    assert made.add(9, 4) == 2
    assert ran == [0]


@pytest.fixture(scope="module")
def places() -> list[Place]:
    """All places of the package, equivalent faults included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutations, "EQUIVALENT", {})
        return places_of(mutations.ROOT)


def test_all_rooms_are_drawn_from_and_a_seed_gives_the_same_again(places: list[Place]) -> None:
    one = drawn(places, 1, 60)
    assert one == drawn(places, 1, 60) != drawn(places, 2, 60)
    assert {place.room for place in one} == {place.room for place in places}
    assert max(Counter(place.room for place in one).values()) <= 3
    for place in one:
        ast.parse(faulty((mutations.ROOT / place.file).read_text(encoding="utf-8"), place))


def test_a_change_elsewhere_leaves_a_draw_as_it_is() -> None:
    changed = SOURCE.replace("LEFT_ALONE = 3", "\n\ndef other() -> int:\n    return 0 + 1")
    before, after = (numbered(Places("aionn/made.py", source).found) for source in (SOURCE, changed))
    first, second = ([place.key for place in drawn(one, 1, 30)] for one in (before, after))
    assert first == [key for key in second if key[1] != "other"] != second


@pytest.mark.parametrize("fault", mutations.KNOWN, ids=lambda fault: fault.what)
def test_a_known_fault_has_its_place_in_the_code(fault: mutations.Known) -> None:
    assert (mutations.ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (mutations.ROOT / file).read_text(encoding="utf-8")


def test_an_equivalent_fault_still_exists(places: list[Place]) -> None:
    assert mutations.EQUIVALENT.keys() <= {place.key for place in places}
