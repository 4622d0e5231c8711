"""From an ONNX file to what `hal.Model` is made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto

from aionn.errors import CallerError
from aionn.file_ranges import digest_of
from aionn.graph.checking import border, check_names, check_text, name_nodes
from aionn.graph.constants import Payload, Taken, bring_in, take_defaults, take_out
from aionn.graph.digest import Digested, Place, digest_model, not_a_model, surveyed
from aionn.graph.files import Beside, Content, GivenBytes, Home, OpenFile, changed, check_format, open_model
from aionn.graph.unchanged import contents_of
from aionn.graph.wire import Excision, Survey, excise
from aionn.hal.model import Constant, Operation, may_change
from aionn.hal.types import DataLocation, Default, IMemory, Operand
from aionn.trace import span

CONSTANT_ALIGNMENT_BYTES = 64
"""A cache line and AVX-512's width, so engines can load constants in place (AIDL: preferred memory alignment 64)."""


@dataclass(frozen=True, slots=True)
class ReadGraph:
    """What `hal.Model` is made of; most fields have its names.

    Attributes:
        changeable: names of the constants that `known_contents` is about, in its order, and where their bytes come from.
        survey, kept: where the file's tensors lie, and the digest of each range beside them, as they were read.
        copied: digest of all else that was copied out of files.
        placed: where the bytes of the file that was given whole lie in the pools.
    """

    graph: bytes = field(repr=False)
    inputs: dict[str, Operand]
    outputs: dict[str, Operand]
    operations: tuple[Operation, ...] = field(repr=False)
    constants: tuple[Constant, ...] = field(repr=False)
    pools: tuple[IMemory, ...] = field(repr=False)
    digested: Digested | None = field(repr=False)
    changeable: tuple[tuple[str, Place], ...] = field(repr=False)
    survey: Survey = field(repr=False)
    kept: tuple[bytes, ...] = field(repr=False)
    copied: dict[Place, bytes] = field(repr=False)
    placed: dict[Place, DataLocation] = field(repr=False)

    def is_of(self, digested: Digested) -> bool:
        """Return whether what was read is what was digested. Constants that stay in files are compared by the driver."""
        return self.kept == digested.kept and all(digested.digests.get(place) == digest for place, digest in self.copied.items())

    @property
    def token(self) -> bytes:
        """Return `Model.token`, or nothing where the model was not digested."""
        return b"" if self.digested is None else self.digested.token

    def contents(self, digested: Digested) -> bytes:
        """Return `known_contents`: the constants that may change, as they were when the model was digested."""
        return contents_of(self.digests(digested).values())

    def digests(self, digested: Digested) -> dict[str, bytes]:
        """Return the digest of each constant that may change, by name, as it was when the model was digested."""
        return {name: digested.digests[place] for name, place in self.changeable}


Attach = Callable[[OpenFile], IMemory]
"""Makes a pool of a whole file, which is the model's own or lies beside it."""

_NO_HOMES: Mapping[str, Home] = {}
_MOST_FILES = 16
"""So many files are mapped as pools; each is a descriptor in every call that sends the model. The constants of more are copied."""
_MOST_OPEN_FILES = 128
"""The same for a loaded model, whose drivers need no mapping and copy what lies in the files."""


def read_onnx(
    source: str | os.PathLike[str] | bytes,
    allocate: Callable[[int], IMemory],
    attach: Attach | None = None,
    homes: Mapping[str, Home] = _NO_HOMES,
) -> ReadGraph:
    """Read an ONNX model and put its large constants into a pool, except those that lie in `homes` already.

    Args:
        source: path of a .onnx file, or its contents. Weights in files beside the model are found only from a path: beside it, or
            beside the file that it links to.
        allocate: gives a pool of that many bytes whose `view()` is writable; called at most once, not at all
            for a model without large constants.
        attach: maps a file beside the model, for reading; None copies such constants. They are copied, too, where
            they do not begin at a multiple of their element's size.
        homes: by the file name that the graph gives: memory that stands for that file.

    Raises:
        CallerError: `source` does not hold an ONNX model, or a file with its weights is missing.
        CompilationError: the graph is broken, or has inputs or outputs that are not tensors; `.node` says where.
        MemoryAllocationError: from `allocate`.
    """
    content, directories = _content(source)
    beside = Beside(content.where, directories, homes)
    return read_content(content, beside, None, allocate, attach, lazy=False)


def read_content(
    content: Content, beside: Beside, digested: Digested | None, allocate: Callable[[int], IMemory], attach: Attach | None, lazy: bool
) -> ReadGraph:
    """Read a model, as `read_onnx`.

    Args:
        digested: of this model, if its token is known. What is read is compared with it.
        lazy: the constants of an `OpenFile` stay in it, at any offset, and so do those of the files beside it. Otherwise the model is
            digested, too, as it was copied.

    Raises: as `read_onnx`, and
        CallerError: the model is another than the one that was digested.
    """
    with span("graph.read", bytes=content.size):
        found = surveyed(content) if digested is None else digested.survey
        kept = [content.read(start, end - start) for start, end in found.kept]
        kept_digests = tuple(map(digest_of, kept))
        if digested is not None and kept_digests != digested.kept:
            raise changed(content.where)
        try:
            read = _read(_Payloads(content, found, excise(found, kept), beside, digested, lazy), kept_digests, allocate, attach)
        except UnicodeDecodeError as error:  # protobuf looks at a string only when it is used
            raise CallerError(f"{content.where}: this is not an ONNX model: it has a name that is not UTF-8 ({error.reason})") from error
    if not lazy:
        own = ((place, digest) for place, digest in read.copied.items() if place[0] is None)  # a file beside may have changed since
        digested = digest_model(content, beside, found, own)
    if digested is not None and not read.is_of(digested):
        raise changed(content.where)
    return replace(read, digested=digested)


def _read(payloads: _Payloads, kept: tuple[bytes, ...], allocate: Callable[[int], IMemory], attach: Attach | None) -> ReadGraph:
    model = _parse(payloads.excision, payloads.content.where)
    check_text(model.graph)
    defaults = take_defaults(model, payloads)
    taken = take_out(model.graph, payloads)
    name_nodes(model.graph)
    check_names(model.graph)
    bring_in(model, taken, payloads)
    inputs, outputs = _borders(model, defaults)
    constants, pools = _place(taken, allocate, attach)
    changeable = [
        (made.name, fill.place)
        for constant, made in zip(taken, constants, strict=True)
        if (fill := _found(constant, attach)) is not None and may_change(pools[made.location.pool_index])
    ]
    graph = model.SerializeToString(deterministic=True)
    operations = tuple(Operation(node.name, node.op_type, node.domain) for node in model.graph.node)
    placed = {
        constant.fill.place: made.location for constant, made in zip(taken, constants, strict=True) if isinstance(constant.fill, _InGiven)
    }
    facts = (graph, inputs, outputs, operations, constants, pools)
    return ReadGraph(*facts, payloads.digested, tuple(changeable), payloads.survey, kept, payloads.copied, placed)


def _place(
    taken: list[Taken], allocate: Callable[[int], IMemory], attach: Attach | None
) -> tuple[tuple[Constant, ...], tuple[IMemory, ...]]:
    """Leave constants where they lie, copy the others into one pool, and make the graph refer to both."""
    found = [_found(constant, attach) for constant in taken]
    files = list(dict.fromkeys(place.file for place in found if isinstance(place, _InFile)))
    del files[_MOST_OPEN_FILES if any(isinstance(place, _InFile) and place.anywhere for place in found) else _MOST_FILES :]
    pools: list[IMemory] = []
    attached: dict[OpenFile, int] = {}
    end = 0
    locations: list[DataLocation | None] = []
    for constant, place in zip(taken, found, strict=True):
        if isinstance(place, _InMemory):
            index = next((i for i, pool in enumerate(pools) if pool is place.home.pool), None)
            if index is None:
                index = len(pools)
                pools.append(place.home.pool)
            locations.append(DataLocation(index, place.home.offset + place.offset, constant.length))
        elif isinstance(place, _InFile) and place.file in files and attach is not None:
            if place.file not in attached:
                attached[place.file] = len(pools)
                pools.append(attach(place.file))
            locations.append(DataLocation(attached[place.file], place.offset, constant.length))
        else:
            end = -(-end // CONSTANT_ALIGNMENT_BYTES) * CONSTANT_ALIGNMENT_BYTES + constant.length
            locations.append(None)
    if end:
        pools.append(allocate(end))
        view = pools[-1].view()
    constants = []
    start = 0
    for constant, location in zip(taken, locations, strict=True):
        if location is None:
            start = -(-start // CONSTANT_ALIGNMENT_BYTES) * CONSTANT_ALIGNMENT_BYTES
            location = DataLocation(len(pools) - 1, start, constant.length)
            constant.fill(view[start : start + constant.length])
            start += constant.length
        constant.refer(location.pool_index, location.offset)
        constants.append(Constant(constant.tensor.name, constant.operand, location))
    return tuple(constants), tuple(pools)


def _found(constant: Taken, attach: Attach | None) -> _InFile | _InMemory | None:
    """Where a constant may stay. One that an engine reads in place stays only beside the model, where its elements can be read whole."""
    place, element_bytes = constant.fill, constant.operand.type.element_bytes
    if isinstance(place, _InMemory) and (place.home.offset + place.offset) % element_bytes == 0:
        return place
    if isinstance(place, _InFile) and attach is not None and (place.anywhere or (place.place[0] and place.offset % element_bytes == 0)):
        return place
    return None


def _borders(model: ModelProto, defaults: Mapping[str, Default]) -> tuple[dict[str, Operand], dict[str, Operand]]:
    """Inputs and outputs; initializers are struck off the graph's inputs. Inputs with defaults come last."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    values = [value for value in model.graph.input if value.name not in initializers]
    values.sort(key=lambda value: value.name in defaults)
    inputs, outputs = border(values, "input"), border(model.graph.output, "output")
    inputs = {name: replace(operand, default=defaults[name]) if name in defaults else operand for name, operand in inputs.items()}
    kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    # From version 4 on an initializer that is missing among the inputs is a constant; before, it had to be an input too.
    model.ir_version = max(model.ir_version, 4)
    return inputs, outputs


def _content(source: str | os.PathLike[str] | bytes) -> tuple[Content, tuple[Path, ...]]:
    """The bytes of a model, and the directories beside its file."""
    if isinstance(source, bytes | bytearray | memoryview):
        content = GivenBytes(memoryview(source).cast("B"), "the model given as bytes")
        if not content.size:
            raise CallerError(f"{content.where}: it is empty; an ONNX model has a graph")
        check_format(content.read(0, 64), content.where)
        return content, ()
    if not isinstance(source, str | os.PathLike):
        raise CallerError(f"model of type {type(source).__name__}: give the path of an ONNX file (.onnx), or its contents as bytes")
    return open_model(source)


def _parse(excision: Excision, where: str) -> ModelProto:
    try:
        model: ModelProto = onnx.ModelProto.FromString(excision.message)
    except DecodeError as error:
        raise not_a_model(where, error) from error
    if not model.HasField("graph") or not model.graph.output:
        raise CallerError(f"{where}: this is not an ONNX model, for it lacks a graph with outputs; give a serialized onnx.ModelProto")
    if not model.opset_import:
        raise CallerError(f"{where}: the ONNX model does not say which operator set it uses (opset_import); export it again")
    return model


class _InFile(msgspec.Struct, frozen=True):
    """A constant in a file. Called, it copies itself.

    Attributes:
        place: the same as a key of `Digested.digests`.
        anywhere: it stays in the file at any offset, for drivers copy it. Otherwise engines use it where it lies.
        copied: gets the digest of what was copied.
    """

    file: OpenFile
    place: Place
    anywhere: bool
    copied: dict[Place, bytes]

    @property
    def offset(self) -> int:
        return self.place[1]

    def __call__(self, target: memoryview) -> None:
        self.copied[self.place] = self.file.copy(self.offset, target)


class _InMemory(msgspec.Struct, frozen=True):
    """A constant in memory that the app gave. Called, it copies itself. `place` is as for `_InFile`."""

    home: Home
    place: Place
    copied: dict[Place, bytes]

    @property
    def offset(self) -> int:
        return self.place[1]

    def __call__(self, target: memoryview) -> None:
        begin = self.home.offset + self.offset
        target[:] = self.home.pool.view()[begin : begin + self.place[2]]
        self.copied[self.place] = digest_of(target)


class _InGiven(msgspec.Struct, frozen=True):
    """A constant in bytes that were given. Called, it copies itself. `place` is as for `_InFile`."""

    source: memoryview
    place: Place

    def __call__(self, target: memoryview) -> None:
        target[:] = self.source


class _Payloads:
    """The bytes of tensors that do not carry them: left out of the message, or in files beside the model."""

    def __init__(self, content: Content, survey: Survey, excision: Excision, beside: Beside, digested: Digested | None, lazy: bool) -> None:
        self.content, self.survey, self.excision, self.digested, self.lazy = content, survey, excision, digested, lazy
        self.copied: dict[Place, bytes] = {}
        self._beside = beside

    def __call__(self, tensor: TensorProto, name: str) -> Payload | None:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location == TensorProto.EXTERNAL:  # engines then read the file, even if the tensor carries bytes as well
            return self._outside(tensor, name, entries)
        index = entries.get(self.excision.key)
        if index is None:
            return None
        start, end = self.survey.spans[int(index)]
        if isinstance(self.content, GivenBytes):
            return end - start, _InGiven(self.content.view[start:end], (None, start, end - start))
        assert isinstance(self.content, OpenFile)  # the other kind of content
        return end - start, _InFile(self.content, (None, start, end - start), self.lazy, self.copied)

    def _outside(self, tensor: TensorProto, name: str, entries: dict[str | bytes, str | bytes]) -> Payload:
        holder, offset, length = self._beside.place(entries, tensor.dims, tensor.data_type, name)
        location = str(entries["location"])
        place = (location, offset, length)
        if self.digested is not None and place not in self.digested.digests:
            raise CallerError(f"{self.content.where}: {name} could not be digested, but now it is there; load the model again")
        if isinstance(holder, Home):
            return length, _InMemory(holder, place, self.copied)
        return length, _InFile(holder, place, self.lazy, self.copied)
