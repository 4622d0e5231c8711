"""NNAPI's runtime tests of caching, row by row: `TestCompilationCaching` (parameter matrices) and `CacheTest` (keys)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aionn.caching import CacheOutcomeKind, MissReason
from aionn.caching.store import CacheStore
from aionn.errors import AionnError, CallerError, CompilationError, DeviceUnavailableError
from aionn.hal import CacheFiles, ExecutionPreference, PrepareOptions, Priority
from aionn.runtime.preparing.compile_acts import CacheChoice
from tests.runtime.scripted_devices import DATA_PAYLOAD, MODEL_PAYLOAD, ScriptedDevice, scripted, some_model

pytestmark = [pytest.mark.anyio, pytest.mark.every_combination]  # the rows are matrices; a model and a data file too many are two faults

STATUSES: dict[str, AionnError | None] = {
    "NONE": None,
    "GENERAL_FAILURE": CompilationError("failed on demand"),
    "DEVICE_UNAVAILABLE": DeviceUnavailableError("scripted", "told to be away"),
    "INVALID_ARGUMENT": CallerError("told to refuse"),
}
NUMBERS = [CacheFiles(model, data) for model, data in itertools.product((0, 1, 32), repeat=2)]
MATRIX = pytest.mark.parametrize(
    ("needed", "status"),
    [pytest.param(needed, status, id=f"{needed.model}-{needed.data}-{status}") for needed in NUMBERS for status in STATUSES],
)
TOKEN = bytes(32)


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def cache(tmp_path: Path) -> AsyncIterator[CacheChoice]:
    async with CacheStore(tmp_path / "cache") as store:
        yield CacheChoice(store, TOKEN)


def scripted_device(needed: CacheFiles, status: str = "NONE") -> ScriptedDevice:
    device = ScriptedDevice(needed)
    device.from_cache = STATUSES[status]
    return device


# --- TestCompilationCaching -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("available", [True, False], ids=["NONE", "DEVICE_UNAVAILABLE"])
@pytest.mark.parametrize(("model", "data"), list(itertools.product((0, 1, 32, 33), repeat=2)))
async def test_device_registration_caching_failure(
    cache: CacheChoice, model: int, data: int, available: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that asks for too many files keeps working, without a cache and with a warning; AOSP loses it."""
    device = scripted_device(CacheFiles(model, data))
    async with scripted(device, unavailable=not available) as devices:
        if not available:
            with pytest.raises(DeviceUnavailableError):
                await devices.prepare(some_model(), cache)
            return
        _, outcome = await devices.prepare(some_model(), cache)
    too_many = max(model, data) > 32
    supported = not too_many and max(model, data) > 0
    assert outcome.kind is (CacheOutcomeKind.MISS if supported else CacheOutcomeKind.NO_CACHE)
    assert device.calls == ["supported", "prepare with handles" if supported else "prepare"]
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == too_many
    assert not too_many or "at most 32" in outcome.detail


@MATRIX
async def test_token_provided_and_cache_not_exist(cache: CacheChoice, needed: CacheFiles, status: str) -> None:
    device = scripted_device(needed, status)
    async with scripted(device) as devices:
        _, outcome = await devices.prepare(some_model(), cache)
    if needed.supported:
        assert device.calls == ["supported", "prepare with handles"]
        assert device.counts == (needed.model, needed.data)
        assert (outcome.kind, outcome.reason, outcome.save_failure) == (CacheOutcomeKind.MISS, MissReason.ABSENT, None)
    else:
        assert device.calls == ["supported", "prepare"]
        assert outcome.kind is CacheOutcomeKind.NO_CACHE


@MATRIX
async def test_token_provided_and_cache_exist(cache: CacheChoice, needed: CacheFiles, status: str) -> None:
    model = some_model()
    async with scripted(scripted_device(needed)) as devices:
        await devices.prepare(model, cache)
    device = scripted_device(needed, status)
    device.loaded_model = model
    async with scripted(device) as devices:
        _, outcome = await devices.prepare(model, cache)
    if not needed.supported:
        assert device.calls == ["supported", "prepare"]
        return
    assert device.counts == (needed.model, needed.data)
    assert device.contents == [MODEL_PAYLOAD] * needed.model + [DATA_PAYLOAD] * needed.data
    if status == "NONE":
        assert device.calls == ["from cache"]
        assert outcome.kind is CacheOutcomeKind.HIT
    else:
        assert device.calls == ["from cache", "supported", "prepare with handles"]
        assert outcome.kind is CacheOutcomeKind.MISS
        assert outcome.save_failure is None


@MATRIX
async def test_token_not_provided(needed: CacheFiles, status: str) -> None:
    device = scripted_device(needed, status)
    async with scripted(device) as devices:
        _, outcome = await devices.prepare(some_model(), None)
    assert device.calls == ["supported", "prepare"]
    assert (outcome.kind, outcome.reason) == (CacheOutcomeKind.NO_CACHE, None)


# --- CacheTest: the key, as the runtime makes it (encoding and several steps: tests/caching/test_token.py) ----------------


async def keys(tmp_path: Path, version: str = "1.0", token: bytes = TOKEN, priority_matters: bool = False, **options: Any) -> set[bytes]:
    """The keys of eleven compilations, each in a directory of its own, and the tokens that the driver got."""
    made = set()
    for number in range(11):
        device = ScriptedDevice(version=version)
        device.priority_matters = priority_matters
        async with CacheStore(tmp_path / f"{version}{token.hex()}{options}{number}") as store, scripted(device) as devices:
            _, outcome = await devices.prepare(some_model(), CacheChoice(store, token), PrepareOptions(**options))
        made.add(outcome.key)
        assert len(outcome.key) == 32
        assert device.tokens not in ([outcome.key], [token])  # drivers never see the app's own token
    return made


async def distinct(*made: set[bytes]) -> None:
    assert [len(each) for each in made] == [1] * len(made)
    assert len(set.union(*made)) == len(made)


async def test_cache_token_different_device_version_strings(tmp_path: Path) -> None:
    await distinct(await keys(tmp_path, "1.0"), await keys(tmp_path, "1.1"))


async def test_cache_token_different_preferences(tmp_path: Path) -> None:
    await distinct(*[await keys(tmp_path, preference=preference) for preference in ExecutionPreference])


async def test_cache_token_different_priorities(tmp_path: Path) -> None:
    await distinct(*[await keys(tmp_path, priority_matters=True, priority=priority) for priority in Priority])


async def test_priorities_share_an_entry_unless_the_device_says_that_they_matter(tmp_path: Path) -> None:
    made = [await keys(tmp_path, priority=priority) for priority in Priority]
    assert len(set.union(*made)) == 1


async def test_cache_token_different_tokens(tmp_path: Path) -> None:
    await distinct(await keys(tmp_path, token=bytes(32)), await keys(tmp_path, token=bytes([1] * 32)))


async def test_cache_token_none(tmp_path: Path) -> None:
    async with scripted(ScriptedDevice()) as devices:
        _, outcome = await devices.prepare(some_model(), None)
    assert outcome.key == b""
