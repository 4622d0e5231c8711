"""Random graphs give on every path what plain ONNX Runtime gives. See `tests.random_graphs`.

A refusal is right at `compile` only, by one clear sentence. A run that fails, an error of another library and a wrong output fail the
test. Each failure names its seed; `python -m tests.engines.test_random_graphs SEED` prints the graph and what happens.
"""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import aionn
from aionn.errors import CompilationError
from tests.engines.split_engines import LEFT, RIGHT
from tests.random_graphs import BLOCKS, NUMBERS, Case, difference, drawn

pytestmark = [pytest.mark.anyio]
SEED = 26
FEATURES = (
    *("0-d", "empty axes", "open dimensions", "open rank", "weights", "external data", "functions", "foreign operators"),
    *("defaults", "strings", "string defaults", "strings inside", "sequences", "sequence inputs", "sequence outputs", "If", "Loop", "Scan"),
    *(kind.value for kind in NUMBERS.values()),
)
PATHS = ("miss", "compute", "burst", "start", "map", "hit", "jit", "cut", "cut Scan", "cut If", "cut Loop")


class Judge:
    """Runs cases over every path. Attributes: `seen` counts features and paths; `wrong` has what failed, with its seed."""

    def __init__(self, runtime: aionn.Runtime, folder: Path) -> None:
        self._runtime, self._folder = runtime, folder
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def case(self, seed: int) -> Case:
        case, wanted = drawn(seed, list(BLOCKS)[seed % len(BLOCKS)])
        self.seen.update(case.features)
        path = case.save(self._folder / str(seed))
        cache = self._folder / f"{seed} cache"
        paths: dict[str, dict[str, Any]] = {
            "miss": {"devices": ("onnxruntime",), "cache_dir": cache},
            "hit": {"devices": ("onnxruntime",), "cache_dir": cache},
            "jit": {"devices": ("onnxruntime",), "mode": "jit"},
            "cut": {"devices": (LEFT, RIGHT)},
        }
        for name, options in paths.items():
            try:
                await self._path(case, wanted, path, name, options)
            except Exception as error:  # any error is a finding
                self.wrong.append(f"seed {seed}, {name}: {type(error).__name__}: {error}")
        return case

    async def _path(self, case: Case, wanted: list[dict[str, Any]], path: Path, name: str, options: Mapping[str, Any]) -> None:
        try:
            compilation = await self._runtime.compile(await self._runtime.load(path), **options)
        except CompilationError as error:
            may_refuse = case.lacking or (name == "cut" and (error.node or case.values))
            if not may_refuse or not error.reason:
                raise
            self.seen[f"{name} refused"] += 1
            return
        async with compilation:
            if name in ("miss", "hit"):
                kinds = {outcome.kind.value for outcome in compilation.outcomes}
                assert kinds == {name}, compilation.outcomes
            if name == "cut":
                if len(compilation.plan) < 2:
                    return
                inside = {node.partition(" ")[2].rstrip("0123456789") for step in compilation.plan for node in step.nodes}
                self.seen.update(f"cut {kind}" for kind in inside & {"Scan", "If", "Loop"})
            self.seen[name] += 1
            try:
                made = [await compilation.compute(feed) for feed in case.feeds]
            except CompilationError:
                if name != "jit" or not case.lacking:
                    raise
                self.seen[f"{name} refused"] += 1  # this mode compiles at the first execution
                return
            self._compare(case, f"{name}, compute", made, wanted)
            self.seen["compute"] += 1
            if not case.values and name != "jit":
                await self._streams(case, name, compilation, wanted)

    async def _streams(self, case: Case, name: str, compilation: aionn.Compilation, wanted: list[dict[str, Any]]) -> None:
        self._compare(case, f"{name}, start", [await compilation.start(feed) for feed in case.feeds], wanted)
        async with compilation.burst() as burst:
            for _ in range(2):
                self._compare(case, f"{name}, burst", [await burst.compute(feed) for feed in case.feeds], wanted)
            mapped = [dict(result.outputs) async for result in burst.map(case.feeds, policy="block")]
            self._compare(case, f"{name}, map", mapped, wanted)
        self.seen.update(("start", "burst", "map"))

    def _compare(self, case: Case, path: str, made: list[Any], wanted: list[dict[str, Any]]) -> None:
        for turn, (outputs, right) in enumerate(zip(made, wanted, strict=True)):
            if outputs.keys() != right.keys():
                self.wrong.append(f"seed {case.seed}, {path}: outputs {list(outputs)} in place of {list(right)}")
                continue
            for output, value in right.items():
                if found := difference(outputs[output], value):
                    self.wrong.append(f"seed {case.seed}, {path}, inputs {turn}, output {output!r}: {found}")


async def judged(seeds: list[int], folder: Path) -> Judge:
    async with aionn.Runtime() as runtime:
        judge = Judge(runtime, folder)
        for seed in seeds:
            await judge.case(seed)
    return judge


def check(judge: Judge, graphs: int) -> None:
    """Nothing was wrong, and every feature and every path occurred."""
    print(dict(judge.seen))
    assert judge.wrong == []
    assert [name for name in (*FEATURES, *PATHS) if not judge.seen[name]] == []
    assert judge.seen["miss"] + judge.seen["miss refused"] == graphs
    assert judge.seen["cut"] >= graphs / 2


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.timeout(300)  # 20 s on two free cores
async def test_random_graphs_give_what_plain_onnxruntime_gives(tmp_path: Path) -> None:
    seeds = list(range(SEED * 1000, SEED * 1000 + 50))
    check(await judged(seeds, tmp_path), len(seeds))


@pytest.mark.soak
async def test_many_random_graphs_of_a_new_seed_give_what_plain_onnxruntime_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = secrets.randbelow(2**40)
    with capsys.disabled():
        print(f"\nrandom graphs of the seeds {first} to {first + 499}")
    check(await judged(list(range(first, first + 500)), tmp_path), 500)


if __name__ == "__main__":
    import anyio

    with TemporaryDirectory() as place:
        found = anyio.run(judged, [int(seed) for seed in sys.argv[1:]], Path(place))
    for number in map(int, sys.argv[1:]):
        print(drawn(number, list(BLOCKS)[number % len(BLOCKS)])[0].print())
    print(*found.wrong, sep="\n")
