"""Models that travel through a store: each kind of model arrives with the same token, and nothing else is taken."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

import aionn
from aionn.caching.outcomes import MissReason, Refusal
from aionn.errors import CallerError
from aionn.fleet import StoreError, content_of, requests
from aionn.fleet.artifact_store import ArtifactStore, claimed_files
from aionn.fleet.models import fetch_model, object_size, put_model
from aionn.fleet.places import model_path
from aionn.fleet.requests import open_address
from aionn.fleet.sweeping import check_store, sweep
from aionn.hal import Operand, OperandType
from aionn.memory.memory import Memory
from tests.real_models import carried, some_input
from tests.scaled_model import scaled_model

FROM_ROOT = f"/tmp/aionn-escaped-{os.getpid()}"
CONTENT = scaled_model(np.arange(5000, dtype=np.float32))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose weights lie in a folder beside it."""
    folder = tmp_path / "source"
    (folder / "weights").mkdir(parents=True)
    message = onnx.load_model_from_string(CONTENT)
    onnx.save_model(message, folder / "model.onnx", save_as_external_data=True, location="weights/data", size_threshold=64)
    return folder


async def model_of(kind: str, folder: Path) -> aionn.Model:
    match kind:
        case "loaded":
            return await aionn.Model.load(carried("silero"))
        case "loaded, weights beside":
            return await aionn.Model.load(folder / "model.onnx")
        case "read":
            return aionn.Model.from_onnx(carried("silero_branching"))
        case "read, weights beside":
            return aionn.Model.from_onnx(folder / "model.onnx")
        case "bytes":
            return aionn.Model.from_onnx(carried("orientation").read_bytes())
        case "bytes, weights in memory":
            weights = (folder / "weights/data").read_bytes()
            memory = Memory.allocate(len(weights))
            memory.view()[: len(weights)] = weights
            return aionn.Model.from_onnx((folder / "model.onnx").read_bytes(), memories={"weights/data": memory})
    raise AssertionError(kind)


KINDS = ("loaded", "loaded, weights beside", "read", "read, weights beside", "bytes", "bytes, weights in memory")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_arrives_with_its_token(store: ArtifactStore, tmp_path: Path, folder: Path, kind: str) -> None:
    model = await model_of(kind, folder)
    files = await content_of(model)
    assert files is not None
    assert await put_model(store, await model.digest(), files)
    assert not await put_model(store, model.token, files)  # it is there
    (tmp_path / "work").mkdir()
    fetched = await fetch_model(store, model.token, object_size(files), tmp_path / "work")
    assert isinstance(fetched, aionn.Model), fetched
    assert fetched.token == model.token
    assert fetched.inputs.keys() == model.inputs.keys()


@pytest.mark.anyio
async def test_a_large_model_is_written_in_parts(store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MULTIPART_BYTES", 1_000_000)
    monkeypatch.setattr(requests, "_PART_BYTES", 5 << 20)  # the least that S3 takes
    model = await aionn.Model.load(carried("detector"))
    files = await content_of(model)
    assert files is not None
    await put_model(store, model.token, files)
    (tmp_path / "work").mkdir()
    assert isinstance(await fetch_model(store, model.token, object_size(files), tmp_path / "work"), aionn.Model)


@pytest.mark.anyio
async def test_a_store_that_sends_more_than_the_model_fills_no_disk(store: ArtifactStore, tmp_path: Path) -> None:
    model = aionn.Model.from_onnx(CONTENT)
    files = await content_of(model)
    assert files is not None
    await store.requests.replace(model_path(model.token), bytes(3_000_000))
    (tmp_path / "work").mkdir()
    found = await fetch_model(store, model.token, object_size(files), tmp_path / "work")
    assert isinstance(found, Refusal)
    assert found.reason is MissReason.WRONG_BYTES
    assert f"has 3000000 bytes, expected at most {object_size(files)}" in found.detail
    assert (tmp_path / "work/object").stat().st_size == 0


@pytest.mark.anyio
async def test_a_model_that_another_app_has_sent_in_another_size_is_fetched(store: ArtifactStore, tmp_path: Path) -> None:
    model = aionn.Model.from_onnx(CONTENT)
    files = await content_of(model)
    assert files is not None
    await put_model(store, model.token, files)
    (tmp_path / "work").mkdir()
    found = await fetch_model(store, model.token, 4 * object_size(files), tmp_path / "work")
    assert isinstance(found, aionn.Model)
    assert await found.digest() == model.token


@pytest.mark.anyio
async def test_what_cannot_be_sent_has_no_files(folder: Path) -> None:
    operand = Operand(OperandType.FLOAT32, (1,))
    opaque = aionn.Model.from_bytes(b"weights", inputs={"x": operand}, outputs={"y": operand}, format="tflite")
    assert await content_of(opaque) is None
    large = onnx.load_model_from_string(CONTENT)
    large.doc_string = "x" * (17 << 20)
    assert await content_of(aionn.Model.from_onnx(large.SerializeToString())) is None
    read = aionn.Model.from_onnx(folder / "model.onnx")
    (folder / "model.onnx").write_bytes(scaled_model(np.ones(3, np.float32)))
    assert await content_of(read) is None


@pytest.mark.anyio
async def test_a_file_that_changes_while_it_is_sent_is_not_stored(store: ArtifactStore, folder: Path) -> None:
    model = await aionn.Model.load(folder / "model.onnx")
    files = await content_of(model)
    assert files is not None
    with (folder / "weights/data").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CallerError, match="has changed since it was loaded"):
        await put_model(store, model.token, files)
    assert await store.requests.find(model_path(model.token)) is None


def packed(*files: tuple[str, bytes]) -> bytes:
    listed = msgspec.msgpack.encode([(name, len(content)) for name, content in files])
    return b"aionn.model\x01" + len(listed).to_bytes(4, "little") + listed + b"".join(content for _, content in files)


DAMAGED = {
    "nothing": b"",
    "not a model": b"<html>",
    "a model of another release": packed(("", CONTENT)).replace(b"\x01", b"\x02", 1),
    "a list that is cut": packed(("", CONTENT))[:16],
    "a list that is too long": packed(("", CONTENT), ("a" * (1 << 20), b"")),
    "a file that is cut": packed(("", CONTENT))[:-1],
    "more than the list says": packed(("", CONTENT)) + b"x",
    "no model in the list": packed(("weights", b"x")),
    "a name twice": packed(("", CONTENT), ("a", b""), ("a", b"")),
    "not ONNX": packed(("", b"\xff" * 100)),
    "an empty model": packed(("", b"")),
    "another model": packed(("", scaled_model(np.ones(9, np.float32)))),
}
SOUND = {
    "another file with the name of its own": packed(("", CONTENT), ("model.onnx", b"x")),
    "a name that leads out": packed(("", CONTENT), ("../../escaped", b"x")),
    "a name from the root": packed(("", CONTENT), (FROM_ROOT, b"x")),
    "a name that is a folder": packed(("", CONTENT), ("a/b", b""), ("a", b"x")),
    "a name that is too long": packed(("", CONTENT), ("a" * 300, b"x")),
}


DAMAGED_REASONS = (MissReason.UNREADABLE, MissReason.WRONG_BYTES)


def escaped(folder: Path) -> bool:
    return any(folder.rglob("escaped")) or Path(FROM_ROOT).exists()


@pytest.mark.anyio
@pytest.mark.parametrize("what", DAMAGED)
async def test_a_damaged_model_is_refused_and_can_be_sent_anew(tmp_path: Path, what: str) -> None:
    store = ArtifactStore(open_address(tmp_path / "store", patience_s=20, make=True))
    model = aionn.Model.from_onnx(CONTENT)
    await store.requests.replace(model_path(model.token), DAMAGED[what])
    (tmp_path / "work/deeper").mkdir(parents=True)
    found = await fetch_model(store, model.token, len(DAMAGED[what]), tmp_path / "work/deeper")
    assert isinstance(found, Refusal)
    assert found.reason in DAMAGED_REASONS, found
    files = await content_of(model)
    assert files is not None
    assert await put_model(store, model.token, files, anew=True)
    (tmp_path / "again").mkdir()
    assert isinstance(await fetch_model(store, model.token, object_size(files), tmp_path / "again"), aionn.Model)


@pytest.mark.anyio
@pytest.mark.parametrize("what", DAMAGED)
async def test_a_check_names_and_removes_a_damaged_model(tmp_path: Path, what: str) -> None:
    store = ArtifactStore(open_address(tmp_path / "store", patience_s=20, make=True))
    model, whole = aionn.Model.from_onnx(CONTENT), aionn.Model.from_onnx(scaled_model(np.full(9, 2.0, np.float32)))
    files = await content_of(model)
    others = await content_of(whole)
    assert files is not None
    assert others is not None
    await put_model(store, whole.token, others)
    await store.requests.replace(model_path(model.token), DAMAGED[what])
    found = await check_store(store, claimed_files, remove=True)
    assert (found.models, found.removed) == (2, 1)
    assert found.size_bytes == object_size(others) + len(DAMAGED[what])
    assert [(one.path, one.reason in DAMAGED_REASONS) for one in found.bad] == [(model_path(model.token), True)]
    assert await store.requests.find(model_path(whole.token)) is not None
    await put_model(store, model.token, files)
    assert (await check_store(store, claimed_files)).bad == ()


@pytest.mark.anyio
@pytest.mark.parametrize("what", SOUND)
async def test_a_name_of_a_file_is_never_one_of_the_file_system(tmp_path: Path, what: str) -> None:
    store = ArtifactStore(open_address(tmp_path / "store", patience_s=20, make=True))
    model = aionn.Model.from_onnx(CONTENT)
    await store.requests.replace(model_path(model.token), SOUND[what])
    (tmp_path / "work/deeper").mkdir(parents=True)
    found = await fetch_model(store, model.token, len(SOUND[what]), tmp_path / "work/deeper")
    assert isinstance(found, aionn.Model)
    assert found.token == model.token
    assert (await check_store(store, claimed_files, remove=True)).bad == ()
    assert not escaped(tmp_path)


NAMES = ("a" * 300, "a/" * 3000 + "b", "../escaped", FROM_ROOT, "weights/../weights/data", "./data", "nul\0", "1", "model.onnx")


@pytest.mark.anyio
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:12].replace("\0", "0"))
async def test_weights_in_memory_arrive_under_any_name(tmp_path: Path, name: str) -> None:
    """An app may give its weights in memory under a name that no file can have. The model is whole all the same."""
    message = onnx.load_model_from_string(CONTENT)
    onnx.external_data_helper.convert_model_to_external_data(message, location="given", size_threshold=64)
    onnx.save_model(message, tmp_path / "model.onnx")
    message = onnx.load_model(tmp_path / "model.onnx", load_external_data=False)
    for tensor in message.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    weights = (tmp_path / "given").read_bytes()
    memory = Memory.allocate(len(weights))
    memory.view()[: len(weights)] = weights
    model = aionn.Model.from_onnx(message.SerializeToString(), memories={name: memory})
    files = await content_of(model)
    assert files is not None
    assert [file.name for file in files] == ["", name]
    store = ArtifactStore(open_address(tmp_path / "store", patience_s=20, make=True))
    await put_model(store, model.token, files)
    found = await check_store(store, claimed_files, remove=True)
    assert (found.models, found.bad) == (1, ())
    (tmp_path / "real").mkdir()
    (tmp_path / "work").symlink_to(tmp_path / "real")
    fetched = await fetch_model(store, model.token, object_size(files), tmp_path / "work")
    assert isinstance(fetched, aionn.Model), fetched
    inputs = {name: some_input(operand) for name, operand in model.inputs.items()}
    async with aionn.Runtime(state_dir=tmp_path / "state", start=()) as runtime:
        outputs = [await (await runtime.compile(one, devices=["reference"])).compute(inputs) for one in (model, fetched)]
    for one, other in zip(outputs[0].values(), outputs[1].values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not escaped(tmp_path)


@pytest.mark.anyio
async def test_a_check_of_models_in_each_kind_of_store(store: ArtifactStore) -> None:
    model = aionn.Model.from_onnx(CONTENT)
    files = await content_of(model)
    assert files is not None
    await put_model(store, model.token, files)
    assert (await check_store(store, claimed_files)).bad == ()
    contents = packed(("", CONTENT))
    await store.requests.replace(model_path(model.token), contents[:-200] + b"\x01" + contents[-199:])
    (bad,) = (await check_store(store, claimed_files)).bad
    assert bad.reason in DAMAGED_REASONS
    assert f"{model_path(model.token)} holds another model" in bad.detail


@pytest.mark.anyio
async def test_a_check_on_a_machine_without_room_removes_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(open_address(tmp_path / "store", patience_s=20, make=True))
    model = aionn.Model.from_onnx(CONTENT)
    files = await content_of(model)
    assert files is not None
    await put_model(store, model.token, files)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreError, match=f"checking {model_path(model.token)} failed: writing the model's files: .*TMPDIR"):
            await check_store(store, claimed_files, remove=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StoreError, match="making a temporary folder"):
        await check_store(store, claimed_files, remove=True)
    monkeypatch.undo()
    found = await check_store(store, claimed_files)
    assert (found.models, found.bad) == (1, ())


def test_a_check_of_a_large_model_takes_little_memory(tmp_path: Path) -> None:
    size = 192 << 20
    source, store = tmp_path / "source", tmp_path / "store"
    source.mkdir()
    weights = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[size // 4], data_location=onnx.TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value="data")
    graph = onnx.helper.make_graph([], "large", [], [], [weights])
    (source / "model.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    with (source / "data").open("wb") as file:
        file.truncate(size)

    async def token() -> bytes:
        return await (await aionn.Model.load(source / "model.onnx")).digest()

    own = (source / "model.onnx").read_bytes()
    listed = msgspec.msgpack.encode([("", len(own)), ("data", size)])
    path = store / model_path(asyncio.run(token()))
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.write(b"aionn.model\x01" + len(listed).to_bytes(4, "little") + listed + own)
        file.truncate(file.tell() + size)
    program = (
        "import re, sys; from pathlib import Path; from aionn.cli import main\n"
        "assert main(['fleet', 'verify', sys.argv[1]]) == 0\n"
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
    )
    environment = {**os.environ, "AIONN_TRUSTED_BUILDERS": os.fspath(tmp_path / "keyring"), "TMPDIR": os.fspath(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program, store], env=environment, check=True, capture_output=True, text=True)
    found, most_kib = ran.stdout.splitlines()
    assert found.startswith("0 statements, 0 files, 1 model, ")
    assert int(most_kib) << 10 < size


@pytest.mark.anyio
async def test_a_sweep_removes_old_models_and_leaves_young_ones(tmp_path: Path) -> None:
    store = ArtifactStore(open_address(tmp_path / "store", patience_s=20, make=True))
    young, old = aionn.Model.from_onnx(CONTENT), aionn.Model.from_onnx(scaled_model(np.ones(9, np.float32)))
    for model in (young, old):
        files = await content_of(model)
        assert files is not None
        await put_model(store, model.token, files)
    path = tmp_path / "store" / model_path(old.token)
    os.utime(path, (1e9, 1e9))
    assert (await sweep(store, claimed_files, dry_run=True)).models == 1
    report = await sweep(store, claimed_files)
    assert (report.models, report.files, report.statements) == (1, 0, 0)
    assert [one.path for one in await store.requests.listing("model")] == [model_path(young.token)]
    os.utime(tmp_path / "store" / model_path(young.token), (1e9, 1e9))
    files = await content_of(young)
    assert files is not None
    assert await put_model(store, young.token, files)  # so old that a sweep could take it before a machine has fetched it
