"""Artifacts that travel, with real drivers: rows F3 and F5, what a compile does with an offer, and deaths in the middle of adopting."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn import fleet
from aionn.caching.store import directory
from aionn.errors import CallerError
from aionn.fleet import ArtifactRequest, BuilderKey, Offered
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.runtime.preparing import adopting
from aionn.runtime.runtime import Preference
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model
from tests.fleet.builders import Backend, Pushed, build, entry_of, offering, trust
from tests.real_models import some_input

pytestmark = pytest.mark.anyio
Kind, Reason = aionn.CacheOutcomeKind, aionn.MissReason


@pytest.fixture
def key() -> BuilderKey:
    return BuilderKey.generate("ci")


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


@pytest.fixture
async def pushed(tmp_path: Path, model: aionn.Model, key: BuilderKey, fake: FakeDevice) -> Pushed:
    (tmp_path / "builder").mkdir()
    return await build(tmp_path / "builder", model, key, fake.name)


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[aionn.Runtime]:
    async with aionn.Runtime(state_dir=tmp_path / "state") as runtime:
        yield runtime


@dataclass(frozen=True)
class Machine:
    """A machine with an open runtime and an empty keyring, and what a builder has compiled for its fake device."""

    path: Path
    keyring: Path
    key: BuilderKey
    model: aionn.Model
    pushed: Pushed
    fake: FakeDevice
    runtime: aionn.Runtime

    def trust_builder(self) -> Path:
        """Put the builder's key into the keyring, and return its path."""
        return trust(self.keyring, self.key)

    async def compile(self, cache: str = "cache", **arguments: Any) -> aionn.Compilation:
        return await self.runtime.compile(self.model, devices=(self.fake.name,), cache_dir=self.path / cache, **arguments)

    async def adopt(self, cache: str = "cache", offered: Offered | None = None) -> aionn.CacheOutcome:
        return await fleet.adopt(self.runtime, self.path / cache, offered or self.pushed.offer(), device=self.fake.name)

    def records(self) -> int:
        """Return how many records of adopted artifacts its drivers have."""
        return adopted_records(self.path / "state")


@pytest.fixture
def machine(
    tmp_path: Path, folder: Path, key: BuilderKey, model: aionn.Model, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> Machine:
    return Machine(tmp_path, folder, key, model, pushed, fake, runtime)


def adopted_records(state: Path) -> int:
    count = 0
    for path in state.rglob("integrity-*.sqlite"):
        database = sqlite3.connect(path)
        count += database.execute("SELECT COUNT(*) FROM adopted").fetchone()[0]
        database.close()
    return count


# --- F3 --------------------------------------------------------------------------------------------------------------


async def test_an_artifact_of_another_machine_is_a_hit_and_stays_one(
    tmp_path: Path, folder: Path, key: BuilderKey, silero_path: Path
) -> None:
    trust(folder, key)
    (tmp_path / "builder").mkdir()
    source = aionn.Model.from_onnx(silero_path)
    pushed = await build(tmp_path / "builder", source, key, "onnxruntime")
    inputs = {name: some_input(operand) for name, operand in source.inputs.items()}
    answers = []
    for state, cache in ((tmp_path / "builder/state", tmp_path / "builder/cache"), (tmp_path / "state", tmp_path / "cache")):
        async with aionn.Runtime(state_dir=state) as runtime:
            if state == tmp_path / "state":
                adopted = await fleet.adopt(runtime, cache, pushed.offer())
                assert (adopted.kind, adopted.save_failure, adopted.detail) == (Kind.HIT, None, "compiled by builder 'ci'")
                assert adopted.saved_s == pushed.manifest.compile_ns / 1e9
            compilation = await runtime.compile(await runtime.load(silero_path), devices=("onnxruntime",), cache_dir=cache)
            assert [outcome.kind for outcome in compilation.outcomes] == [Kind.HIT]
            answers.append({name: array.copy() for name, array in (await compilation.compute(inputs)).items()})
    for name, expected in answers[0].items():
        np.testing.assert_array_equal(answers[1][name], expected)
    there = entry_of(tmp_path / "cache")[0]
    assert (there.key, there.files, there.compile_ns) == (pushed.manifest.key, pushed.manifest.files, pushed.manifest.compile_ns)
    async with aionn.Runtime(state_dir=tmp_path / "state") as runtime:  # a later start: no offer, no backend
        compilation = await runtime.compile(await runtime.load(silero_path), devices=("onnxruntime",), cache_dir=tmp_path / "cache")
        assert [outcome.kind for outcome in compilation.outcomes] == [Kind.HIT]


async def test_adopting_replaces_an_entry_that_the_driver_does_not_believe(machine: Machine) -> None:
    """A cache directory that was copied without its records."""
    machine.trust_builder()
    shutil.copytree(machine.path / "builder/cache", machine.path / "cache")
    assert (await machine.adopt()).kind is Kind.HIT
    assert entry_of(machine.path / "cache")[0].generation == 2
    assert (await machine.adopt()).kind is Kind.HIT  # it is there, and believed
    assert entry_of(machine.path / "cache")[0].generation == 2
    assert machine.pushed.held() == []


async def test_a_statement_starts_no_device_that_is_not_installed(machine: Machine) -> None:
    """The device of a statement may be "package.module:Class". To start it is to import and call what it names."""
    refused = await fleet.adopt(machine.runtime, machine.path / "cache", machine.pushed.offer())
    assert refused.reason is Reason.UNTRUSTED_BUILDER
    trust(machine.keyring, BuilderKey.generate("another"))
    refused = await machine.adopt()
    assert refused.reason is Reason.UNTRUSTED_BUILDER
    machine.trust_builder()
    refused = await fleet.adopt(machine.runtime, machine.path / "cache", machine.pushed.offer())
    assert refused.reason is Reason.OTHER_FINGERPRINT
    assert "is not installed here" in refused.detail
    assert [device.pid for device in machine.runtime.devices if device.pid is not None] == []


async def test_a_runtime_that_is_not_open_adopts_nothing(tmp_path: Path, pushed: Pushed, fake: FakeDevice) -> None:
    runtime = aionn.Runtime(state_dir=tmp_path / "state")
    with pytest.raises(CallerError, match="the runtime is not open"):
        await fleet.adopt(runtime, tmp_path / "cache", pushed.offer())
    assert pushed.held() == []
    with pytest.raises(CallerError, match="the runtime is not open"):
        fleet.use_backend(runtime, offering(pushed))


# --- what a compile does with an offer -------------------------------------------------------------------------------


async def test_a_miss_takes_what_a_backend_offers(machine: Machine) -> None:
    machine.trust_builder()
    backend = offering(machine.pushed)
    fleet.use_backend(machine.runtime, backend)
    machine.fake.fail("this machine must not compile", "compile")
    compilation = await machine.compile()
    (outcome,) = compilation.outcomes
    assert (outcome.kind, outcome.detail, outcome.save_failure) == (Kind.HIT, "compiled by builder 'ci'", None)
    inputs = {name: some_input(operand) for name, operand in machine.model.inputs.items()}
    ((_, output),) = (await compilation.compute(inputs)).items()
    np.testing.assert_array_equal(output, inputs["input"])
    (request,) = backend.requests
    assert (request.key, request.parts) == (machine.pushed.manifest.key, machine.pushed.manifest.parts)
    assert (request.device, request.device_version) == (machine.fake.name, machine.pushed.manifest.device_version)
    assert (request.model, request.model_digest) == (machine.model, machine.model.token)
    fleet.use_backend(machine.runtime, None)
    again = await machine.compile()
    assert [(outcome.kind, outcome.detail) for outcome in again.outcomes] == [(Kind.HIT, "")]
    assert len(backend.requests) == 1


async def test_without_an_offer_in_time_the_model_is_compiled(machine: Machine) -> None:
    machine.trust_builder()
    cancelled = asyncio.Event()

    async def nothing(request: ArtifactRequest) -> None:
        return None

    async def broken(request: ArtifactRequest) -> None:
        raise OSError("the store is down")

    async def hanging(request: ArtifactRequest) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    for number, answer in enumerate((nothing, broken, hanging)):
        backend = Backend(answer)
        backend.wait_s = 30.0 if answer is not hanging else 0.05
        fleet.use_backend(machine.runtime, backend)
        compilation = await machine.compile(f"cache{number}")
        (outcome,) = compilation.outcomes
        assert (outcome.kind, outcome.reason, outcome.save_failure) == (Kind.MISS, Reason.ABSENT, None)
        assert len(backend.requests) == 1
    await asyncio.wait_for(cancelled.wait(), 10)


async def test_an_offer_that_comes_too_late_is_closed(machine: Machine) -> None:
    machine.trust_builder()
    late = machine.pushed.offer()

    async def stubborn(request: ArtifactRequest) -> Offered:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return late
        raise AssertionError

    backend = Backend(stubborn)
    backend.wait_s = 0.05
    fleet.use_backend(machine.runtime, backend)
    assert machine.pushed.held()
    await machine.compile()
    async with asyncio.timeout(30):
        while machine.pushed.held():  # noqa: ASYNC110  (until the runtime's task has closed it)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("fault", ["statement", "file", "entry"])
async def test_a_refused_offer_is_compiled_here_and_counted(machine: Machine, fault: str) -> None:
    machine.trust_builder()
    reason = {"statement": Reason.BAD_SIGNATURE, "file": Reason.WRONG_BYTES, "entry": Reason.WRONG_TOKEN}[fault]

    async def answer(request: ArtifactRequest) -> Offered:
        offered = machine.pushed.offer()
        if fault == "statement":
            assert offered.signed is not None
            offered.signed = offered.signed[:-1] + bytes((offered.signed[-1] ^ 1,))
        return offered

    if fault == "file":
        path = machine.pushed.folder / "model0"
        path.write_bytes(bytes(path.stat().st_size))
    preference: Preference = "low_power" if fault == "entry" else "fast_single_answer"
    backend = Backend(answer)
    fleet.use_backend(machine.runtime, backend)
    seen: list[object] = []
    compilation = await machine.compile(preference=preference, on_event=seen.append)
    (outcome,) = compilation.outcomes
    assert (outcome.kind, outcome.reason, outcome.save_failure) == (Kind.MISS, reason, None)
    assert [event.reason for event in seen if isinstance(event, aionn.events.CacheRefused)] == [reason.value]
    assert machine.records() == 0
    assert len(backend.offered) == 1
    assert machine.pushed.held() == []


# --- F5 --------------------------------------------------------------------------------------------------------------


def harm(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "open":
        folder.chmod(0o777)
    elif fault == "symlink":
        folder.rename(folder.parent / "elsewhere")
        folder.symlink_to(folder.parent / "elsewhere")
    elif fault == "off":
        monkeypatch.setenv("AIONN_ADOPT", "off")


@pytest.mark.parametrize("fault", ["empty", "open", "symlink", "off"])
async def test_without_a_sound_keyring_no_backend_is_asked(
    machine: Machine, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault != "empty":
        machine.trust_builder()
    harm(machine.keyring, fault, monkeypatch)
    reason = Reason.UNSAFE if fault in ("open", "symlink") else Reason.UNTRUSTED_BUILDER
    backend = offering(machine.pushed)
    fleet.use_backend(machine.runtime, backend)
    with caplog.at_level(logging.WARNING, "aionn"):
        preferences: tuple[Preference, ...] = ("fast_single_answer", "low_power")
        for preference in preferences:
            compilation = await machine.compile(preference=preference)
            assert [(outcome.kind, outcome.reason) for outcome in compilation.outcomes] == [(Kind.MISS, reason)]
    assert backend.requests == []
    warnings = [record.getMessage() for record in caplog.records if "builder" in record.getMessage() or "adopted" in record.getMessage()]
    assert len(warnings) == 1, warnings
    refused = await machine.adopt("other")
    assert (refused.kind, refused.reason) == (Kind.MISS, reason)
    assert machine.records() == 0


async def test_a_key_that_is_removed_revokes_what_it_signed_while_the_app_runs(machine: Machine) -> None:
    path = machine.trust_builder()
    assert (await machine.adopt()).kind is Kind.HIT
    held = await machine.compile()
    path.unlink()
    seen: list[object] = []
    compilation = await machine.compile(on_event=seen.append)
    (outcome,) = compilation.outcomes
    assert (outcome.kind, outcome.reason, outcome.save_failure) == (Kind.MISS, Reason.REVOKED, None)
    assert [event.reason for event in seen if isinstance(event, aionn.events.CacheRefused)] == ["revoked"]
    assert machine.records() == 0
    own = await machine.compile()
    assert [outcome.kind for outcome in own.outcomes] == [Kind.HIT]  # what was compiled here since
    assert [outcome.kind for outcome in held.outcomes] == [Kind.HIT]


async def test_a_keyring_that_is_missing_for_a_while_trusts_no_builder_and_revokes_nothing(machine: Machine) -> None:
    """A volume that is mounted only after the app has started."""
    path, elsewhere = machine.trust_builder(), machine.path / "not mounted"
    refused: list[str] = []

    def note(event: object) -> None:
        if isinstance(event, aionn.events.CacheRefused):
            refused.append(event.reason)

    async def outcome() -> aionn.CacheOutcome:
        return (await machine.compile(on_event=note)).outcomes[0]

    assert (await machine.adopt()).kind is Kind.HIT
    machine.fake.fail("this machine must not compile", "compile")
    os.rename(machine.keyring, elsewhere)
    with pytest.raises(aionn.CompilationError, match="must not compile"):
        await outcome()
    assert (refused, machine.records()) == (["untrusted_builder"], 1)
    os.rename(elsewhere, machine.keyring)
    assert (await outcome()).kind is Kind.HIT
    path.unlink()
    with pytest.raises(aionn.CompilationError, match="must not compile"):
        await outcome()
    assert (refused, machine.records()) == (["untrusted_builder", "revoked"], 0)

    machine.trust_builder()
    assert (await machine.adopt()).kind is Kind.HIT
    machine.fake.behave()
    os.rename(machine.keyring, elsewhere)
    missed = await outcome()
    assert (missed.kind, missed.reason, missed.save_failure) == (Kind.MISS, Reason.UNTRUSTED_BUILDER, None)
    assert f"there is no folder {machine.keyring}" in missed.detail
    assert (await outcome()).kind is Kind.HIT  # what was compiled here since
    os.rename(elsewhere, machine.keyring)
    assert (await outcome()).kind is Kind.HIT


# --- deaths in the middle --------------------------------------------------------------------------------------------


async def test_a_driver_that_dies_over_an_offer_believes_nothing_and_the_next_one_compiles(machine: Machine) -> None:
    machine.trust_builder()
    backend = offering(machine.pushed)
    fleet.use_backend(machine.runtime, backend)
    machine.fake.crash("load")
    compilation = await machine.compile()
    (outcome,) = compilation.outcomes
    assert (outcome.kind, outcome.reason, outcome.save_failure) == (Kind.MISS, Reason.REFUSED_BY_DEVICE, None)
    assert len(backend.requests) == 1
    inputs = {name: some_input(operand) for name, operand in machine.model.inputs.items()}
    ((_, output),) = (await compilation.compute(inputs)).items()
    np.testing.assert_array_equal(output, inputs["input"])
    assert machine.records() == 0


async def test_a_driver_that_is_killed_while_it_loads_an_offer_believes_nothing(machine: Machine) -> None:
    machine.trust_builder()
    machine.fake.hang("load")

    async def kill() -> None:
        os.kill(await machine.fake.heard("load"), signal.SIGKILL)

    killing = asyncio.create_task(kill())
    refused = await machine.adopt()
    await killing
    assert (refused.kind, refused.reason) == (Kind.MISS, Reason.REFUSED_BY_DEVICE)
    assert machine.records() == 0
    assert list((machine.path / "cache").rglob("manifest")) == []
    machine.fake.behave()
    assert (await machine.adopt()).kind is Kind.HIT


async def test_an_app_that_is_killed_while_it_adopts_leaves_nothing_believed(machine: Machine) -> None:
    machine.trust_builder()
    (machine.pushed.folder / "signed").write_bytes(machine.pushed.signed)
    machine.fake.hang("load")
    arguments = (str(machine.pushed.folder), str(machine.path / "state"), str(machine.path / "cache"))
    app = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.fleet.adopting_app", *arguments)
    driver = await machine.fake.heard("load")
    pidfd = os.pidfd_open(driver)
    app.kill()
    await app.wait()
    await asyncio.to_thread(_ended, pidfd)
    assert machine.records() == 0
    assert list((machine.path / "cache").rglob("manifest")) == []
    machine.fake.behave()
    assert (await machine.adopt()).kind is Kind.HIT


def _ended(pidfd: int) -> None:
    import select

    (waiting := select.poll()).register(pidfd, select.POLLIN)
    assert waiting.poll(20_000), "the driver did not end with its app"
    os.close(pidfd)


# --- what lies after the driver's check ------------------------------------------------------------------------------


async def test_a_file_that_grows_after_the_check_does_not_fill_the_disk(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.trust_builder()
    length, copy = machine.pushed.manifest.model[0].length, directory.copy_into
    grown = []

    def copy_grown(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
        os.truncate(machine.pushed.folder / "model0", length + (64 << 20))
        grown.append(os.fstat(sources[0]).st_size)
        copy(targets, sources, lengths)

    monkeypatch.setattr(adopting, "copy_into", copy_grown)
    fleet.use_backend(machine.runtime, offering(machine.pushed))
    compilation = await machine.compile()
    assert grown == [length + (64 << 20)]
    assert [(outcome.kind, outcome.save_failure) for outcome in compilation.outcomes] == [(Kind.HIT, None)]
    assert entry_of(machine.path / "cache")[1].joinpath("model0").stat().st_size == length


@pytest.mark.parametrize(("length", "copied"), [(0, b""), (3, b"123"), (5, b"12345")])
def test_no_more_is_copied_than_was_checked(tmp_path: Path, length: int, copied: bytes) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        directory.copy_into([target.fileno()], [source.fileno()], [length])
    assert (tmp_path / "target").read_bytes() == copied


def test_a_file_that_became_shorter_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    with (
        (tmp_path / "source").open("rb") as source,
        (tmp_path / "target").open("wb") as target,
        pytest.raises(OSError, match="ends after 5 of 6 bytes"),
    ):
        directory.copy_into([target.fileno()], [source.fileno()], [6])


async def test_a_driver_that_accepts_anything_does_not_end_the_apps_compile(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that a model has taken over says yes to bytes that are not a statement."""
    machine.trust_builder()
    adopt, said = RemoteDevice.adopt, list[bytes]()

    async def accept(self: RemoteDevice, options: Any, handles: Any, digest: bytes, signed: bytes) -> RemotePreparedModel:
        said.append(signed)
        return await adopt(self, options, handles, digest, machine.pushed.signed)

    monkeypatch.setattr(RemoteDevice, "adopt", accept)

    async def junk(request: ArtifactRequest) -> Offered:
        good = machine.pushed.offer()
        return Offered(b"junk", good.model, good.data)

    fleet.use_backend(machine.runtime, Backend(junk))
    compilation = await machine.compile()
    assert said == [b"junk"]
    assert [(outcome.kind, outcome.reason) for outcome in compilation.outcomes] == [(Kind.MISS, Reason.BAD_SIGNATURE)]
