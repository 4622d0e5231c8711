"""The pages of figures say what the figures say, and each way of the bench still runs and computes the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bench import versus, versus_pages
from tests.bench.starts_processes import WorkerError, descendants
from tests.bench.versus import TASKS, Figures, Task, run
from tests.bench.versus_pages import FIGURES, PAGES, PICTURES, ROWS, filled, following, interval, lost_part, outside, picture, size
from tests.leaks import left_running

WRITE = "write pages and pictures with `python -m tests.bench versus --write`"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return kept


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_the_figures_say(page: Path, found: dict[str, Any]) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text, found) == text, WRITE


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_picture_shows_what_the_figures_say(row: versus_pages.Row, found: dict[str, Any]) -> None:
    content = (PICTURES / row.picture).read_text(encoding="utf-8")
    assert content == picture(row, found), WRITE
    assert any(row.picture in page.read_text(encoding="utf-8") for page in PAGES)


def test_a_row_is_lost_if_another_way_was_better_in_each_round(found: dict[str, Any]) -> None:
    lanes = {"aionn": [200.0, 220.0], "direct": [100.0, 110.0], "to_thread": [190.0, 230.0], "Ray Serve": [900.0, None]}
    lines = lost_part({"rows": {row.name: {versus_pages.ours(row): [1.0]} for row in ROWS} | {"one, p50": lanes}}).splitlines()
    assert lines[2:] == ["| A frame of Silero VAD, one stream | direct 2.00 (1.90 to 2.10) |"]


def test_an_interval_grows_with_the_scatter_of_the_rounds() -> None:
    assert interval([2.0, 2.0, 2.0]) == pytest.approx((2.0 / 1.05, 2.0 * 1.05))
    assert interval([0.8, 1.0, 1.8]) == pytest.approx((0.8 / 1.5, 1.8 * 1.5))


def test_a_ratio_outside_of_its_interval_is_named() -> None:
    def run_with(one: float) -> dict[str, Any]:
        return {"rows": {row.name: {versus_pages.ours(row): [200.0], "direct": [one]} for row in ROWS}}

    *lines, last = outside(run_with(100.0), run_with(102.0))
    assert (lines, last) == ([], "11 of 11 ratios lie within the interval that the page states")
    first, *_, last = outside(run_with(100.0), run_with(50.0))
    assert first == "A frame of Silero VAD, one stream: aionn / direct is 4.00, and was 2.00 (1.90 to 2.10)"
    assert last == "0 of 11 ratios lie within the interval that the page states"
    assert len(outside(run_with(100.0), run_with(200.0))) == 12


def test_earlier_runs_count_for_the_intervals_and_four_runs_are_kept() -> None:
    def run_with(one: float) -> dict[str, Any]:
        return {"date": f"day {one}", "rows": {row.name: {versus_pages.ours(row): [200.0], "direct": [one]} for row in ROWS}}

    kept = following(run_with(100.0), run_with(50.0))
    assert len(outside(kept, run_with(60.0))) == 1, "3.33 lies between 2 and 4"
    assert len(outside(run_with(100.0), run_with(60.0))) == 12
    assert outside(kept, run_with(40.0))[0].endswith("is 5.00, and was 2.00 (1.90 to 4.20)")
    for one in (60.0, 70.0, 80.0):
        kept = following(run_with(one), kept)
    assert [run["date"] for run in (kept, *kept["before"])] == ["day 80.0", "day 70.0", "day 60.0", "day 100.0"]
    assert not any("before" in run for run in kept["before"])


def test_a_figure_has_the_unit_that_fits() -> None:
    assert [size(999.4, "us"), size(1234, "us"), size(0.25, "ms"), size(25_000, "ms"), size(81.4, "MB")] == [
        "999 us",
        "1.23 ms",
        "250 us",
        "25.0 s",
        "81 MB",
    ]


def test_a_way_whose_package_is_missing_is_left_out_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versus, "TASKS", ())
    monkeypatch.setattr(versus, "large", lambda figures, say: None)
    monkeypatch.setitem(versus.PACKAGES, "iceoryx2", ("no_such_package",))
    said: list[str] = []
    kept = versus.measure(1, ["direct", "iceoryx2"], said.append)
    assert said[0] == "iceoryx2 is left out, because no_such_package is not installed; `pip install -e '.[bench]'` brings it"
    assert kept["rows"] == {}


@pytest.mark.parametrize("way", ["direct", "to_thread", "process pool", "shared memory", "iceoryx2", "LitServe", "aionn"])
def test_a_way_runs_and_goes_on_after_a_death(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a death is noticed, the next answer is right. Two streams run beside each other where a way has its own code for them."""
    if not versus.installed(way):
        pytest.skip("its package is only in the extra `bench`")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    figures = Figures(1)
    tasks = {"one": 1, "two": 2} if way in ("shared memory", "aionn") else {"one": 1}
    for name, streams in tasks.items():
        figures.check(name, "direct", 0.00389)
        run(figures, Task(name, (way,), streams, 100, 2), way, 0, str(tmp_path / "cache"))
    assert left_running("XDG_STATE_HOME", str(tmp_path / "state")) == []
    rows = {f"{name}, {figure}" for name in tasks for figure in ("p50", "p99", "cpu")} | {"start", "memory"}
    assert figures.rows.keys() == rows | ({"death"} if way in versus.MORTAL else set())
    assert all(figure is not None and figure > 0 for lanes in figures.rows.values() for figure in lanes[way])


def test_another_answer_than_that_of_the_other_ways_ends_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of this way does not end with its app. Its semaphores are files that would outlive it."""
    semaphores: set[str] = set()

    def noted(pid: int) -> list[int]:
        pids = descendants(pid)
        for each in (pid, *pids):
            semaphores.update(re.findall(r"/dev/shm/sem\.\S+", Path(f"/proc/{each}/maps").read_text()))
        return pids

    monkeypatch.setattr(versus, "descendants", noted)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    figures = Figures(1, checksums={"one": 1.0})
    with pytest.raises(WorkerError, match=r"one, process pool: the sum of the outputs is 0\.003"):
        run(figures, TASKS[0], "process pool", None, str(tmp_path))
    assert left_running("XDG_STATE_HOME", str(tmp_path)) == []
    assert semaphores
    assert not [file for file in semaphores if Path(file).exists()]


def test_every_way_takes_part_in_the_first_task() -> None:
    assert set(TASKS[0].ways) == set(versus_pages.sections())
