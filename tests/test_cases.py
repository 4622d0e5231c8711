"""Each case of an async test runs on one of two event loops, and a test with several parameters in few of their combinations."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import hypothesis
import pytest

from tests.conftest import pytest_collection_modifyitems, turn_coverage_off

LOOPS: dict[str, Any] = {"asyncio": ("asyncio", {"use_uvloop": False}), "uvloop": ("asyncio", {"use_uvloop": True})}
CASES = [(f"tests/test_x.py::test_{number // 4}", number % 4) for number in range(400)]


def items(loops: tuple[str, ...], mark: str | None = None) -> list[Any]:
    """Return 100 tests with four cases each, on each of the loops, as pytest collects them."""
    return [
        SimpleNamespace(
            nodeid=f"{test}[{loop}-case{case}]",
            callspec=SimpleNamespace(
                params={"anyio_backend": LOOPS[loop], "case": case},
                # As pytest counts them: on through the cases of the first loop and of the second.
                indices={"anyio_backend": list(LOOPS).index(loop), "case": case + 4 * list(LOOPS).index(loop)},
            ),
            get_closest_marker=lambda name: name if name == mark else None,
        )
        for test, case in CASES
        for loop in loops
    ]


def kept(collected: list[Any], **options: Any) -> list[str]:
    """Return the names of the items that run. The others must have been reported as deselected."""
    left_out: list[Any] = []
    config: Any = SimpleNamespace(
        getoption=lambda name: options.get(name.strip("-").replace("-", "_")),
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    running = list(collected)
    pytest_collection_modifyitems(config, running)
    assert {item.nodeid for item in running} | {item.nodeid for item in left_out} == {item.nodeid for item in collected}
    return [item.nodeid for item in running]


def test_every_case_runs_once_and_each_loop_has_its_share() -> None:
    names = kept(items(("asyncio", "uvloop")))
    assert sorted(name.replace("asyncio", "uvloop") for name in names) == sorted(f"{test}[uvloop-case{case}]" for test, case in CASES)
    assert 150 < sum("uvloop" in name for name in names) < 250


def test_a_case_keeps_its_loop_in_every_selection() -> None:
    collected = items(("asyncio", "uvloop"))
    names = kept(collected)
    assert kept(collected[:2]) == names[:1]
    assert kept(collected[2:8]) == names[1:4]


def test_a_selection_of_one_loop_runs_all_on_that_loop() -> None:
    for loop in LOOPS:
        assert len(kept(items((loop,)))) == len(CASES)


def test_tests_of_the_loop_and_the_option_run_both() -> None:
    assert len(kept(items(("asyncio", "uvloop"), "both_loops"))) == 2 * len(CASES)
    assert len(kept(items(("asyncio", "uvloop")), every_case=True)) == 2 * len(CASES)


def test_tests_without_a_choice_of_loops_are_left_alone() -> None:
    plain = [SimpleNamespace(nodeid="tests/test_x.py::test_y", get_closest_marker=lambda name: None)]
    assert kept(plain) == ["tests/test_x.py::test_y"]


SIZES = {"device": 3, "way": 2, "kind": 4}


def product(loops: tuple[str, ...] = ("asyncio",), mark: str | None = None) -> list[Any]:
    """Return the cases of one test with three parameters, as pytest collects them."""
    return [
        SimpleNamespace(
            nodeid="tests/test_x.py::test_y[" + "-".join(map(str, (loop, *numbers))) + "]",
            callspec=SimpleNamespace(params={"anyio_backend": LOOPS[loop], **dict(zip(SIZES, numbers, strict=True))}),
            get_closest_marker=lambda name: name if name == mark else None,
            iter_markers=lambda name: (),
        )
        for loop in loops
        for numbers in itertools.product(*map(range, SIZES.values()))
    ]


def values_of(names: list[str]) -> set[tuple[str, str]]:
    return {pair for name in names for pair in zip(SIZES, name.partition("[")[2].strip("]").split("-")[1:], strict=True)}


def test_each_value_of_each_parameter_occurs_in_as_few_cases_as_the_longest_parameter_has_values() -> None:
    names = kept(product())
    assert len(names) == max(SIZES.values())
    assert values_of(names) == {(name, str(number)) for name, size in SIZES.items() for number in range(size)}


def test_all_combinations_run_where_they_are_asked_for() -> None:
    assert len(kept(product(mark="every_combination"))) == 24
    assert len(kept(product(), every_case=True)) == 24
    assert len(kept(product(), own_process=3)) == 24


def test_a_test_of_both_loops_has_each_value_on_each() -> None:
    names = kept(product(("asyncio", "uvloop"), mark="both_loops"))
    for loop in LOOPS:
        assert values_of([name for name in names if loop in name]) == values_of(kept(product()))


@pytest.mark.parametrize("size", [1, 3])
def test_one_parameter_keeps_all_its_values(size: int) -> None:
    one = [
        SimpleNamespace(nodeid=f"t[{n}]", callspec=SimpleNamespace(params={"a": n}), get_closest_marker=lambda name: None)
        for n in range(size)
    ]
    assert len(kept(one)) == size


@pytest.mark.parametrize(("rows", "number"), [([(1, 1), (1, 2), (2, 2)], 3), ([(1, 1), (1, 2), (2, 1), (2, 2)], 2)])
def test_a_list_of_cases_runs_whole_unless_it_is_a_product(rows: list[tuple[int, int]], number: int) -> None:
    """The second row of the list has no value that the others lack."""
    mark = pytest.mark.parametrize(("a", "b"), rows).mark
    cases = [
        SimpleNamespace(
            nodeid=f"t[{a}-{b}]",
            callspec=SimpleNamespace(params={"a": a, "b": b}),
            get_closest_marker=lambda name: None,
            iter_markers=lambda name: (mark,),
        )
        for a, b in rows
    ]
    assert len(kept(cases)) == number


def test_coverage_looks_at_no_test_of_hypothesis() -> None:
    @hypothesis.given(hypothesis.strategies.none())
    def made(value: None) -> None: ...

    marks: dict[Any, list[pytest.MarkDecorator]] = {made: [], test_a_case_keeps_its_loop_in_every_selection: []}
    turn_coverage_off([cast(pytest.Item, SimpleNamespace(obj=test, add_marker=marks[test].append)) for test in marks])
    assert list(marks.values()) == [[pytest.mark.no_cover], []]
