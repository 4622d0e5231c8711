"""NNAPI's VTS `CompilationCachingTests`, row by row, for devices in this process and behind a driver process.

Each test stands for the row of its name; each runs with a float32 and a quantised model, each security test with seeds 0 to 9.
NNAPI leaves a device free not to cache; the devices here do, so where its rows accept either answer these demand the cached one.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.hal import MAX_CACHE_FILES, CacheFiles, CacheHandles, ExecutionPreference, IDevice, PrepareOptions
from tests.caching.copier import Copier
from tests.conformance.cache_files import (
    DRIVER_PROCESS,
    IN_PROCESS,
    TOKEN,
    Files,
    execute,
    invalid,
    load,
    open_device,
    own_state,
    refused,
    runs_as,
    save,
    saved,
)
from tests.conformance.caching_models import KINDS, Kind, chain, input_of, network
from tests.conformance.storing_reference import NAME as STORING_REFERENCE

__all__ = ["own_state"]

pytestmark = pytest.mark.anyio

DEVICES = [
    pytest.param((engine, place), id=f"{name}-{place.replace(' ', '_')}")
    for name, engine in (("reference", STORING_REFERENCE), ("onnxruntime", "onnxruntime"))
    for place in (IN_PROCESS, DRIVER_PROCESS)
]
SEEDS = range(10)
WIDE = 16384
"""Of a chain whose 6.5 MB of constants take a while to read and to verify, which is when its model files change."""

TOCTOU_ITERATIONS = 100


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """One loop for the module, so that a driver process serves all tests of its device; the loops make no difference to a cache."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", params=DEVICES)
async def device(request: pytest.FixtureRequest, anyio_backend: Any) -> AsyncIterator[IDevice]:
    async with open_device(*request.param) as device:
        yield device


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, Kind], aionn.Model]:
    return {
        **{("network", kind): aionn.Model.from_onnx(network(kind)) for kind in KINDS},
        **{("mul", kind): aionn.Model.from_onnx(chain(kind, "Mul")) for kind in KINDS},
        **{("add", kind): aionn.Model.from_onnx(chain(kind, "Add")) for kind in KINDS},
        **{("wide mul", kind): aionn.Model.from_onnx(chain(kind, "Mul", WIDE)) for kind in KINDS},
        **{("wide add", kind): aionn.Model.from_onnx(chain(kind, "Add", WIDE)) for kind in KINDS},
    }


Models = dict[tuple[str, Kind], aionn.Model]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def model(models: Models, kind: Kind) -> aionn.Model:
    return models["network", kind]


@pytest.fixture
async def files(device: IDevice, tmp_path: Path) -> AsyncIterator[Files]:
    with Files(tmp_path / "cache", await device.get_number_of_cache_files_needed()) as files:
        yield files


@pytest.fixture
async def expected(device: IDevice, model: aionn.Model, kind: Kind) -> NDArray[Any]:
    """What the model computes without a cache."""
    prepared = await device.prepare_model(model, PrepareOptions())
    return await outputs_of(prepared, model, kind)


async def outputs_of(prepared: Any, model: aionn.Model, kind: Kind) -> NDArray[Any]:
    (operand,) = model.inputs.values()
    assert operand.dimensions is not None
    found = await execute(prepared, input_of(kind, operand.dimensions))
    await prepared.aclose()
    return found


async def test_get_number_of_cache_files_needed(device: IDevice) -> None:
    needed = await device.get_number_of_cache_files_needed()
    assert 0 < needed.model <= MAX_CACHE_FILES
    assert 0 < needed.data <= MAX_CACHE_FILES
    assert await device.get_number_of_cache_files_needed() == needed


async def test_cache_saving_and_retrieval(device: IDevice, files: Files, model: aionn.Model, kind: Kind, expected: NDArray[Any]) -> None:
    prepared = await save(device, model, files.handles())
    assert prepared.save_outcome == "saved"
    await runs_as(prepared, model, kind, expected)
    files.close()
    loaded = await load(device, files.handles())
    assert list(loaded.inputs.items()) == list(model.inputs.items())
    assert list(loaded.outputs.items()) == list(model.outputs.items())
    await runs_as(loaded, model, kind, expected)


async def test_cache_saving_and_retrieval_non_zero_offset(
    device: IDevice, files: Files, model: aionn.Model, kind: Kind, expected: NDArray[Any]
) -> None:
    saving = files.handles()
    for fd in (*saving.model, *saving.data):
        assert os.write(fd, b"\x7f\x7f") == 2
    await saved(device, model, saving)
    files.close()
    loading = files.handles()
    for fd in (*loading.model, *loading.data):
        assert os.lseek(fd, 1, os.SEEK_SET) == 1
    await runs_as(await load(device, loading), model, kind, expected)


WRONG_NUMBERS = [(1, 0), (-1, 0), (0, 1), (0, -1)]


@pytest.mark.parametrize(("more_model", "more_data"), WRONG_NUMBERS)
async def test_save_to_cache_invalid_num_cache(
    device: IDevice, files: Files, model: aionn.Model, kind: Kind, expected: NDArray[Any], more_model: int, more_data: int
) -> None:
    handles = files.handles(more_model=more_model, more_data=more_data)
    prepared = await save(device, model, handles)
    assert prepared.save_outcome.startswith("wrong_files")
    await runs_as(prepared, model, kind, expected)
    await invalid(device, handles)


@pytest.mark.parametrize(("more_model", "more_data"), WRONG_NUMBERS)
async def test_prepare_model_from_cache_invalid_num_cache(
    device: IDevice, files: Files, model: aionn.Model, more_model: int, more_data: int
) -> None:
    await saved(device, model, files.handles())
    await invalid(device, files.handles(more_model=more_model, more_data=more_data))


def each_handle(needed: CacheFiles) -> list[tuple[str, int]]:
    return [*(("model", index) for index in range(needed.model)), *(("data", index) for index in range(needed.data))]


def with_descriptors(handles: CacheHandles, kind: str, index: int, fds: tuple[int, ...]) -> CacheHandles:
    """The handles with one of them made of other descriptors: two, or none. The HAL here has one descriptor per handle, so a handle
    of two is one too many in its list, and one of none is missing."""
    lists = {"model": list(handles.model), "data": list(handles.data)}
    lists[kind][index : index + 1] = fds
    return CacheHandles(tuple(lists["model"]), tuple(lists["data"]), handles.token)


@pytest.mark.parametrize("length", [0, 31, 33])
async def test_a_token_of_a_wrong_length_saves_nothing_and_loads_nothing(
    device: IDevice, files: Files, model: aionn.Model, kind: Kind, expected: NDArray[Any], length: int
) -> None:
    await saved(device, model, files.handles(TOKEN))
    before = [path.read_bytes() for path in (*files.model_paths, *files.data_paths)]
    prepared = await save(device, model, files.handles(bytes(length)))
    assert prepared.save_outcome.startswith("wrong_token")
    await runs_as(prepared, model, kind, expected)
    assert [path.read_bytes() for path in (*files.model_paths, *files.data_paths)] == before
    error = await refused(device, files.handles(bytes(length)))
    assert error.reason.startswith("wrong_token")


@pytest.mark.parametrize("number", [2, 0])
async def test_save_to_cache_invalid_num_fd(
    device: IDevice, files: Files, model: aionn.Model, kind: Kind, expected: NDArray[Any], number: int
) -> None:
    for which, index in each_handle(files.needed):
        fds = tuple(files.open(files.path(which, index)) for _ in range(number))
        handles = with_descriptors(files.handles(), which, index, fds)
        await runs_as(await save(device, model, handles), model, kind, expected)
        await invalid(device, handles)
        files.close()


@pytest.mark.parametrize("number", [2, 0])
async def test_prepare_model_from_cache_invalid_num_fd(device: IDevice, files: Files, model: aionn.Model, number: int) -> None:
    await saved(device, model, files.handles())
    for which, index in each_handle(files.needed):
        fds = tuple(files.open(files.path(which, index)) for _ in range(number))
        await invalid(device, with_descriptors(files.handles(), which, index, fds))
        files.close()


async def test_save_to_cache_invalid_access_mode(
    device: IDevice, files: Files, model: aionn.Model, kind: Kind, expected: NDArray[Any]
) -> None:
    for which, index in each_handle(files.needed):
        handles = with_descriptors(files.handles(), which, index, (files.open(files.path(which, index), os.O_RDONLY),))
        prepared = await save(device, model, handles)
        assert prepared.save_outcome.startswith("bad_handle")
        await runs_as(prepared, model, kind, expected)
        await invalid(device, handles)
        files.close()


async def test_prepare_model_from_cache_invalid_access_mode(device: IDevice, files: Files, model: aionn.Model) -> None:
    await saved(device, model, files.handles())
    for which, index in each_handle(files.needed):
        fd = files.open(files.path(which, index), os.O_WRONLY)
        error = await refused(device, with_descriptors(files.handles(), which, index, (fd,)))
        assert error.reason.startswith("bad_handle")
        files.close()


async def test_a_device_saves_nothing_and_loads_nothing_under_handles_of_one_file_twice(
    device: IDevice, files: Files, model: aionn.Model, kind: Kind, expected: NDArray[Any]
) -> None:
    good = files.handles()
    handles = CacheHandles((*good.model[:-1], good.data[0]), good.data, good.token)
    await runs_as(await save(device, model, handles), model, kind, expected)
    await refused(device, handles)


# --- races between a check and its use -------------------------------------------------------------------------------


ADD_TOKEN = b"\x01" + bytes(31)


class Race:
    """The MUL chain saved under one token, the ADD chain to be saved under the next; data files are shared."""

    def __init__(self, device: IDevice, models: Models, kind: Kind, directory: Path, needed: CacheFiles, wide: str) -> None:
        self.device, self.kind = device, kind
        self.mul, self.add = models[f"{wide}mul", kind], models[f"{wide}add", kind]
        self.mul_files, self.files = Files(directory / "mul", needed), Files(directory / "add", needed)
        self.pairs = list(zip(self.mul_files.model_paths, self.files.model_paths, strict=True))
        self.outcomes: Counter[bool] = Counter()

    async def begin(self) -> None:
        await saved(self.device, self.mul, self.mul_files.handles())
        self.expected = await outputs_of(await save(self.device, self.add, self.handles()), self.add, self.kind)
        self.files.close()
        other = await outputs_of(await load(self.device, self.mul_files.handles()), self.mul, self.kind)
        assert not np.allclose(other.astype(np.float64), self.expected.astype(np.float64), rtol=0.1)
        self.mul_files.close()

    def handles(self) -> CacheHandles:
        return self.files.handles(ADD_TOKEN)

    def copier(self, longest_s: float) -> Copier:
        """Puts the MUL chain's model files, and the ADD chain's own, into the ADD chain's entry in turn."""
        return Copier([(target, source.read_bytes(), target.read_bytes()) for source, target in self.pairs], longest_s)

    async def add_or_nothing(self) -> None:
        """Load: refused, or the ADD chain, in every output."""
        try:
            prepared = await load(self.device, self.handles())
        except aionn.CompilationError as error:
            # Nothing that was not verified has reached the engine.
            assert error.reason.split(":")[0] in {"wrong_bytes", "wrong_length"}, error.reason
            self.outcomes[False] += 1
            return
        finally:
            self.files.close()
        await runs_as(prepared, self.add, self.kind, self.expected)
        self.outcomes[True] += 1

    @property
    def over(self) -> bool:
        """Whether it has been tried often enough, and both outcomes have occurred."""
        return self.outcomes.total() >= TOCTOU_ITERATIONS and len(self.outcomes) == 2


@pytest.fixture
async def race(device: IDevice, models: Models, kind: Kind, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Race]:
    wide = getattr(request, "param", "")
    race = Race(device, models, kind, tmp_path, await device.get_number_of_cache_files_needed(), wide)
    await race.begin()
    yield race
    race.files.close()


async def test_save_to_cache_toctou(race: Race) -> None:
    began = time.monotonic()
    await saved(race.device, race.add, race.handles())
    race.files.close()
    took_s = time.monotonic() - began
    with anyio.fail_after(120):
        while not race.over:
            with race.copier(took_s):
                await (await save(race.device, race.add, race.handles())).aclose()
            race.files.close()
            await race.add_or_nothing()
            await saved(race.device, race.add, race.handles())
            race.files.close()


@pytest.mark.parametrize("race", ["wide "], ids=["wide"], indirect=True)
async def test_prepare_from_cache_toctou(race: Race) -> None:
    await saved(race.device, race.add, race.handles())
    race.files.close()
    began = time.monotonic()
    prepared = await load(race.device, race.handles())
    took_s = time.monotonic() - began
    await prepared.aclose()
    race.files.close()
    with race.copier(took_s), anyio.fail_after(120):
        while not race.over:
            await race.add_or_nothing()


async def test_replace_security_sensitive_cache(race: Race) -> None:
    await saved(race.device, race.add, race.handles())
    race.files.close()
    await race.add_or_nothing()
    assert race.outcomes == {True: 1}
    for source, target in race.pairs:
        shutil.copy(source, target)
    error = await refused(race.device, race.handles())
    assert error.reason.split(":")[0] in {"wrong_bytes", "wrong_length"}


# --- the security fixture ---------------------------------------------------------------------------------------------


def flip_one_bit(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def append_some(content: bytes, dice: random.Random) -> bytes:
    return content + dice.randbytes(dice.randint(1, 256))


async def tampered(
    device: IDevice, files: Files, model: aionn.Model, paths: list[Path], change: Callable[[bytes], bytes], reason: str
) -> None:
    """Each file in turn is saved, changed and loaded: GENERAL_FAILURE, also for data files, where NNAPI allows wrong outputs."""
    for path in paths:
        await saved(device, model, files.handles())
        path.write_bytes(change(path.read_bytes()))
        error = await refused(device, files.handles())
        assert error.reason.startswith(reason)
        files.close()


@pytest.mark.parametrize("seed", SEEDS)
async def test_corrupted_model_cache(device: IDevice, files: Files, model: aionn.Model, seed: int) -> None:
    dice = random.Random(seed)
    await tampered(device, files, model, files.model_paths, lambda content: flip_one_bit(content, dice), "wrong_bytes")


@pytest.mark.parametrize("seed", SEEDS)
async def test_wrong_length_model_cache(device: IDevice, files: Files, model: aionn.Model, seed: int) -> None:
    dice = random.Random(seed)
    await tampered(device, files, model, files.model_paths, lambda content: append_some(content, dice), "wrong_length")


@pytest.mark.parametrize("seed", SEEDS)
async def test_corrupted_data_cache(device: IDevice, files: Files, model: aionn.Model, seed: int) -> None:
    dice = random.Random(seed)
    await tampered(device, files, model, files.data_paths, lambda content: flip_one_bit(content, dice), "wrong_bytes")


@pytest.mark.parametrize("seed", SEEDS)
async def test_wrong_length_data_cache(device: IDevice, files: Files, model: aionn.Model, seed: int) -> None:
    dice = random.Random(seed)
    await tampered(device, files, model, files.data_paths, lambda content: append_some(content, dice), "wrong_length")


@pytest.mark.parametrize("seed", SEEDS)
async def test_wrong_token(device: IDevice, files: Files, model: aionn.Model, kind: Kind, expected: NDArray[Any], seed: int) -> None:
    own = random.Random(f"{seed} {kind}").randbytes(32)
    await saved(device, model, files.handles(own))
    error = await refused(device, files.handles(flip_one_bit(own, random.Random(seed))))
    assert error.reason.startswith("no_integrity_record")
    await runs_as(await load(device, files.handles(own)), model, kind, expected)


# --- what AOSP's rows leave out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["model", "data"])
async def test_a_file_cut_to_any_length_is_refused(device: IDevice, files: Files, model: aionn.Model, which: str) -> None:
    await saved(device, model, files.handles())
    path = files.path(which, 0)
    whole = path.read_bytes()
    for length in sorted({0, 1, 7, 8, len(whole) // 2, len(whole) - 9, len(whole) - 8, len(whole) - 1} - {len(whole)}):
        path.write_bytes(whole[: max(length, 0)])
        await refused(device, files.handles())
        files.close()


async def test_empty_files_are_refused(device: IDevice, files: Files) -> None:
    """What a device that declined, or a crash, leaves behind; NNAPI hands them to the driver again and again."""
    await refused(device, files.handles(b"\x55" * 32))


async def test_a_preparation_for_another_preference_loads_what_was_stored(
    device: IDevice, files: Files, model: aionn.Model, kind: Kind, expected: NDArray[Any]
) -> None:
    """Preference and priority shape the key and the artifact, and are not a part of loading one."""
    await saved(device, model, files.handles())
    for preference in ExecutionPreference:
        prepared = await device.prepare_model_from_cache(PrepareOptions(preference=preference), files.handles())
        await runs_as(prepared, model, kind, expected)


async def test_the_clients_descriptors_stay_its_own(device: IDevice, files: Files, model: aionn.Model) -> None:
    handles = files.handles(TOKEN)
    for fd in (*handles.model, *handles.data):
        os.lseek(fd, 3, os.SEEK_SET)
    await saved(device, model, handles)
    await (await load(device, handles)).aclose()
    assert [os.lseek(fd, 0, os.SEEK_CUR) for fd in (*handles.model, *handles.data)] == [3] * (files.needed.model + files.needed.data)
