"""From an ONNX file to what `hal.Model` is made of."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePath

import blake3
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto

from aionn.errors import CallerError
from aionn.graph.checking import TYPES, border, check_names, check_text, name_nodes
from aionn.graph.constants import Payload, Taken, bring_in, take_out
from aionn.graph.wire import Excision, WireError, excise
from aionn.hal.model import Constant, Operation
from aionn.hal.types import CONSTANT_COPY_BYTES, DataLocation, IMemory, Operand
from aionn.trace import span

CONSTANT_ALIGNMENT_BYTES = 64
"""A cache line and AVX-512's width, so engines can load constants in place (AIDL: preferred memory alignment 64)."""


@dataclass(frozen=True, slots=True)
class ReadGraph:
    """What `hal.Model` is made of; the fields have its names."""

    graph: bytes = field(repr=False)
    inputs: dict[str, Operand]
    outputs: dict[str, Operand]
    operations: tuple[Operation, ...] = field(repr=False)
    constants: tuple[Constant, ...] = field(repr=False)
    pools: tuple[IMemory, ...] = field(repr=False)
    token: bytes
    digests: tuple[bytes, ...] = field(repr=False)
    """Of each constant's bytes, in the order of `constants`: what `token` is made of."""


@dataclass(frozen=True, slots=True)
class Home:
    """Memory that constants already lie in.

    Attributes:
        pool: the whole of it.
        offset: where in the pool the file begins that the graph names; with `size` its bytes.
    """

    pool: IMemory
    offset: int
    size: int


_NO_HOMES: Mapping[str, Home] = {}
_MOST_FILES = 16
"""So many files beside a model are mapped; each is a descriptor in every call that sends the model. More are copied."""


def read_onnx(
    source: str | os.PathLike[str] | bytes,
    allocate: Callable[[int], IMemory],
    attach: Callable[[Path], IMemory] | None = None,
    homes: Mapping[str, Home] = _NO_HOMES,
) -> ReadGraph:
    """Read an ONNX model and put its large constants into a pool, except those that lie in `homes` already.

    The token names the content: it is the same wherever the constants lie.

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
    content, where, directories = _content(source)
    with span("graph.read", bytes=len(content)):
        try:
            return _read(content, where, directories, allocate, attach, homes)
        except UnicodeDecodeError as error:  # protobuf looks at a string only when it is used
            raise CallerError(f"{where}: this is not an ONNX model: it has a name that is not UTF-8 ({error.reason})") from error


def _read(
    content: memoryview,
    where: str,
    directories: tuple[Path, ...],
    allocate: Callable[[int], IMemory],
    attach: Callable[[Path], IMemory] | None,
    homes: Mapping[str, Home],
) -> ReadGraph:
    excision, model = _parse(content, where)
    check_text(model.graph)
    payloads = _Payloads(content, excision, directories, where, homes)
    taken = take_out(model.graph, payloads)
    name_nodes(model.graph)
    check_names(model.graph)
    bring_in(model, taken, payloads)
    inputs, outputs = _borders(model)

    # The token names the graph with all constants in one pool, wherever they are.
    end = 0
    for constant in taken:
        start = -(-end // CONSTANT_ALIGNMENT_BYTES) * CONSTANT_ALIGNMENT_BYTES
        end = start + constant.length
        constant.refer(0, start)
    digest = blake3.blake3()
    _digest(digest, b"aionn.model.2", model.SerializeToString(deterministic=True))
    constants, pools = _place(taken, allocate, attach)
    digests = []
    for made in constants:
        place = made.location
        content = pools[place.pool_index].view()[place.offset : place.offset + place.length]
        digests.append(blake3.blake3(content).digest())
        _digest(digest, b"constant." + made.name.encode(), digests[-1])
    graph = model.SerializeToString(deterministic=True)
    operations = tuple(Operation(node.name, node.op_type, node.domain) for node in model.graph.node)
    return ReadGraph(graph, inputs, outputs, operations, constants, pools, digest.digest(), tuple(digests))


def _place(
    taken: list[Taken], allocate: Callable[[int], IMemory], attach: Callable[[Path], IMemory] | None
) -> tuple[tuple[Constant, ...], tuple[IMemory, ...]]:
    """Leave constants where they lie, copy the others into one pool, and make the graph refer to both."""
    found = [_found(constant, attach) for constant in taken]
    files = list(dict.fromkeys(place.path for place in found if isinstance(place, _InFile)))[:_MOST_FILES]
    pools: list[IMemory] = []
    copied: list[Taken] = []
    end = 0
    locations: list[DataLocation | None] = []
    attached: dict[Path, int] = {}
    for constant, place in zip(taken, found, strict=True):
        if isinstance(place, _InMemory):
            index = next((i for i, pool in enumerate(pools) if pool is place.home.pool), None)
            if index is None:
                index = len(pools)
                pools.append(place.home.pool)
            locations.append(DataLocation(index, place.home.offset + place.offset, constant.length))
        elif isinstance(place, _InFile) and place.path in files and attach is not None:
            if place.path not in attached:
                attached[place.path] = len(pools)
                pools.append(attach(place.path))
            locations.append(DataLocation(attached[place.path], place.offset, constant.length))
        else:
            start = -(-end // CONSTANT_ALIGNMENT_BYTES) * CONSTANT_ALIGNMENT_BYTES
            end = start + constant.length
            copied.append(constant)
            locations.append(None)
    starts = 0
    if copied:
        pools.append(allocate(end))
        view = pools[-1].view()
    constants = []
    for constant, location in zip(taken, locations, strict=True):
        if location is None:
            starts = -(-starts // CONSTANT_ALIGNMENT_BYTES) * CONSTANT_ALIGNMENT_BYTES
            location = DataLocation(len(pools) - 1, starts, constant.length)
            constant.fill(view[starts : starts + constant.length])
            starts += constant.length
        constant.refer(location.pool_index, location.offset)
        constants.append(Constant(constant.tensor.name, constant.operand, location))
    return tuple(constants), tuple(pools)


def _found(constant: Taken, attach: Callable[[Path], IMemory] | None) -> _InFile | _InMemory | None:
    """Where a constant may stay: in place only from where its elements can be read whole."""
    place, element_bytes = constant.fill, constant.operand.type.element_bytes
    if isinstance(place, _InMemory) and (place.home.offset + place.offset) % element_bytes == 0:
        return place
    if isinstance(place, _InFile) and attach is not None and place.offset % element_bytes == 0:
        return place
    return None


def _borders(model: ModelProto) -> tuple[dict[str, Operand], dict[str, Operand]]:
    """Inputs and outputs; initializers are struck off the graph's inputs."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    values = [value for value in model.graph.input if value.name not in initializers]
    inputs, outputs = border(values, "input"), border(model.graph.output, "output")
    kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    # From version 4 on an initializer that is missing among the inputs is a constant; before, it had to be an input too.
    model.ir_version = max(model.ir_version, 4)
    return inputs, outputs


def _digest(digest: blake3.blake3, tag: bytes, content: bytes | memoryview) -> None:
    """Tag and content, each behind its length: no two sequences of them are the same bytes."""
    for part in (tag, content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _content(source: str | os.PathLike[str] | bytes) -> tuple[memoryview, str, tuple[Path, ...]]:
    """The file's bytes, its name in errors, and the directories beside it: that of its path, and that of its real path."""
    directories: tuple[Path, ...] = ()
    if isinstance(source, bytes | bytearray | memoryview):
        content, where = memoryview(source).cast("B"), "the model given as bytes"
    elif not isinstance(source, str | os.PathLike):
        raise CallerError(f"model of type {type(source).__name__}: give the path of an ONNX file (.onnx), or its contents as bytes")
    else:
        path = Path(source)
        where = f"model {os.fspath(path)!r}"
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise CallerError(f"{where}: this is not a file; give the path of an ONNX file (.onnx)")
            directories = tuple(dict.fromkeys((path.parent.resolve(), path.resolve().parent)))
            content = memoryview(path.read_bytes())
        except CallerError:  # which is a ValueError
            raise
        except FileNotFoundError as error:
            raise CallerError(f"{where}: there is no such file; give the path of an ONNX file (.onnx)") from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise CallerError(f"{where}: it cannot be read ({why}); give a readable ONNX file") from error
    if not content:
        raise CallerError(f"{where}: it is empty; an ONNX model has a graph")
    return content, where, directories


def _parse(content: memoryview, where: str) -> tuple[Excision, ModelProto]:
    try:
        excision = excise(content, CONSTANT_COPY_BYTES)
        model = onnx.ModelProto.FromString(excision.message)
    except (WireError, DecodeError) as error:
        raise CallerError(f"{where}: this is not an ONNX model, or not a whole one ({error}); give a serialized onnx.ModelProto") from error
    if not model.HasField("graph") or not model.graph.output:
        raise CallerError(f"{where}: this is not an ONNX model, for it lacks a graph with outputs; give a serialized onnx.ModelProto")
    if not model.opset_import:
        raise CallerError(f"{where}: the ONNX model does not say which operator set it uses (opset_import); export it again")
    return excision, model


@dataclass(frozen=True, slots=True)
class _InFile:
    """A constant in a file beside the model. Called, it copies itself."""

    path: Path
    offset: int
    length: int
    what: str

    def __call__(self, target: memoryview) -> None:
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            done = 0
            while done < self.length:
                got = file.readinto(target[done:])
                if not got:
                    raise CallerError(f"{self.what}, which ended after {done} of {self.length} bytes; it changed while it was read")
                done += got


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A constant in memory that the app gave. Called, it copies itself."""

    home: Home
    offset: int
    length: int

    def __call__(self, target: memoryview) -> None:
        begin = self.home.offset + self.offset
        target[:] = self.home.pool.view()[begin : begin + self.length]


class _Payloads:
    """The bytes of tensors that do not carry them: left out of the message, or in files beside the model."""

    def __init__(
        self, content: memoryview, excision: Excision, directories: tuple[Path, ...], where: str, homes: Mapping[str, Home]
    ) -> None:
        self._content, self._excision, self._directories, self._where = content, excision, directories, where
        self._homes = homes
        self._files: dict[str, tuple[Path, int]] = {}
        """By location: the file that it names, and how many bytes that has."""

    def __call__(self, tensor: TensorProto, name: str) -> Payload | None:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location == TensorProto.EXTERNAL:  # engines then read the file, even if the tensor carries bytes as well
            home = self._homes.get(entries.get("location", ""))
            return self._beside(tensor, name, entries) if home is None else self._within(tensor, name, entries, home)
        index = entries.get(self._excision.key)
        if index is None:
            return None
        start, end = self._excision.spans[int(index)]
        source = self._content[start:end]

        def copy(target: memoryview) -> None:
            target[:] = source

        return len(source), copy

    def _beside(self, tensor: TensorProto, name: str, entries: dict[str, str]) -> Payload:
        location = entries.get("location", "")
        what = f"{self._where}: {name} lies in the file {location!r}"
        if not isinstance(location, str):  # protobuf gives a name that is not UTF-8 as bytes
            raise CallerError(f"{what}, whose name is not UTF-8; export the model again")
        if not self._directories:
            raise CallerError(f"{what} beside the model; give the model's path instead of its bytes")
        found = self._files.get(location)
        if found is None:
            found = self._files[location] = self._file(location, what)
        path, size = found
        offset, length = self._range(tensor, entries, size, what)
        return length, _InFile(path, offset, length, what)

    def _file(self, location: str, what: str) -> tuple[Path, int]:
        try:
            path = self._permitted(location)
            if path is None:
                raise CallerError(f"{what}, which is not inside the model's own directory; put it there")
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise CallerError(f"{what}, which is not a file; put the model's own file there")
        except CallerError:  # which is a ValueError
            raise
        except (OSError, ValueError, RuntimeError) as error:  # pathlib raises RuntimeError for links in a circle
            why = getattr(error, "strerror", None) or error
            raise CallerError(f"{what}, which cannot be read ({why}); put it beside the model") from error
        return path, status.st_size

    def _permitted(self, location: str) -> Path | None:
        """Return the real path of the file of that name beside the model, or None if the name or a link leads elsewhere.

        The model's path may be a link. In Hugging Face's cache, `snapshots/REV/` has only links, into the flat directory `blobs/`.
        So two directories count: that of the path, and that of the real path.

        A real path is permitted if it lies directly in one of the two. It may lie deeper in one only where that directory's own entry of
        this name leads to it. Otherwise a model at "/model.onnx" would permit every file.
        """
        named = PurePath(location)
        if not named.parts or named.is_absolute() or ".." in named.parts:
            return None
        # An engine looks beside the model's path alone. So an entry there goes first, even a link that is then refused.
        beside = [directory / named for directory in self._directories]
        real = next((path for path in beside if os.path.lexists(path)), beside[0]).resolve()
        if real.parent in self._directories:
            return real
        inside = (path.resolve() for directory, path in zip(self._directories, beside, strict=True) if real.is_relative_to(directory))
        return real if real in inside else None

    def _within(self, tensor: TensorProto, name: str, entries: dict[str, str], home: Home) -> Payload:
        what = f"{self._where}: {name} lies in the memory given for {entries['location']!r}"
        offset, length = self._range(tensor, entries, home.size, what)
        return length, _InMemory(home, offset, length)

    def _range(self, tensor: TensorProto, entries: dict[str, str], size: int, what: str) -> tuple[int, int]:
        try:
            offset = int(entries.get("offset", "0"))
            length = int(entries["length"]) if "length" in entries else self._implied_length(tensor, size - offset)
        except ValueError as error:
            raise CallerError(f"{what}, but offset or length is not a number; export the model again") from error
        if offset < 0 or length < 0 or offset + length > size:
            raise CallerError(f"{what}, bytes {offset} to {offset + length}, but the file has {size}; put the model's own file there")
        return offset, length

    @staticmethod
    def _implied_length(tensor: TensorProto, rest: int) -> int:
        if tensor.data_type not in TYPES:
            return rest
        return int(prod(tensor.dims)) * TYPES[tensor.data_type].element_bytes
