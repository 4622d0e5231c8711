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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn import fleet
from aionn.caching.store import files
from aionn.errors import CallerError
from aionn.fleet import BuilderKey, CompileRequest, Offered
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


async def test_adopting_replaces_an_entry_that_the_driver_does_not_believe(
    tmp_path: Path, folder: Path, key: BuilderKey, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    """A cache directory that was copied without its records."""
    trust(folder, key)
    shutil.copytree(tmp_path / "builder/cache", tmp_path / "cache")
    assert (await fleet.adopt(runtime, tmp_path / "cache", pushed.offer(), device=fake.name)).kind is Kind.HIT
    assert entry_of(tmp_path / "cache")[0].generation == 2
    offered = pushed.offer()
    assert (await fleet.adopt(runtime, tmp_path / "cache", offered, device=fake.name)).kind is Kind.HIT  # it is there, and believed
    assert entry_of(tmp_path / "cache")[0].generation == 2
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(offered.model[0])


async def test_a_statement_starts_no_device_that_is_not_installed(
    tmp_path: Path, folder: Path, key: BuilderKey, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    """The device of a statement may be "package.module:Class". To start it is to import and call what it names."""
    refused = await fleet.adopt(runtime, tmp_path / "cache", pushed.offer())
    assert refused.reason is Reason.UNTRUSTED_BUILDER
    trust(folder, BuilderKey.generate("another"))
    refused = await fleet.adopt(runtime, tmp_path / "cache", pushed.offer(), device=fake.name)
    assert refused.reason is Reason.UNTRUSTED_BUILDER
    trust(folder, key)
    refused = await fleet.adopt(runtime, tmp_path / "cache", pushed.offer())
    assert refused.reason is Reason.OTHER_FINGERPRINT
    assert "is not installed here" in refused.detail
    assert [device.pid for device in runtime.devices if device.pid is not None] == []


async def test_a_runtime_that_is_not_open_adopts_nothing(tmp_path: Path, pushed: Pushed, fake: FakeDevice) -> None:
    runtime, offered = aionn.Runtime(state_dir=tmp_path / "state"), pushed.offer()
    with pytest.raises(CallerError, match="the runtime is not open"):
        await fleet.adopt(runtime, tmp_path / "cache", offered)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(offered.model[0])
    with pytest.raises(CallerError, match="the runtime is not open"):
        fleet.use_backend(runtime, offering(pushed))


# --- what a compile does with an offer -------------------------------------------------------------------------------


async def test_a_miss_takes_what_a_backend_offers(
    tmp_path: Path, folder: Path, key: BuilderKey, model: aionn.Model, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    trust(folder, key)
    backend = offering(pushed)
    fleet.use_backend(runtime, backend)
    fake.fail("this machine must not compile", "compile")
    compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
    (outcome,) = compilation.outcomes
    assert (outcome.kind, outcome.detail, outcome.save_failure) == (Kind.HIT, "compiled by builder 'ci'", None)
    inputs = {name: some_input(operand) for name, operand in model.inputs.items()}
    ((_, output),) = (await compilation.compute(inputs)).items()
    np.testing.assert_array_equal(output, inputs["input"])
    (request,) = backend.requests
    assert (request.key, request.parts) == (pushed.manifest.key, pushed.manifest.parts)
    assert (request.device, request.device_version) == (fake.name, pushed.manifest.device_version)
    assert (request.model, request.model_digest) == (model, model.token)
    fleet.use_backend(runtime, None)
    again = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
    assert [(outcome.kind, outcome.detail) for outcome in again.outcomes] == [(Kind.HIT, "")]
    assert len(backend.requests) == 1


async def test_without_an_offer_in_time_the_model_is_compiled(
    tmp_path: Path, folder: Path, key: BuilderKey, model: aionn.Model, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    trust(folder, key)
    cancelled = asyncio.Event()

    async def nothing(request: CompileRequest) -> None:
        return None

    async def broken(request: CompileRequest) -> None:
        raise OSError("the store is down")

    async def hanging(request: CompileRequest) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    for number, answer in enumerate((nothing, broken, hanging)):
        backend = Backend(answer)
        backend.wait_s = 30.0 if answer is not hanging else 0.05
        fleet.use_backend(runtime, backend)
        compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / f"cache{number}")
        (outcome,) = compilation.outcomes
        assert (outcome.kind, outcome.reason, outcome.save_failure) == (Kind.MISS, Reason.ABSENT, None)
        assert len(backend.requests) == 1
    await asyncio.wait_for(cancelled.wait(), 10)


async def test_an_offer_that_comes_too_late_is_closed(
    tmp_path: Path, folder: Path, key: BuilderKey, model: aionn.Model, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    trust(folder, key)
    late = pushed.offer()

    async def stubborn(request: CompileRequest) -> Offered:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return late
        raise AssertionError

    backend = Backend(stubborn)
    backend.wait_s = 0.05
    fleet.use_backend(runtime, backend)
    await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
    while True:  # until the runtime's task has closed it
        try:
            os.fstat(late.model[0])
        except OSError:
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("fault", ["statement", "file", "entry"])
async def test_a_refused_offer_is_compiled_here_and_counted(
    tmp_path: Path, folder: Path, key: BuilderKey, model: aionn.Model, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime, fault: str
) -> None:
    trust(folder, key)
    reason = {"statement": Reason.BAD_SIGNATURE, "file": Reason.WRONG_BYTES, "entry": Reason.WRONG_TOKEN}[fault]

    async def answer(request: CompileRequest) -> Offered:
        offered = pushed.offer()
        if fault == "statement":
            assert offered.signed is not None
            offered.signed = offered.signed[:-1] + bytes((offered.signed[-1] ^ 1,))
        return offered

    if fault == "file":
        path = pushed.folder / "model0"
        path.write_bytes(bytes(path.stat().st_size))
    preference: Preference = "low_power" if fault == "entry" else "fast_single_answer"
    backend = Backend(answer)
    fleet.use_backend(runtime, backend)
    seen: list[object] = []
    compilation = await runtime.compile(
        model, devices=(fake.name,), cache_dir=tmp_path / "cache", preference=preference, on_event=seen.append
    )
    (outcome,) = compilation.outcomes
    assert (outcome.kind, outcome.reason, outcome.save_failure) == (Kind.MISS, reason, None)
    assert [event.reason for event in seen if isinstance(event, aionn.events.CacheRefused)] == [reason.value]
    assert adopted_records(tmp_path / "state") == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(backend.offered[0].model[0])


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
    tmp_path: Path,
    folder: Path,
    key: BuilderKey,
    model: aionn.Model,
    pushed: Pushed,
    fake: FakeDevice,
    runtime: aionn.Runtime,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if fault != "empty":
        trust(folder, key)
    harm(folder, fault, monkeypatch)
    reason = Reason.UNSAFE if fault in ("open", "symlink") else Reason.UNTRUSTED_BUILDER
    backend = offering(pushed)
    fleet.use_backend(runtime, backend)
    with caplog.at_level(logging.WARNING, "aionn"):
        preferences: tuple[Preference, ...] = ("fast_single_answer", "low_power")
        for preference in preferences:
            compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache", preference=preference)
            assert [(outcome.kind, outcome.reason) for outcome in compilation.outcomes] == [(Kind.MISS, reason)]
    assert backend.requests == []
    warnings = [record.getMessage() for record in caplog.records if "builder" in record.getMessage() or "adopted" in record.getMessage()]
    assert len(warnings) == 1, warnings
    refused = await fleet.adopt(runtime, tmp_path / "other", pushed.offer(), device=fake.name)
    assert (refused.kind, refused.reason) == (Kind.MISS, reason)
    assert adopted_records(tmp_path / "state") == 0


async def test_a_key_that_is_removed_revokes_what_it_signed_while_the_app_runs(
    tmp_path: Path, folder: Path, key: BuilderKey, model: aionn.Model, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    path = trust(folder, key)
    assert (await fleet.adopt(runtime, tmp_path / "cache", pushed.offer(), device=fake.name)).kind is Kind.HIT
    held = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
    path.unlink()
    seen: list[object] = []
    compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache", on_event=seen.append)
    (outcome,) = compilation.outcomes
    assert (outcome.kind, outcome.reason, outcome.save_failure) == (Kind.MISS, Reason.REVOKED, None)
    assert [event.reason for event in seen if isinstance(event, aionn.events.CacheRefused)] == ["revoked"]
    assert adopted_records(tmp_path / "state") == 0
    own = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
    assert [outcome.kind for outcome in own.outcomes] == [Kind.HIT]  # what was compiled here since
    assert [outcome.kind for outcome in held.outcomes] == [Kind.HIT]


async def test_a_keyring_that_is_missing_for_a_while_trusts_no_builder_and_revokes_nothing(
    tmp_path: Path, folder: Path, key: BuilderKey, model: aionn.Model, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    """A volume that is mounted only after the app has started."""
    path, elsewhere = trust(folder, key), tmp_path / "not mounted"
    refused: list[str] = []

    def note(event: object) -> None:
        if isinstance(event, aionn.events.CacheRefused):
            refused.append(event.reason)

    async def outcome() -> aionn.CacheOutcome:
        return (await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache", on_event=note)).outcomes[0]

    assert (await fleet.adopt(runtime, tmp_path / "cache", pushed.offer(), device=fake.name)).kind is Kind.HIT
    fake.fail("this machine must not compile", "compile")
    os.rename(folder, elsewhere)
    with pytest.raises(aionn.CompilationError, match="must not compile"):
        await outcome()
    assert (refused, adopted_records(tmp_path / "state")) == (["untrusted_builder"], 1)
    os.rename(elsewhere, folder)
    assert (await outcome()).kind is Kind.HIT
    path.unlink()
    with pytest.raises(aionn.CompilationError, match="must not compile"):
        await outcome()
    assert (refused, adopted_records(tmp_path / "state")) == (["untrusted_builder", "revoked"], 0)

    trust(folder, key)
    assert (await fleet.adopt(runtime, tmp_path / "cache", pushed.offer(), device=fake.name)).kind is Kind.HIT
    fake.behave()
    os.rename(folder, elsewhere)
    missed = await outcome()
    assert (missed.kind, missed.reason, missed.save_failure) == (Kind.MISS, Reason.UNTRUSTED_BUILDER, None)
    assert f"there is no folder {folder}" in missed.detail
    assert (await outcome()).kind is Kind.HIT  # what was compiled here since
    os.rename(elsewhere, folder)
    assert (await outcome()).kind is Kind.HIT


# --- deaths in the middle --------------------------------------------------------------------------------------------


async def test_a_driver_that_dies_over_an_offer_believes_nothing_and_the_next_one_compiles(
    tmp_path: Path, folder: Path, key: BuilderKey, model: aionn.Model, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    trust(folder, key)
    backend = offering(pushed)
    fleet.use_backend(runtime, backend)
    fake.crash("load")
    compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
    (outcome,) = compilation.outcomes
    assert (outcome.kind, outcome.reason, outcome.save_failure) == (Kind.MISS, Reason.REFUSED_BY_DEVICE, None)
    assert len(backend.requests) == 1
    inputs = {name: some_input(operand) for name, operand in model.inputs.items()}
    ((_, output),) = (await compilation.compute(inputs)).items()
    np.testing.assert_array_equal(output, inputs["input"])
    assert adopted_records(tmp_path / "state") == 0


async def test_a_driver_that_is_killed_while_it_loads_an_offer_believes_nothing(
    tmp_path: Path, folder: Path, key: BuilderKey, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    trust(folder, key)
    fake.hang("load")

    async def kill() -> None:
        os.kill(await fake.heard("load"), signal.SIGKILL)

    killing = asyncio.create_task(kill())
    refused = await fleet.adopt(runtime, tmp_path / "cache", pushed.offer(), device=fake.name)
    await killing
    assert (refused.kind, refused.reason) == (Kind.MISS, Reason.REFUSED_BY_DEVICE)
    assert adopted_records(tmp_path / "state") == 0
    assert list((tmp_path / "cache").rglob("manifest")) == []
    fake.behave()
    assert (await fleet.adopt(runtime, tmp_path / "cache", pushed.offer(), device=fake.name)).kind is Kind.HIT


async def test_an_app_that_is_killed_while_it_adopts_leaves_nothing_believed(
    tmp_path: Path, folder: Path, key: BuilderKey, pushed: Pushed, fake: FakeDevice, runtime: aionn.Runtime
) -> None:
    trust(folder, key)
    (pushed.folder / "signed").write_bytes(pushed.signed)
    fake.hang("load")
    arguments = (str(pushed.folder), str(tmp_path / "state"), str(tmp_path / "cache"))
    app = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.fleet.adopting_app", *arguments)
    driver = await fake.heard("load")
    pidfd = os.pidfd_open(driver)
    app.kill()
    await app.wait()
    await asyncio.to_thread(_ended, pidfd)
    assert adopted_records(tmp_path / "state") == 0
    assert list((tmp_path / "cache").rglob("manifest")) == []
    fake.behave()
    assert (await fleet.adopt(runtime, tmp_path / "cache", pushed.offer(), device=fake.name)).kind is Kind.HIT


def _ended(pidfd: int) -> None:
    import select

    (waiting := select.poll()).register(pidfd, select.POLLIN)
    assert waiting.poll(20_000), "the driver did not end with its app"
    os.close(pidfd)


# --- what lies after the driver's check ------------------------------------------------------------------------------


async def test_a_file_that_grows_after_the_check_does_not_fill_the_disk(
    tmp_path: Path,
    folder: Path,
    key: BuilderKey,
    model: aionn.Model,
    pushed: Pushed,
    fake: FakeDevice,
    runtime: aionn.Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trust(folder, key)
    length, copy = pushed.manifest.model[0].length, files.copy_into
    grown = []

    def copy_grown(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
        os.truncate(pushed.folder / "model0", length + (64 << 20))
        grown.append(os.fstat(sources[0]).st_size)
        copy(targets, sources, lengths)

    monkeypatch.setattr(adopting, "copy_into", copy_grown)
    fleet.use_backend(runtime, offering(pushed))
    compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
    assert grown == [length + (64 << 20)]
    assert [(outcome.kind, outcome.save_failure) for outcome in compilation.outcomes] == [(Kind.HIT, None)]
    assert entry_of(tmp_path / "cache")[1].joinpath("model0").stat().st_size == length


@pytest.mark.parametrize(("length", "copied"), [(0, b""), (3, b"123"), (5, b"12345")])
def test_no_more_is_copied_than_was_checked(tmp_path: Path, length: int, copied: bytes) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("wb") as target:
        files.copy_into([target.fileno()], [source.fileno()], [length])
    assert (tmp_path / "target").read_bytes() == copied


def test_a_file_that_became_shorter_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    with (
        (tmp_path / "source").open("rb") as source,
        (tmp_path / "target").open("wb") as target,
        pytest.raises(OSError, match="ends after 5 of 6 bytes"),
    ):
        files.copy_into([target.fileno()], [source.fileno()], [6])


async def test_a_driver_that_accepts_anything_does_not_end_the_apps_compile(
    tmp_path: Path,
    folder: Path,
    key: BuilderKey,
    model: aionn.Model,
    pushed: Pushed,
    fake: FakeDevice,
    runtime: aionn.Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver that a model has taken over says yes to bytes that are not a statement."""
    trust(folder, key)
    adopt, said = RemoteDevice.adopt, list[bytes]()

    async def accept(self: RemoteDevice, options: Any, handles: Any, digest: bytes, signed: bytes) -> RemotePreparedModel:
        said.append(signed)
        return await adopt(self, options, handles, digest, pushed.signed)

    monkeypatch.setattr(RemoteDevice, "adopt", accept)

    async def junk(request: CompileRequest) -> Offered:
        good = pushed.offer()
        return Offered(b"junk", good.model, good.data)

    fleet.use_backend(runtime, Backend(junk))
    compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache")
    assert said == [b"junk"]
    assert [(outcome.kind, outcome.reason) for outcome in compilation.outcomes] == [(Kind.MISS, Reason.BAD_SIGNATURE)]
