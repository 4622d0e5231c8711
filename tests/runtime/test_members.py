"""A swap is a two-phase commit over the members of a compilation: all changes are committed, or all are released."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

import aionn
from aionn.hal.model import PooledModel
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.serving.serving import CompiledModel, NotNowError, Serving

pytestmark = pytest.mark.anyio


class Recorded:
    """A member, and its change, that note what was asked of them.

    Attributes:
        fails: the step that raises. at_prepare: called while a change is prepared.
    """

    def __init__(self, log: list[str], name: str, *, needs_gap: bool = False, fails: str = "") -> None:
        self.log, self.name, self.needs_gap, self.fails = log, name, needs_gap, fails
        self.at_prepare: Any = lambda: None

    def _note(self, step: str) -> None:
        self.log.append(f"{self.name} {step}")
        if step == self.fails:
            raise NotNowError(f"{self.name} was used")

    async def prepare(self, better: Serving) -> Recorded:
        self._note("prepare")
        self.at_prepare()
        return self

    def rest(self) -> None:
        """In use, always."""

    async def wait_idle(self) -> None: ...

    def count_from_now(self) -> None: ...

    def end(self) -> None: ...

    def check(self) -> None:
        self._note("check")

    def commit(self) -> None:
        self._note("commit")

    async def release_old(self) -> None:
        self._note("release_old")

    def release_new(self) -> None:
        self._note("release_new")


def serving(compiled: CompiledModel, name: str) -> Serving:
    async def aclose() -> None: ...

    device = SimpleNamespace(name=name, connection=SimpleNamespace(ended_by=None))
    prepared = SimpleNamespace(device=device, aclose=aclose)
    return Serving(cast(RemotePreparedModel, prepared), cast(PooledModel, None), compiled.use)


async def test_each_gap_is_one_that_comes_after_it_was_waited_for() -> None:
    async with anyio.create_task_group() as tasks:
        found, gaps = serving(CompiledModel(tasks), "quick"), list[str]()

        async def wait(name: str) -> None:
            await found.next_gap()
            gaps.append(name)

        for names in (["first", "beside it"], ["second"]):
            found.enter()
            for name in names:
                tasks.start_soon(wait, name)
            await anyio.wait_all_tasks_blocked()
            gaps.append("left")
            found.leave()
            await anyio.wait_all_tasks_blocked()
        assert gaps == ["left", "first", "beside it", "left", "second"]


async def test_a_swap_commits_every_change_and_releases_what_was_replaced() -> None:
    log: list[str] = []
    async with anyio.create_task_group() as tasks:
        compiled = CompiledModel(tasks)
        compiled.serving, better = serving(compiled, "quick"), serving(compiled, "best")
        burst, memory = Recorded(log, "burst"), Recorded(log, "memory", needs_gap=True)
        compiled.members.update((burst, memory))
        await compiled.swap(better)
    assert compiled.serving is better
    assert log[:2] == ["burst prepare", "memory prepare"]
    assert sorted(log[2:4]) == ["burst check", "memory check"]
    assert sorted(log[4:6]) == ["burst commit", "memory commit"]
    assert sorted(log[6:]) == ["burst release_old", "memory release_old"]


@pytest.mark.parametrize("fails", ["prepare", "check"])
async def test_one_member_that_cannot_follow_releases_those_of_the_others(fails: str) -> None:
    log: list[str] = []
    async with anyio.create_task_group() as tasks:
        compiled = CompiledModel(tasks)
        compiled.serving = old = serving(compiled, "quick")
        burst, memory = Recorded(log, "burst"), Recorded(log, "memory", needs_gap=True, fails=fails)
        compiled.members.update((burst, memory))
        with pytest.raises(NotNowError, match="memory was used"):
            await compiled.swap(serving(compiled, "best"))
        assert (compiled.serving, compiled.gate.shut) == (old, False)
    assert "burst release_new" in log
    assert ("memory release_new" in log) == (fails == "check")
    assert not any("commit" in entry or "release_old" in entry for entry in log)


class Slow(Recorded):
    """A burst whose driver answers after other tasks have had turns."""

    preparing = most = 0

    async def prepare(self, better: Serving) -> Recorded:
        Slow.preparing += 1
        Slow.most = max(Slow.most, Slow.preparing)
        try:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            return await super().prepare(better)
        finally:
            Slow.preparing -= 1


async def test_many_bursts_connect_side_by_side_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "most", 0)
    log: list[str] = []
    async with anyio.create_task_group() as tasks:
        compiled = CompiledModel(tasks)
        compiled.serving, better = serving(compiled, "quick"), serving(compiled, "best")
        bursts = [Slow(log, f"burst {number}") for number in range(64)]
        compiled.members.update(bursts)
        await compiled.swap(better)
    assert compiled.serving is better
    assert (Slow.most, Slow.preparing) == (8, 0)
    assert sorted(entry for entry in log if entry.endswith("commit")) == sorted(f"burst {number} commit" for number in range(64))


async def test_bursts_that_fail_together_are_one_error_and_nothing_is_left() -> None:
    """The death of a driver ends what each burst asks of it, all in one turn of the loop."""
    log: list[str] = []
    async with anyio.create_task_group() as tasks:
        compiled = CompiledModel(tasks)
        compiled.serving = old = serving(compiled, "quick")
        bursts = [Slow(log, f"burst {number}", fails="prepare" if number % 2 else "") for number in range(64)]
        compiled.members.update(bursts)
        with pytest.raises(NotNowError, match="was used"):
            await compiled.swap(serving(compiled, "best"))
        assert compiled.serving is old
        assert Slow.preparing == 0
    prepared = {entry.removesuffix(" prepare") for entry in log if entry.endswith("prepare")}
    failed = {burst.name for burst in bursts if burst.fails}
    assert sorted(entry for entry in log if not entry.endswith("prepare")) == sorted(f"{name} release_new" for name in prepared - failed)


async def test_a_member_that_comes_during_the_swap_ends_it() -> None:
    """Device memory that is allocated on the model before must not be left behind there."""
    log: list[str] = []
    async with anyio.create_task_group() as tasks:
        compiled = CompiledModel(tasks)
        compiled.serving = old = serving(compiled, "quick")
        first, late = Recorded(log, "first", needs_gap=True), Recorded(log, "late", needs_gap=True)
        first.at_prepare = lambda: compiled.members.add(late)
        compiled.members.add(first)
        with pytest.raises(aionn.CallerError, match="device memory allocated, during the swap"):
            await compiled.swap(serving(compiled, "best"))
        assert compiled.serving is old
    assert log == ["first prepare", "first check", "first release_new"]
