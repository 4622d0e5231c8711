"""A hit is never stale: what is changed between two compilations of a model, and what the second one does.

Each row of `TABLE` is a change. Its test compiles a model, so that it is stored, makes the change and compiles again. The outcome is the
row's, and the outputs are those of the model as it is now. After a MISS that was stored, a third compilation is a HIT with them.
That a HIT computes with the threads that are asked for now is a test in `runtime/test_threads.py`.

`docs/reference/cache.md` has the same table. Print it with `python -m tests.conformance.test_never_stale` when a row has changed.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.caching.outcomes import CacheOutcomeKind, MissReason
from aionn.testing import FakeDevice
from tests.conformance.stale_case import Case, Outputs

pytestmark = pytest.mark.anyio

LOADS = ("from_onnx", "load")
"""How the models are read."""

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "cache.md"
FAKE = FakeDevice.name


@dataclass(frozen=True)
class Outcome:
    """What the second compilation does.

    Attributes:
        stored: its outputs are those of the model that was read first: by the app's own word, the change does not concern it.
    """

    kind: CacheOutcomeKind | type[aionn.CallerError]
    reason: MissReason | None = None
    stored: bool = False

    def __str__(self) -> str:
        if not isinstance(self.kind, CacheOutcomeKind):
            return f"`{self.kind.__name__}`: put the file back, or read the model again"
        words = self.kind.name if self.reason is None else f"{self.kind.name}, `{self.reason.value}`"
        return f"{words}, with what was stored" if self.stored else words


HIT, NO_CACHE, DECLINED = Outcome(CacheOutcomeKind.HIT), Outcome(CacheOutcomeKind.NO_CACHE), Outcome(CacheOutcomeKind.DECLINED)
AS_READ = Outcome(CacheOutcomeKind.HIT, stored=True)
UNUSABLE_FILE = Outcome(aionn.CallerError)


def miss(reason: MissReason) -> Outcome:
    return Outcome(CacheOutcomeKind.MISS, reason)


ABSENT = miss(MissReason.ABSENT)
Act = Callable[[Case], Any]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        change: what is changed, in words. It is the row's name.
        make: makes the change.
        outcome: of the second compilation.
        first: what is different from the usual case before the first compilation.
        other_outputs: the change alters what the model computes.
        saved: a MISS is stored anew.
        loaded: the outcome for a model of `Model.load`, if it is another one.
    """

    change: str
    make: Act
    outcome: Outcome
    first: Act | None = None
    other_outputs: bool = False
    saved: bool = True
    loaded: Outcome | None = None

    def outcome_for(self, how: str) -> Outcome:
        return self.loaded if how == "load" and self.loaded is not None else self.outcome


def differs(change: str, make: Act, outcome: Outcome, first: Act | None = None, loaded: Outcome | None = None) -> Row:
    """Return a row whose change alters the outputs."""
    return Row(change, make, outcome, first, other_outputs=True, loaded=loaded)


def sets(**attributes: Any) -> Act:
    def make(case: Case) -> None:
        for name, value in attributes.items():
            assert getattr(case, name) != value
            setattr(case, name, value)

    return make


def asks(**options: Any) -> Act:
    return sets(options=options)


def both(*acts: Act) -> Act:
    def make(case: Case) -> None:
        for act in acts:
            act(case)

    return make


OWN, OTHER = sets(token=bytes(range(32))), sets(token=bytes(32))
REUSED, OPEN = sets(reuse=True), sets(keeps_open=True)
BESIDE: Act = Case.put_weights_beside
ON_FAKE: Act = partial(Case.use, device=FAKE)
ON_OPENVINO: Act = partial(Case.use, device="openvino")


def without_entry(case: Case) -> None:
    shutil.rmtree(case.entries[0])
    case.while_asleep = nothing


def with_a_flip(case: Case) -> None:
    case.flip("data0")
    case.while_asleep = nothing


def nothing(case: Case) -> None:
    """Change nothing."""


ASLEEP = sets(while_asleep=nothing)


def alone(case: Case) -> None:
    """Give each compilation a runtime of its own, with records of their own."""
    case.alone, case.state_dir = {}, case.folder / "state"


def fake_is(**orders: Any) -> Act:
    return lambda case: case.fake.tell(**orders)


def and_back(case: Case) -> None:
    case.rewrite(weight=1.0)
    case.rewrite()


def entry_of_another(*, forged: bool) -> Act:
    return lambda case: case.take_the_entry_of_another(forged=forged)


def one_byte_more(case: Case) -> None:
    os.truncate(case.stored("data0"), case.stored("data0").stat().st_size + 1)


def read_only(case: Case) -> None:
    for path in (case.cache_dir, *case.cache_dir.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    case.in_process = "a reader"


def lose_records(case: Case) -> None:
    case.alone, case.state_dir = {}, case.folder / "new state"


def move_all(case: Case) -> None:
    case.move_cache(os.rename)
    case.move_state(os.rename)


TABLE: dict[str, tuple[Row, ...]] = {
    "The file of the model": (
        Row("Nothing", lambda case: None, HIT),
        Row("The file is copied to another path", lambda case: case.move(shutil.copy, "copy.onnx"), HIT),
        Row("The file is renamed", lambda case: case.move(os.rename, "renamed.onnx"), HIT),
        Row("The file gets a hard link, which is used", lambda case: case.move(os.link, "linked.onnx"), HIT),
        Row(
            "The file gets a symbolic link, which is used", lambda case: case.move(lambda old, new: os.symlink(old, new), "link.onnx"), HIT
        ),
        Row("The file is touched, so it has a new time", lambda case: os.utime(case.path, (1, 1)), HIT),
        Row("The same bytes are written into the file again", lambda case: case.overwrite(), HIT),
        Row("The file is replaced by one with the same bytes", lambda case: case.rewrite(), HIT),
        Row("One weight changes, and changes back", and_back, HIT),
        differs("One weight changes: a new file replaces the old one", lambda case: case.rewrite(weight=1.0), ABSENT),
        differs("One weight changes in place, and the file keeps its size", lambda case: case.overwrite(weight=1.0), ABSENT),
        differs(
            "One weight changes in place, and the old time is restored",
            lambda case: case.keeping_mtime(case.path, lambda: case.overwrite(weight=1.0)),
            ABSENT,
        ),
        differs("One number of a small constant changes in place", lambda case: case.overwrite(bias=1.0), ABSENT),
        differs("An attribute of a node changes", lambda case: case.overwrite(alpha=0.5), ABSENT),
        Row("The input gets another name", lambda case: case.rewrite(names=("a", "y")), ABSENT),
        differs("The output gets another name", lambda case: case.rewrite(names=("x", "b")), ABSENT),
        Row("The model states another opset", lambda case: case.rewrite(opset=18), ABSENT),
        Row("The model names another producer", lambda case: case.rewrite(producer="another"), ABSENT),
        Row("The file is cut", lambda case: os.truncate(case.path, 1000), UNUSABLE_FILE),
        Row("The file is gone", lambda case: case.path.unlink(), UNUSABLE_FILE),
    ),
    "Weights in a file beside the model": (
        Row("The file of weights is touched", lambda case: os.utime(case.beside, (1, 1)), HIT, BESIDE),
        Row("The file of weights is replaced by one with the same bytes", lambda case: case.replace_beside(), HIT, BESIDE),
        Row("The model and its file of weights are renamed", lambda case: case.move(os.rename, "renamed.onnx"), HIT, BESIDE),
        differs("One weight changes in place", lambda case: case.overwrite_beside(weight=1.0), ABSENT, BESIDE),
        differs(
            "One weight changes in place, and the old time is restored, beside the model",
            lambda case: case.keeping_mtime(case.beside, lambda: case.overwrite_beside(weight=1.0)),
            ABSENT,
            BESIDE,
        ),
        differs(
            "One weight changes: a new file of weights replaces the old one", lambda case: case.replace_beside(weight=1.0), ABSENT, BESIDE
        ),
        Row("The file of weights is cut", lambda case: os.truncate(case.beside, 1000), UNUSABLE_FILE, BESIDE),
        Row("The file of weights is gone", lambda case: case.beside.unlink(), UNUSABLE_FILE, BESIDE),
    ),
    "The same `Model` object is compiled again": (
        Row("The file changes in place meanwhile", lambda case: case.overwrite(weight=1.0), AS_READ, REUSED, True, loaded=UNUSABLE_FILE),
        Row("A new file replaces the old one meanwhile", lambda case: case.rewrite(weight=1.0), AS_READ, REUSED, True),
        Row(
            "Weights beside the model change in place meanwhile",
            lambda case: case.overwrite_beside(weight=1.0),
            AS_READ,
            both(REUSED, BESIDE),
            True,
            loaded=UNUSABLE_FILE,
        ),
    ),
    "While another compilation of the file is open": (
        Row("The file is read and compiled once more", lambda case: None, HIT, OPEN),
        differs("A new file replaces the old one, and is compiled too", lambda case: case.rewrite(weight=1.0), ABSENT, OPEN),
        differs("One weight changes in place, and the file is compiled too", lambda case: case.overwrite(weight=1.0), ABSENT, OPEN),
        differs(
            "One weight changes beside the model, and the model is compiled too",
            lambda case: case.overwrite_beside(weight=1.0),
            ABSENT,
            both(OPEN, BESIDE),
        ),
    ),
    "A compilation with `idle_s` is given back, and used again": (
        Row("Nothing changes before the next use", ASLEEP, HIT),
        Row(
            "A new file replaces the old one before the next use", sets(while_asleep=partial(Case.rewrite, weight=1.0)), AS_READ, None, True
        ),
        Row("The file changes in place before the next use", sets(while_asleep=partial(Case.overwrite, weight=1.0)), AS_READ, None, True),
        Row("The stored entry is deleted before the next use", sets(while_asleep=without_entry), ABSENT),
        Row("A bit of a stored file flips before the next use", sets(while_asleep=with_a_flip), miss(MissReason.WRONG_BYTES)),
    ),
    "The token": (
        Row("Nothing, with a token of the app's own", lambda case: None, HIT, OWN),
        differs(
            "Another model gets the same token of the app's own",
            lambda case: case.rewrite(weight=1.0),
            miss(MissReason.OTHER_MODEL),
            OWN,
            loaded=AS_READ,
        ),
        Row(
            "Another model with another input gets the same token of the app's own",
            lambda case: case.rewrite(names=("a", "y")),
            miss(MissReason.OTHER_MODEL),
            OWN,
            loaded=AS_READ,
        ),
        Row("The same model gets another token of the app's own", OTHER, ABSENT, OWN),
        Row("The same model gets a token of the app's own", OWN, ABSENT),
    ),
    "What the app asks for": (
        Row("`preference` changes", asks(preference="sustained_speed"), ABSENT),
        Row("`priority` changes to high", asks(priority="high"), HIT),
        Row("`priority` changes to low, so another driver process loads it", asks(priority="low"), HIT),
        Row("`threads` changes from 1 to 2", asks(threads=2), HIT, asks(threads=1)),
        Row("`instances` changes from 1 to 2", asks(instances=2), HIT),
        Row("`Runtime(threads=1)` where there was no bound", sets(alone={"threads": 1}), HIT),
        Row("`mode` changes to jit", asks(mode="jit"), HIT),
        Row("`timeout_s` is given", asks(timeout_s=60.0), HIT),
        Row("`cache_dir` is left out", sets(cached=False), NO_CACHE),
    ),
    "The engine and the processes": (
        Row("The device changes", ON_OPENVINO, ABSENT),
        Row("The device changes to one that does not cache", partial(Case.use, device="reference"), NO_CACHE),
        Row("Nothing, on OpenVINO", lambda case: None, HIT, ON_OPENVINO),
        differs("One weight changes, on OpenVINO", lambda case: case.overwrite(weight=1.0), ABSENT, ON_OPENVINO),
        Row("`preference` changes, on OpenVINO", asks(preference="low_power"), ABSENT, ON_OPENVINO),
        Row("`threads` changes from 1 to 2, on OpenVINO", asks(threads=2), HIT, both(ON_OPENVINO, asks(threads=1))),
        Row("The engine gets another version", fake_is(version="2"), miss(MissReason.OTHER_DRIVER_VERSION), ON_FAKE),
        Row("The engine asks for more files", fake_is(cache_files=(2, 1)), miss(MissReason.WRONG_FILES), ON_FAKE),
        Row("The engine did not want the model stored", fake_is(decline=False), DECLINED, both(ON_FAKE, fake_is(decline=True))),
        Row("The driver is restarted", Case.restart_driver, HIT),
        Row("The driver is killed", Case.kill_driver, HIT),
        Row("The runtime is another one", alone, HIT, alone),
        Row("The app is another process", sets(in_process="a child"), HIT, alone),
        Row("`OMP_NUM_THREADS` is set", both(lambda case: case.patch.setenv("OMP_NUM_THREADS", "1"), sets(alone={})), HIT),
    ),
    "The stored files": (
        Row("A bit of the engine's graph flips", lambda case: case.flip("model0"), miss(MissReason.WRONG_BYTES)),
        Row("A bit of the engine's weights flips", lambda case: case.flip("data0"), miss(MissReason.WRONG_BYTES)),
        Row("A stored file is cut", lambda case: os.truncate(case.stored("data0"), 100), miss(MissReason.WRONG_LENGTH)),
        Row("A stored file is emptied", lambda case: os.truncate(case.stored("model0"), 0), miss(MissReason.WRONG_LENGTH)),
        Row("A stored file gets one more byte", one_byte_more, miss(MissReason.WRONG_LENGTH)),
        Row("A stored file is deleted", lambda case: case.stored("data0").unlink(), miss(MissReason.PARTIAL)),
        Row("A stored file is touched", lambda case: os.utime(case.stored("data0"), (1, 1)), HIT),
        Row("A stored file becomes readable for other accounts", lambda case: case.stored("data0").chmod(0o666), miss(MissReason.UNSAFE)),
        Row("The stored files of another model are put in place", Case.swap_with_another, miss(MissReason.WRONG_BYTES)),
        Row("The whole entry of another model is put in place", entry_of_another(forged=False), miss(MissReason.WRONG_TOKEN)),
        Row("The same, with a forged manifest", entry_of_another(forged=True), miss(MissReason.WRONG_BYTES)),
        Row("A character of the manifest changes", Case.change_manifest_text, miss(MissReason.UNREADABLE)),
        Row(
            "The manifest is of another format, as of another release",
            lambda case: case.change_manifest(format=0),
            miss(MissReason.UNREADABLE),
        ),
        Row("The manifest is deleted", lambda case: case.stored("manifest").unlink(), ABSENT),
        Row("The entry is deleted", lambda case: shutil.rmtree(case.entries[0]), ABSENT),
    ),
    "Where the cache and the records are": (
        Row("The cache directory is renamed", lambda case: case.move_cache(os.rename), HIT),
        Row("The cache directory is copied", lambda case: case.move_cache(shutil.copytree), HIT),
        Row(
            "The cache directory is reached through a symbolic link",
            lambda case: case.move_cache(os.symlink),
            miss(MissReason.UNSAFE),
            saved=False,
        ),
        Row("The cache directory is deleted", lambda case: shutil.rmtree(case.cache_dir), ABSENT),
        Row("The cache directory becomes read-only", read_only, HIT, alone),
        Row("The records of the drivers are moved along with the cache", move_all, HIT, alone),
        Row("The records of the drivers are lost", lose_records, miss(MissReason.NO_INTEGRITY_RECORD)),
    ),
}

ROWS = [row for rows in TABLE.values() for row in rows]


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
async def runtime(anyio_backend: Any, records: Path) -> AsyncIterator[aionn.Runtime]:
    # A row kills the driver. Of a service, no other process of tests has one with these settings.
    async with aionn.Runtime(state_dir=records, driver_env={"AIONN_TEST_WORD": f"stale {os.getpid()}"}) as runtime:
        yield runtime


def same(some: Outputs, others: Outputs) -> bool:
    return some.keys() == others.keys() and all(np.allclose(some[name], others[name], rtol=1e-4, atol=1e-4) for name in some)


async def done(made: Any) -> None:
    if inspect.isawaitable(made):
        await made


READ_LATE = (
    "What the app asks for",
    "The engine and the processes",
    "The stored files",
    "Where the cache and the records are",
)
"""What changes after the model was read. Each row reads its model in one of the two ways, in turn, and in soaks in both."""


def cases() -> list[Any]:
    """Return each row with the ways to read its model."""
    late = [row for title in READ_LATE for row in TABLE[title] if row.loaded is None]
    in_soaks = {(row.change, LOADS[turn % 2]) for turn, row in enumerate(late)}
    return [
        pytest.param(row, how, id=f"{row.change}-{how}", marks=pytest.mark.soak if (row.change, how) in in_soaks else [])
        for row in ROWS
        for how in LOADS
    ]


@pytest.mark.no_cover  # a hundred times the same lines, which other tests cover
@pytest.mark.parametrize(("row", "how"), cases())
async def test_the_outputs_are_those_of_the_model_as_it_is_now(
    row: Row, how: str, runtime: aionn.Runtime, records: Path, fake: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(row.change, how, tmp_path, runtime, records, fake, monkeypatch)
    async with case.open:
        await check(row, how, case)


async def check(row: Row, how: str, case: Case) -> None:
    if row.first is not None:
        row.first(case)
    before = case.now()
    outcome, outputs = await case.compile()
    assert (outcome.kind, outcome.reason, outcome.save_failure) == (CacheOutcomeKind.MISS, MissReason.ABSENT, None)
    assert same(outputs, before)

    await done(row.make(case))
    expected = row.outcome_for(how)
    if not isinstance(expected.kind, CacheOutcomeKind):
        with pytest.raises(expected.kind):
            await case.compile()
        return
    outcome, outputs = await case.compile()
    now = case.now()
    assert same(now, before) is not row.other_outputs  # the change is what the row says
    if expected.stored:
        now = before
    assert (outcome.kind, outcome.reason) == (expected.kind, expected.reason), outcome
    assert (outcome.save_failure is None) is row.saved, outcome
    assert same(outputs, now)

    if outcome.kind is CacheOutcomeKind.MISS and row.saved:
        outcome, outputs = await case.compile()
        assert outcome.kind is CacheOutcomeKind.HIT, outcome
        assert same(outputs, now)


def test_the_table_has_at_least_thirty_changes_each_with_a_name_of_its_own() -> None:
    assert len({row.change for row in ROWS}) == len(ROWS) >= 30


def in_words(row: Row) -> str:
    if "load" not in LOADS or row.loaded is None:
        return f"| {row.change} | {row.outcome} |"
    return f"| {row.change} | `from_onnx`: {row.outcome}. `load`: {row.loaded} |"


def tables() -> str:
    """Return the table as `docs/reference/cache.md` has it."""
    parts = ["\n".join((f"| {title} | |", "|---|---|", *map(in_words, rows))) for title, rows in TABLE.items()]
    return "\n\n".join(parts) + "\n"


def test_the_documentation_has_the_same_table() -> None:
    assert tables() in DOCS.read_text(encoding="utf-8"), "print the table with `python -m tests.conformance.test_never_stale`"


if __name__ == "__main__":
    print(tables(), end="")
