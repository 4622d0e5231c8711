"""Each case of an async test runs on one of the two event loops, which its name decides, and on both where the loop is its subject."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_collection_modifyitems

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


def kept(collected: list[Any], both_loops: bool = False) -> list[str]:
    """Return the names of the items that run. The others must have been reported as deselected."""
    left_out: list[Any] = []
    config: Any = SimpleNamespace(
        getoption=lambda name: both_loops and name == "--both-loops",
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
    assert len(kept(items(("asyncio", "uvloop")), both_loops=True)) == 2 * len(CASES)


def test_tests_without_a_choice_of_loops_are_left_alone() -> None:
    plain = [SimpleNamespace(nodeid="tests/test_x.py::test_y", get_closest_marker=lambda name: None)]
    assert kept(plain) == ["tests/test_x.py::test_y"]
