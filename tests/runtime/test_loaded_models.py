"""`Model.load`: a model is opened, and read when that is needed. Token, hits that read nothing, files that change, errors."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import aionn
from aionn import file_ranges
from aionn.caching.manifest import Manifest, decode_manifest, encode_manifest
from aionn.caching.outcomes import CacheOutcomeKind, MissReason
from aionn.errors import AionnError, CallerError
from aionn.file_ranges import FileRange, StoppedError, digest_ranges
from aionn.graph import digest, files, wire
from aionn.graph.arrays import constant_arrays
from aionn.graph.checking import CONSTANT_TYPES
from aionn.graph.files import Beside, GivenBytes
from aionn.graph.unchanged import changeable_contents
from aionn.graph.wire import Survey, survey
from aionn.hal.model import known_contents, known_token, may_change
from aionn.testing import identity_model
from tests.engines.onnx_graphs import model_of, value
from tests.runtime.test_external_data import ALL_PATHS, tensor, tensors_of

HIT, MISS, NO_CACHE = CacheOutcomeKind.HIT, CacheOutcomeKind.MISS, CacheOutcomeKind.NO_CACHE
N = 100_000  # floats: more bytes than a range that is digested where it is read
OWN = b"an app's own token of 32 bytes.."


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    digest._known.clear()


def floats(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).integers(1, 100, N).astype(np.float32)


def adding(seed: int, name: str = "w") -> onnx.ModelProto:
    """y = x + w, with a name in front that puts the weights at an odd offset."""
    constants = {name: floats(seed)}
    return model_of([helper.make_node("Add", ["x", name], ["y"], name="add")], [value("x", [N])], [value("y", [N])], constants)


def inside(seed: int, directory: Path) -> Path:
    path = directory / "model.onnx"
    for padding in range(8):  # until the weights begin at no multiple of their elements' size
        model = adding(seed)
        model.producer_name = "p" * padding
        content = model.SerializeToString()
        if content.index(floats(seed).tobytes()) % 4:
            path.write_bytes(content)
            return path
    raise AssertionError("every padding aligns the weights")


def beside(seed: int, directory: Path) -> Path:
    path = directory / "model.onnx"
    (directory / "weights.bin").unlink(missing_ok=True)
    onnx.save_model(adding(seed), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


KINDS = pytest.mark.parametrize("kind", [inside, beside], ids=["inside", "beside"])


# --- the token -------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.anyio
async def test_every_way_to_a_file_gives_the_same_token(kind: Callable[[int, Path], Path], tmp_path: Path) -> None:
    path = kind(1, tmp_path)
    model = await aionn.Model.load(path)
    with pytest.raises(CallerError, match=r"await model\.digest"):
        _ = model.token
    assert await model.digest() == model.token == aionn.Model.from_onnx(path).token
    assert (model.name, known_token(model)) == ("model.onnx", model.token)
    if kind is inside:
        assert model.token == aionn.Model.from_onnx(path.read_bytes()).token


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def survey_of(content: bytes) -> Survey:
    return survey(lambda offset, length: content[offset : offset + length], len(content))


def digest_of(content: bytes) -> digest.Digested:
    return digest.digest_model(GivenBytes(memoryview(content), "the model"), Beside("the model", (), {}))


GOLDEN = "4a002c8189c7089216e878a6bd8c114a5468728ce4da7ad34803fa45bddbd6b4"


def test_the_format_of_a_token_is_pinned() -> None:
    """A change of the format needs another context in `digest`. The bytes here depend on no version of the `onnx` package."""
    tensor = b"\x08\x88\x27\x10\x03" + field(8, b"w") + field(9, bytes(range(250)) * 20)
    node = field(1, field(1, b"x") + field(2, b"y") + field(4, b"Relu"))
    gone = field(5, b"\x70\x01" + field(13, field(1, b"location") + field(2, b"gone")))
    content = b"\x08\x08" + field(7, node + field(5, tensor) + gone)
    assert digest_of(content).token.hex() == GOLDEN


def test_a_walk_enters_every_field_that_leads_to_a_tensor() -> None:
    names: dict[str, Any] = {
        "model": onnx.ModelProto, "training": onnx.TrainingInfoProto, "graph": onnx.GraphProto, "node": onnx.NodeProto,
        "sparse": onnx.SparseTensorProto, "attribute": onnx.AttributeProto, "function": onnx.FunctionProto, "tensor": TensorProto,
    }  # fmt: skip
    kinds = {message.DESCRIPTOR.full_name: kind for kind, message in names.items()}
    assert {path[-1] for path in ALL_PATHS} == {"t", "tensors", "values", "indices", "initializer"}
    for kind, message in names.items():
        if kind == "tensor":
            continue
        wanted = {entry.number: kinds[entry.message_type.full_name] for entry in message.DESCRIPTOR.fields
                  if entry.message_type is not None and entry.message_type.full_name in kinds}  # fmt: skip
        single = {entry.number for entry in message.DESCRIPTOR.fields if entry.number in wanted and not entry.is_repeated}
        assert wire._ENTERED[kind] == wanted
        assert wire._SINGLE.get(kind, frozenset()) == single


def test_the_sizes_of_elements_are_those_of_the_types_that_may_lie_in_pools() -> None:
    assert {number: kind.element_bytes for number, kind in CONSTANT_TYPES.items()} == files._ELEMENT_BYTES


def test_a_tensor_is_seen_wherever_it_stands() -> None:
    for path in ALL_PATHS:
        for large in (False, True):
            model = onnx.ModelProto()
            message: Any = model
            for name in path:
                child = getattr(message, name)
                message = child.add() if message.DESCRIPTOR.fields_by_name[name].is_repeated else child
            message.dims.extend([3, 5])
            message.data_type = TensorProto.FLOAT
            if large:
                message.raw_data = b"r" * 5000
            else:
                message.data_location = TensorProto.EXTERNAL
                message.external_data.add(key="location", value="f")
                message.external_data.add(key="offset", value="7")
            content = model.SerializeToString()
            found = survey_of(content)
            if large:
                assert [content[start:end] for start, end in found.spans] == [b"r" * 5000]
            else:
                assert found.outside == [wire.Outside({"location": "f", "offset": "7"}, (3, 5), TensorProto.FLOAT)]
            whole = wire.excise(found, [content[start:end] for start, end in found.kept])
            left = onnx.ModelProto.FromString(whole.message)
            assert (len(whole.message) < 1000, b"rrrr" in whole.message) == (True, False)
            (tensor,) = tensors_of(left)
            assert {entry.key: entry.value for entry in tensor.external_data} == (
                {whole.key: "0"} if large else {"location": "f", "offset": "7"}
            )


@given(st.lists(st.integers(0, 9000), max_size=6), st.integers(0, 200), st.data())
def test_the_ranges_of_a_token_are_the_whole_file(sizes: list[int], padding: int, data: st.DataObject) -> None:
    """Records have one length, and their ranges follow each other. So two files with one token have the same bytes."""
    tensors = b"".join(field(5, b"\x10\x03" + field(9, bytes([index]) * size)) for index, size in enumerate(sizes))
    content = field(2, b"p" * padding) + field(7, tensors)
    found = survey_of(content)
    assert len(found.spans) == sum(size > wire.LARGE_BYTES for size in sizes)
    turns = [place for pair in zip(found.kept, [*found.spans, (0, 0)], strict=True) for place in pair][:-1]
    assert b"".join(content[start:end] for start, end in turns) == content
    at = data.draw(st.integers(0, len(content) - 1))
    other = bytearray(content)
    other[at] ^= data.draw(st.integers(1, 255))
    with suppress(CallerError):  # it need not be a message any more
        assert digest_of(bytes(other)).token != digest_of(content).token


def test_bytes_cannot_move_between_what_a_token_is_made_of() -> None:
    """The same bytes, cut elsewhere: between spans, between a span and the rest, between a file and another."""
    made = [
        field(7, field(5, field(9, b"a" * first)) + field(5, field(9, b"a" * (20000 - first)))) for first in (4097, 5000, 10000, 15000, 100)
    ]
    assert len({digest_of(content).token for content in made}) == len(made)


def test_a_tensor_in_two_parts_is_refused() -> None:
    """Protobuf would merge them, so neither half shows where the tensor's bytes lie."""
    outside = field(13, field(1, b"location") + field(2, b"f"))
    halves = field(5, b"\x70\x01") + field(5, outside)  # attribute.t, twice
    content = field(7, field(1, field(5, halves)))
    assert onnx.ModelProto.FromString(content).graph.node[0].attribute[0].t.data_location == TensorProto.EXTERNAL
    with pytest.raises(CallerError, match="a message of kind 'attribute' has its field 5 twice"):
        digest_of(content)


# --- reading ---------------------------------------------------------------------------------------------------------


class Reads:
    """Records what this process reads of files, and in which thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        self.threads: set[int] = set()

        def recording(act: Callable[..., Any]) -> Callable[..., Any]:
            def read(fd: int, *arguments: Any) -> Any:
                got = act(fd, *arguments)
                name = os.readlink(f"/proc/self/fd/{fd}")
                if name.endswith((".onnx", ".bin")):
                    self.bytes += got if isinstance(got, int) else len(got)
                    self.threads.add(threading.get_ident())
                return got

            return read

        for name in ("pread", "preadv", "read"):
            patch.setattr(os, name, recording(getattr(os, name)))


def mappings() -> str:
    return Path("/proc/self/maps").read_text()


@KINDS
@pytest.mark.anyio
async def test_weights_stay_in_their_file_and_are_not_mapped(kind: Callable[[int, Path], Path], tmp_path: Path) -> None:
    path = kind(1, tmp_path)
    model = await aionn.Model.load(path)
    await model.digest()
    assert list(model.inputs) == ["x"]
    (pool,), (constant,) = model.pools, model.constants
    assert may_change(pool)
    assert (constant.location.offset % 4 != 0) == (kind is inside)
    assert str(tmp_path) not in mappings()
    assert known_contents(model) == changeable_contents(model)
    np.testing.assert_array_equal(constant_arrays(model)["w"], floats(1))


@pytest.mark.anyio
async def test_the_contents_are_known_also_when_the_graph_is_read_before_the_digest(tmp_path: Path) -> None:
    model = await aionn.Model.load(inside(1, tmp_path))
    await model.read()
    assert (known_contents(model), known_token(model)) == (b"", b"")
    await model.digest()
    assert known_contents(model) == changeable_contents(model)


def test_a_model_that_no_descriptor_is_left_for_is_not_called_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(identity_model())
    aionn.Model.from_onnx(path)  # imports what it needs
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with pytest.raises(CallerError, match=r"Too many open files\); close files or raise the limit"):
            aionn.Model.from_onnx(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(free)


@pytest.mark.anyio
async def test_a_model_closes_its_files_when_it_goes(tmp_path: Path) -> None:
    path = beside(1, tmp_path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    model = await aionn.Model.load(path)
    await model.digest()
    await model.read()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@KINDS
@pytest.mark.anyio
async def test_what_is_read_when(kind: Callable[[int, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit reads no graph; with a token of the app's own it reads nothing. Nothing is ever read in the thread of the loop."""
    path, x = kind(1, tmp_path), floats(9)
    reads = Reads(monkeypatch)
    async with aionn.Runtime() as runtime:

        async def compiled(**options: Any) -> tuple[Any, aionn.Model, int]:
            digest._known.clear()
            model, before = await runtime.load(path), reads.bytes
            compilation = await runtime.compile(model, devices=("onnxruntime",), **options)
            took = reads.bytes - before
            np.testing.assert_array_equal((await compilation.compute({"x": x}))["y"], x + floats(1))
            assert (list(model.inputs), list(model.outputs)) == (["x"], ["y"])
            return compilation.outcomes[0].kind, model, took

        weights, cache = N * 4, tmp_path / "cache"
        kinds = []
        for options, digests, reads_graph in (
            ({}, 0, True),
            ({"cache_dir": cache}, 1, True),
            ({"cache_dir": cache}, 1, False),
            ({"cache_dir": cache, "token": OWN}, 1, True),
            ({"cache_dir": cache, "token": OWN}, 0, False),
        ):
            outcome, model, took = await compiled(**options)
            kinds.append(outcome)
            assert ("graph" in model.__dict__, bool(known_token(model))) == (reads_graph, digests == 1)
            assert weights * digests <= took < weights * digests + 200_000
            if outcome is HIT and not digests:
                assert took == 0
        assert kinds == [NO_CACHE, MISS, HIT, MISS, HIT]
        assert threading.get_ident() not in reads.threads
        assert reads.threads
        with pytest.raises(CallerError, match="token without cache_dir"):
            await runtime.compile(await runtime.load(path), token=OWN)


def test_a_hit_imports_no_onnx(tmp_path: Path) -> None:
    program = """if True:
        import asyncio, sys, aionn
        async def main():
            async with aionn.Runtime() as runtime:
                model = await runtime.load(sys.argv[1])
                compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=sys.argv[2])
                kind = compilation.outcomes[0].kind.value
                await model.digest()
                print(kind, list(model.inputs), "onnx" in sys.modules, "google.protobuf" in sys.modules)
        asyncio.run(main())"""
    path = inside(1, tmp_path)
    found = []
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", program, path, tmp_path / "cache"], capture_output=True, text=True, check=True)
        found.append(ended.stdout.strip())
    assert found == ["miss ['x'] True True", "hit ['x'] False False"]


def test_a_digest_needs_neither_onnx_nor_numpy() -> None:
    program = "import sys, aionn.graph.digest; print([name for name in ('onnx', 'numpy', 'google.protobuf') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


# --- broken files ----------------------------------------------------------------------------------------------------


def _outside(model: onnx.ModelProto, **entries: str) -> None:
    (tensor,) = model.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, word in entries.items():
        tensor.external_data.add(key=key, value=word)


def _first(act: Callable[[onnx.ModelProto], object]) -> bytes:
    model = adding(1)
    act(model)
    content: bytes = model.SerializeToString()
    return content


BROKEN: dict[str, bytes] = {
    "no protobuf": b"#!/bin/sh\necho hello\n" * 500,
    "cut off": adding(1).SerializeToString()[:-10],
    "cut off in the graph": adding(1).SerializeToString()[:40],
    "no graph": onnx.ModelProto(ir_version=8).SerializeToString(),
    "no operator set": _first(lambda model: model.ClearField("opset_import")),
    "reads what nothing makes": _first(lambda model: model.graph.node[0].input.__setitem__(0, "nowhere")),
    "too few bytes": _first(lambda model: model.graph.initializer[0].__setattr__("raw_data", bytes(N))),
    "an output that is a sequence": _first(lambda model: model.graph.output[0].type.sequence_type.elem_type.tensor_type.SetInParent()),
    "a missing file": _first(lambda model: _outside(model, location="missing.bin")),
    "a file elsewhere": _first(lambda model: _outside(model, location="../weights.bin")),
    "a file that is too short": _first(lambda model: _outside(model, location="short.bin")),
    "an offset that is a word": _first(lambda model: _outside(model, location="short.bin", offset="here")),
}


@pytest.mark.anyio
async def test_a_broken_file_fails_at_the_first_miss_in_the_words_of_from_onnx(tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(bytes(10))
    path = tmp_path / "broken.onnx"
    async with aionn.Runtime() as runtime:
        for what, content in BROKEN.items():
            path.write_bytes(content)
            with pytest.raises(AionnError) as eager:
                aionn.Model.from_onnx(path)
            cache = {"cache_dir": tmp_path / "cache"}
            ways: list[dict[str, Any]] = [{}, cache, {**cache, "token": OWN}, {"devices": None}]
            for options in ways:
                model = await runtime.load(path)
                with pytest.raises(AionnError) as late:
                    await runtime.compile(model, **{"devices": ("reference",), **options})
                assert (what, type(late.value), str(late.value)) == (what, type(eager.value), str(eager.value))
                assert not getattr(late.value, "__notes__", ())
            with pytest.raises(type(eager.value)) as asked:
                _ = (await runtime.load(path)).inputs
            assert str(asked.value) == str(eager.value)
            del eager, late, asked


@pytest.mark.anyio
async def test_what_cannot_be_opened_fails_at_once_in_the_words_of_from_onnx(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "missing.onnx", tmp_path / "empty.onnx", tmp_path / "pipe", "a\0b"):
        with pytest.raises(CallerError) as eager:
            aionn.Model.from_onnx(path)
        with pytest.raises(CallerError) as late:
            await aionn.Model.load(path)
        assert str(late.value) == str(eager.value)
    with pytest.raises(CallerError, match="load takes the path"):
        await aionn.Model.load(b"bytes")  # type: ignore[arg-type]


# --- files that change -----------------------------------------------------------------------------------------------


def overwrite(path: Path, content: bytes) -> None:
    """Write into the file that is there, and make sure that its time shows it."""
    before = path.stat().st_mtime_ns
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()
    os.utime(path, ns=(before, before + 10**9))


@KINDS
@pytest.mark.anyio
async def test_a_file_that_changes_is_refused_wherever_it_was_read_before(kind: Callable[[int, Path], Path], tmp_path: Path) -> None:
    path = kind(1, tmp_path)
    weights = tmp_path / ("model.onnx" if kind is inside else "weights.bin")
    for before in ("load", "digest", "read"):
        path = kind(1, tmp_path)
        model = await aionn.Model.load(path)
        if before != "load":
            await (model.digest() if before == "digest" else model.read())
        elif kind is beside:
            continue  # a file beside the model is opened when it is first needed
        overwrite(weights, weights.read_bytes()[::-1])
        for act in (model.digest, model.read):
            with pytest.raises(CallerError, match="has changed since it was loaded; load the model again"):
                await act()


@KINDS
@pytest.mark.anyio
async def test_a_file_that_changes_while_it_is_digested_is_refused(
    kind: Callable[[int, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kind(1, tmp_path)
    weights = tmp_path / ("model.onnx" if kind is inside else "weights.bin")
    model = await aionn.Model.load(path)
    act = files.OpenFile.digests

    def while_it_changes(file: files.OpenFile, ranges: Any) -> list[bytes]:
        found = act(file, ranges)
        overwrite(weights, weights.read_bytes()[::-1])
        return found

    monkeypatch.setattr(files.OpenFile, "digests", while_it_changes)
    with pytest.raises(CallerError, match="has changed since it was loaded; load the model again"):
        await model.digest()
    assert not known_token(model)


@pytest.mark.anyio
async def test_a_graph_that_is_not_the_digested_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes within one tick of the clock leave the same times. What is read is compared with what was digested all the same."""
    path = inside(1, tmp_path)
    model = await aionn.Model.load(path)
    await model.digest()
    monkeypatch.setattr(files.OpenFile, "check", lambda file: True)
    overwrite(path, path.read_bytes().replace(b"Add", b"Sub"))
    with pytest.raises(CallerError, match="has changed since it was loaded; load the model again"):
        await model.read()


@pytest.mark.anyio
async def test_a_copy_that_is_not_what_was_digested_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that must stand in the graph is copied out of its file. No driver compares it, so the reader does."""
    content = np.arange(5000, dtype=np.float32)
    sparse = helper.make_sparse_tensor(tensor(content, "s"), tensor(np.arange(5000)), [5000])
    model = model_of([helper.make_node("Add", ["x", "s"], ["y"])], [value("x", [5000])], [value("y", [5000])])
    model.graph.sparse_initializer.append(sparse)
    whole = model.SerializeToString()
    monkeypatch.setattr(files.OpenFile, "check", lambda file: True)
    path = tmp_path / "model.onnx"
    for first, second in (("digest", "read"), ("read", "digest")):
        path.write_bytes(whole)
        loaded = await aionn.Model.load(path)
        await getattr(loaded, first)()
        overwrite(path, whole.replace(content.tobytes(), content[::-1].tobytes()))
        with pytest.raises(CallerError, match="has changed since it was loaded; load the model again"):
            await getattr(loaded, second)()
    (tmp_path / "weights.bin").write_bytes(content.tobytes())
    outside = onnx.ModelProto.FromString(whole)
    place = outside.graph.sparse_initializer[0].values
    place.ClearField("raw_data")
    place.data_location = TensorProto.EXTERNAL
    place.external_data.add(key="location", value="weights.bin")
    path.write_bytes(outside.SerializeToString())
    act = files.OpenFile.digests

    def then_it_changes(file: files.OpenFile, ranges: Any) -> list[bytes]:
        found = act(file, ranges)
        overwrite(tmp_path / "weights.bin", content[::-1].tobytes())
        return found

    monkeypatch.setattr(files.OpenFile, "digests", then_it_changes)
    with pytest.raises(CallerError, match="has changed since it was loaded"):
        aionn.Model.from_onnx(path)


@KINDS
@pytest.mark.anyio
async def test_a_model_outlives_its_names(kind: Callable[[int, Path], Path], tmp_path: Path) -> None:
    """A new file takes the name of an old one. The loaded model goes on with the old one, which it has open."""
    path = kind(1, tmp_path)
    model = await aionn.Model.load(path)
    token = await model.digest()
    (tmp_path / "new").mkdir()
    kind(2, tmp_path / "new")
    for name in ("model.onnx", "weights.bin"):
        if (tmp_path / "new" / name).exists():
            os.replace(tmp_path / "new" / name, tmp_path / name)
    assert await model.digest() == token
    await model.read()
    np.testing.assert_array_equal(constant_arrays(model)["w"], floats(1))
    assert await (await aionn.Model.load(path)).digest() != token


@KINDS
@pytest.mark.anyio
async def test_a_digest_is_remembered_while_every_file_stays_the_same(
    kind: Callable[[int, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_ranges, "_RACY_NS", -(10**18))  # these files were written a moment ago
    path = kind(1, tmp_path)
    reads = Reads(monkeypatch)
    token = await (await aionn.Model.load(path)).digest()
    assert reads.bytes >= N * 4
    again = await aionn.Model.load(path)  # which looks at the first bytes, for their format
    before = reads.bytes
    assert await again.digest() == token
    assert reads.bytes == before
    weights = tmp_path / ("model.onnx" if kind is inside else "weights.bin")
    kept = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(kept.st_atime_ns, kept.st_mtime_ns))  # all but the time of the inode is as it was
    assert weights.stat().st_ino == kept.st_ino
    assert await (await aionn.Model.load(path)).digest() != token


@pytest.mark.anyio
async def test_a_digest_of_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = inside(1, tmp_path)
    reads = Reads(monkeypatch)
    for turn in (1, 2):
        await (await aionn.Model.load(path)).digest()
        assert reads.bytes >= turn * N * 4


@pytest.mark.anyio
async def test_a_file_that_was_missing_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_ranges, "_RACY_NS", -(10**18))
    path = beside(1, tmp_path)
    (tmp_path / "weights.bin").rename(tmp_path / "elsewhere.bin")
    without = await (await aionn.Model.load(path)).digest()
    (tmp_path / "elsewhere.bin").rename(tmp_path / "weights.bin")
    model = await aionn.Model.load(path)
    assert await model.digest() != without
    np.testing.assert_array_equal(constant_arrays(model)["w"], floats(1))


# --- in a runtime ----------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.anyio
async def test_a_driver_that_dies_is_followed_by_one_that_has_the_model(kind: Callable[[int, Path], Path], tmp_path: Path) -> None:
    """Without a cache the model is sent again, from descriptors: its names are gone. After a hit it is read only now."""
    x = floats(9)
    async with aionn.Runtime() as runtime:
        for cached in (False, True):
            path = kind(1, tmp_path)
            options: dict[str, Any] = {"devices": ("reference",)}
            if cached:
                options = {"devices": ("onnxruntime",), "cache_dir": tmp_path / "cache"}
                await runtime.compile(await runtime.load(path), **options)
            model = await runtime.load(path)
            compilation = await runtime.compile(model, **options)
            assert ("graph" in model.__dict__) is not cached
            for name in ("model.onnx", "weights.bin"):
                (tmp_path / name).unlink(missing_ok=True)
            if cached:
                shutil.rmtree(tmp_path / "cache")
            (device,) = [device for device in runtime.devices if device.name == options["devices"][0]]
            assert device.pid is not None
            os.kill(device.pid, signal.SIGKILL)
            outputs = None
            while outputs is None:
                try:
                    outputs = await compilation.compute({"x": x})
                except aionn.DriverDiedError:
                    continue
            np.testing.assert_array_equal(outputs["y"], x + floats(1))
            assert "graph" in model.__dict__


@pytest.mark.anyio
async def test_a_loaded_model_compiles_just_in_time_in_stages_and_in_a_swap(tmp_path: Path) -> None:
    x, path = floats(9), inside(1, tmp_path)
    (tmp_path / "other").mkdir()
    async with aionn.Runtime() as runtime:
        late = await runtime.compile(await runtime.load(path), devices=("reference",), mode="jit")
        np.testing.assert_array_equal((await late.compute({"x": x}))["y"], x + floats(1))
        staged = await runtime.compile(
            await runtime.load(path), mode="staged", stages=("reference", "onnxruntime"), cache_dir=tmp_path / "cache", token=OWN
        )
        np.testing.assert_array_equal((await staged.compute({"x": x}))["y"], x + floats(1))
        await runtime.swap(late, await runtime.load(inside(2, tmp_path / "other")))
        np.testing.assert_array_equal((await late.compute({"x": x}))["y"], x + floats(2))


@pytest.mark.anyio
async def test_a_digest_ends_with_the_patience_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = inside(1, tmp_path)
    go_on, begun = threading.Event(), threading.Event()
    act = files.OpenFile.digests

    def slow(file: files.OpenFile, ranges: Any) -> list[bytes]:
        begun.set()
        go_on.wait()
        return act(file, ranges)

    monkeypatch.setattr(files.OpenFile, "digests", slow)
    try:
        async with aionn.Runtime() as runtime:
            model = await runtime.load(path)
            with pytest.raises(aionn.DeadlineError):
                await runtime.compile(model, devices=("reference",), cache_dir=tmp_path / "cache", timeout_s=0.05)
            assert begun.is_set()
            waiting = asyncio.ensure_future(model.digest())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not known_token(model)
            assert list(model.inputs) == ["x"]  # the graph does not wait for the digest
            go_on.set()
            assert await model.digest() == aionn.Model.from_onnx(path).token
    finally:
        go_on.set()


@pytest.mark.anyio
async def test_a_digest_goes_on_for_the_next_compile_when_the_time_of_its_caller_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = inside(1, tmp_path)
    go_on, digests = threading.Event(), list[int]()
    act = files.OpenFile.digests

    def slow(file: files.OpenFile, ranges: Any) -> list[bytes]:
        digests.append(threading.get_ident())
        assert go_on.wait(30)
        assert digest_ranges([sparse])  # looks between its chunks whether it is to stop
        return act(file, ranges)

    sparse = FileRange(os.open(tmp_path / "large", os.O_RDWR | os.O_CREAT), 0, 64 << 20)
    os.ftruncate(sparse.fd, sparse.length)
    monkeypatch.setattr(files.OpenFile, "digests", slow)
    try:
        async with aionn.Runtime() as runtime:
            model = await runtime.load(path)
            with pytest.raises(aionn.DeadlineError):
                await runtime.compile(model, devices=("reference",), cache_dir=tmp_path / "cache", timeout_s=0.3)
            assert len(digests) == 1
            assert not known_token(model)
            go_on.set()
            with anyio.fail_after(30):
                while not known_token(model):
                    await anyio.lowlevel.checkpoint()
            assert len(digests) == 1
            assert threading.get_ident() not in digests
    finally:
        go_on.set()
    os.close(sparse.fd)


@pytest.mark.anyio
async def test_a_digest_that_no_caller_waits_for_reads_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = inside(1, tmp_path)
    begun, ended = threading.Event(), threading.Event()
    told: list[bool] = []

    def endless(file: files.OpenFile, ranges: Any) -> list[bytes]:
        begun.set()
        try:
            return digest_ranges([sparse])  # takes minutes, if no one ends it
        except StoppedError:
            told.append(True)
            raise
        finally:
            ended.set()

    sparse = FileRange(os.open(tmp_path / "large", os.O_RDWR | os.O_CREAT), 0, 1 << 40)
    os.ftruncate(sparse.fd, sparse.length)
    monkeypatch.setattr(files.OpenFile, "digests", endless)
    model = await aionn.Model.load(path)
    waiting = asyncio.ensure_future(model.digest())
    await anyio.to_thread.run_sync(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await anyio.to_thread.run_sync(ended.wait, 20)
    assert told == [True]
    os.close(sparse.fd)


@pytest.mark.anyio
async def test_weights_that_change_after_the_digest_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of a file may hide a write. The driver compares what it compiles with the digest, whatever the times say."""
    path = inside(1, tmp_path)
    async with aionn.Runtime() as runtime:
        model = await runtime.load(path)
        await model.digest()
        await model.read()
        monkeypatch.setattr(files.OpenFile, "check", lambda file: True)
        content = path.read_bytes()
        overwrite(path, content.replace(floats(1).tobytes(), floats(2).tobytes()))
        compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=tmp_path / "cache")
        (outcome,) = compilation.outcomes
        assert outcome.kind is MISS
        assert outcome.save_failure is not None
        assert outcome.save_failure.reason is MissReason.CHANGED_WEIGHTS


# --- large models ----------------------------------------------------------------------------------------------------

LARGE_BYTES = 2 * 2**30


def large(directory: Path) -> Path:
    """A model of 2 GB that takes no room on the disk: its file of weights is one hole."""
    with open(directory / "weights.bin", "wb") as file:
        file.truncate(LARGE_BYTES)
    rows = LARGE_BYTES // 4096
    tensor = TensorProto(name="w", dims=[rows, 1024], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights.bin")
    node = helper.make_node("Gather", ["w", "i"], ["y"])
    model = model_of([node], [value("i", [1], TensorProto.INT64)], [value("y", [1, 1024])])
    model.graph.initializer.append(tensor)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    return directory / "model.onnx"


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.anyio
async def test_a_model_of_2_gb_is_digested_and_read_beside_the_loop_and_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = large(tmp_path)
    reads = Reads(monkeypatch)
    before = peak_bytes()
    model = await aionn.Model.load(path)
    await model.digest()
    await model.read()
    assert reads.bytes >= LARGE_BYTES
    assert threading.get_ident() not in reads.threads
    assert peak_bytes() - before < 200 * 2**20
    assert str(tmp_path) not in mappings()
    assert (await aionn.Model.load(path)).name == "model.onnx"


@pytest.mark.anyio
async def test_a_runtime_that_closes_does_not_wait_for_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def hanging(file: files.OpenFile, ranges: Any) -> list[bytes]:
        begun.set()
        go_on.wait()
        return [bytes(32) for _ in ranges]

    monkeypatch.setattr(files.OpenFile, "digests", hanging)
    try:
        runtime = aionn.Runtime()
        await runtime.open()
        model = await runtime.load(inside(1, tmp_path))
        compiling = asyncio.ensure_future(runtime.compile(model, devices=("reference",), cache_dir=tmp_path / "cache"))
        await asyncio.to_thread(begun.wait)
        await runtime.aclose()
        with pytest.raises(CallerError, match="closed"):
            await compiling
    finally:
        go_on.set()


@pytest.mark.anyio
async def test_an_undigested_model_takes_no_entry_that_was_stored_for_another(tmp_path: Path) -> None:
    """The digest that a hit is bound to comes from the manifest. A forged one names no bytes that the driver has stored so."""
    x, tokens = floats(9), (OWN, OWN[::-1])
    async with aionn.Runtime() as runtime:

        async def outcome_of(seed: int) -> tuple[Any, Any]:
            (tmp_path / str(seed)).mkdir(exist_ok=True)
            model = await runtime.load(inside(seed, tmp_path / str(seed)))
            compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=tmp_path / "cache", token=tokens[seed - 1])
            np.testing.assert_array_equal((await compilation.compute({"x": x}))["y"], x + floats(seed))
            return compilation.outcomes[0], model

        assert [(await outcome_of(seed))[0].kind for seed in (1, 2, 1, 2)] == [MISS, MISS, HIT, HIT]
        entries = {}
        for path in entries_of(tmp_path / "cache"):
            manifest = decode_manifest((path / "manifest").read_bytes())
            assert isinstance(manifest, Manifest)
            entries[path] = manifest
        (one, first), (_, second) = entries.items()
        (one / "manifest").write_bytes(encode_manifest(msgspec.structs.replace(first, model_digest=second.model_digest)))
        outcomes = [await outcome_of(seed) for seed in (1, 2)]
        assert sorted(outcome.kind.value for outcome, _ in outcomes) == ["hit", "miss"]
        for outcome, model in outcomes:
            assert bool(known_token(model)) == (outcome.kind is MISS)


def entries_of(cache: Path) -> list[Path]:
    return sorted((cache / "entries").iterdir())


@pytest.mark.anyio
async def test_weights_in_many_files_stay_there(tmp_path: Path) -> None:
    """Some exporters write one file for each tensor."""
    names = [f"w{index}" for index in range(40)]
    parts = {name: np.full(2000, index, np.float32) for index, name in enumerate(names)}
    model = model_of([helper.make_node("Sum", ["x", *names], ["y"])], [value("x", [2000])], [value("y", [2000])], parts)
    for tensor_ in model.graph.initializer:
        (tmp_path / f"{tensor_.name}.bin").write_bytes(tensor_.raw_data)
        tensor_.ClearField("raw_data")
        tensor_.data_location = TensorProto.EXTERNAL
        tensor_.external_data.add(key="location", value=f"{tensor_.name}.bin")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    async with aionn.Runtime() as runtime:
        loaded = await runtime.load(tmp_path / "model.onnx")
        compilation = await runtime.compile(loaded, devices=("onnxruntime",), cache_dir=tmp_path / "cache")
        assert (len(loaded.pools), all(map(may_change, loaded.pools))) == (40, True)
        outputs = await compilation.compute({"x": np.ones(2000, np.float32)})
        np.testing.assert_array_equal(outputs["y"], np.full(2000, 1 + sum(range(40)), np.float32))
        assert loaded.token == aionn.Model.from_onnx(tmp_path / "model.onnx").token
