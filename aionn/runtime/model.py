"""`aionn.Model`: an ONNX file, opened and read when that is needed (`load`), or read whole at once (`from_onnx`).

`from_bytes` makes a model of another format, which only a device for that format reads.

A loaded model keeps the file open and leaves its weights there. It reads two things, each once and in a thread.

    digest   every byte, for the token: before the first lookup in a cache, or before an entry is stored
    graph    everything except weights: at the first access to `inputs`, unless a cache hit has said what they are, and before compiling

A model that is served from a cache under a token of the app's own needs neither. The driver copies weights out of the files.

The weights of a model from `from_onnx` lie in shared memory, which is frozen before any other process sees it. No driver gets a writable
mapping of them. Pool and descriptors go with the last reference to the model.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aionn.errors import CallerError, ExecutionError, refuse_coroutine
from aionn.file_ranges import until
from aionn.graph.digest import NOTHING, Digested, Place, check_files, digest_file, open_outside, surveyed
from aionn.graph.files import Beside, Home, OpenFile, changed, open_model
from aionn.graph.opaque import opaque_model
from aionn.hal import model as hal_model
from aionn.hal.types import IMemory, Operand
from aionn.loopless import running_loop
from aionn.memory.memory import Memory, whole_of
from aionn.memory.region import PROT_READ, FileMemory, Region
from aionn.tasks import in_thread

if TYPE_CHECKING:
    from aionn.graph.digest import ModelFile
    from aionn.graph.reading import ReadGraph
    from aionn.graph.wire import Survey

T = TypeVar("T")


class Model(hal_model.PooledModel):
    """A model as an app holds it: its graph, and its large constants.

    Attributes:
        inputs: `hal.Operand` by name, in the graph's order, with `.type`, `.dimensions` (0: open) and `.symbols`. A sequence, a map or an
            optional is a `hal.ValueType`, with `.kind`, `.element` and `.key`. A loaded model reads its graph when they are first asked
            for, which blocks for some milliseconds. After `runtime.compile` they are there.
        outputs: the same for its outputs, as the file declares them. Files do declare wrong shapes; arrays have the true ones.
        token: 32 bytes that name the content (the file and every byte beside it that it refers to): the same file gives the same
            token in every run and at every path. A loaded model has it after `await model.digest()`.
        name: the file's name, or an empty text for a model that was given as bytes.

    Examples:
        >>> model = await aionn.Model.load("silero_vad.onnx")
        >>> compilation = await runtime.compile(model, cache_dir=cache_dir)
        >>> model.inputs["state"].dimensions
        (2, 1, 128)
    """

    name = ""
    _source: Source | None = None
    _digests: Mapping[str, bytes] | None = None
    _carried: Callable[[hal_model.PooledModel], tuple[ModelFile, ...] | None] | None = None

    @classmethod
    async def load(cls, path: str | os.PathLike[str]) -> Model:
        """Open an ONNX model. Nothing is read yet, so a broken file fails when its graph is first needed.

        Weights stay in the file and in files beside it, and drivers copy them from there. Leave these files as they are for as long as
        the model is used. Replace a file by a new one (rename) rather than write into it. The model keeps one descriptor for each file.

        Args:
            path: of a .onnx file. Its weights may lie in files beside it, or beside the file that it links to (as in Hugging Face's
                cache). Files elsewhere are refused.

        Raises:
            CallerError: `path` is not a readable file with at least one byte.
        """
        given: object = path
        if not isinstance(given, str | os.PathLike):
            refuse_coroutine(given, "the path of the model")
            raise CallerError(f"model of type {type(path).__name__}: load takes the path of an ONNX file (.onnx)")
        file, directories = await _in_thread(lambda: open_model(path))
        return model_of_files(file, Beside(file.where, directories, {}), cls)

    @classmethod
    def from_onnx(cls, source: str | os.PathLike[str] | bytes, *, memories: Mapping[str, Memory] | None = None) -> Model:
        """Read an ONNX model whole. This blocks for as long as its bytes take to be read, digested and copied: 1 s for 500 MB.

        It is for scripts. In an event loop, use `await aionn.Model.load(path)`.

        Weights in files beside the model are mapped here, and drivers copy them. Leave such a file as it is for as long as the model is
        used. Replace it by a new one (rename) rather than write into it.

        Args:
            source: path of a .onnx file, or its contents. Weights in files beside the model are found only from a path: beside it, or
                beside the file that it links to (as in Hugging Face's cache). Files elsewhere are refused.
            memories: memory, or slices of it, that stands for such a file, by the name that the graph gives
                (external_data's location). It is used in place and shared with drivers, which cannot write to it; the app must
                not, either. The model keeps it mapped, also when the app closes it.

        Raises:
            CallerError: there is no ONNX model at `source`; or a constant lies beyond the file or memory it is said to be in.
            CompilationError: the graph is broken, or has inputs or outputs that are not tensors.
            MemoryAllocationError: the weights do not fit into shared memory.
        """
        from aionn.graph.digest import carried_by
        from aionn.graph.reading import read_onnx  # brings `onnx`, which a cache hit does without

        homes = {}
        pools: dict[Region, Memory] = {}
        for name, memory in _by_name(memories):
            # One pool for all slices of it, with a user of its own: the app may close what it gave.
            whole = pools.setdefault(memory.pool, whole_of(memory))
            homes[name] = Home(whole, memory.offset_bytes, memory.size_bytes)
        frozen = _Frozen()
        try:
            read = read_onnx(source, frozen.allocate, lambda file: Memory.from_fd(file, file.size, PROT_READ), homes)
        except ExecutionError as error:
            raise CallerError(f"the model's weights cannot be read: {error}. Put the whole file back") from error
        frozen.freeze()
        assert read.digested is not None
        model = cls(
            graph=read.graph,
            inputs=read.inputs,
            outputs=read.outputs,
            operations=read.operations,
            constants=read.constants,
            pools=read.pools,
            token=read.token,
            _contents=read.contents(read.digested),
        )
        _set(model, _digests=read.digests(read.digested), _carried=carried_by(source, read.survey, read.placed, homes))
        if isinstance(source, str | os.PathLike):
            _set(model, name=Path(source).name)
        return model

    @classmethod
    def from_bytes(
        cls,
        data: bytes | bytearray | memoryview,
        *,
        inputs: Mapping[str, Operand],
        outputs: Mapping[str, Operand],
        format: str,  # noqa: A002 - the name of the attribute
        name: str = "",
    ) -> Model:
        """Make a model of another format than ONNX, for devices that read this format. It blocks while the bytes are copied and digested.

        The bytes are copied once into shared memory that no process can write to. Devices for ONNX refuse the model.

        Args:
            data: the contents of the model's file.
            inputs: `aionn.hal.Operand` by name, in the model's order. A dimension of 0 is open.
            outputs: the same for the outputs.
            format: the name of the format, as the device's engine expects it, such as "tflite".
            name: for log lines and errors, such as the file's name.

        Raises:
            CallerError: a value has the wrong type, or is empty.
            MemoryAllocationError: the bytes do not fit into shared memory.
        """
        frozen = _Frozen()
        made = opaque_model(data, inputs, outputs, (format, name), frozen.allocate)
        frozen.freeze()
        model = cls(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})
        _set(model, name=name)
        return model

    async def digest(self) -> bytes:
        """Digest the model in a thread, and return its token of 32 bytes. The bytes are read once and not kept.

        The token is remembered, in this process for every model of the same files, while they have the same inode, size and times.

        Raises:
            CallerError: the file cannot be a model, or a file cannot be read, or has changed since the model was loaded.
        """
        if self._source is not None:
            await _in_thread(partial(self._source.digest, self))
        return self.token

    async def read(self) -> None:
        """Read the graph in a thread, if it has not been read. `runtime.compile` does so before it compiles.

        Raises:
            CallerError: the file is not an ONNX model, or has changed since the model was loaded.
            CompilationError, MemoryAllocationError: as `from_onnx`.
        """
        if self._source is not None:
            await _in_thread(partial(self._source.read, self))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            # A field of a loaded model is missing until it is needed, so Python calls this.
            source = source_of(self)
            if source is None or name not in _FIELDS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if name == "token":
                raise CallerError(f"model {self.name!r} has been loaded but not digested, so its token is not known; await model.digest()")
            source.read(self)
            return self.__dict__[name]

    def __repr__(self) -> str:
        token = f", token={hal_model.known_token(self).hex()[:12]}" if hal_model.known_token(self) else ""
        return f"<aionn.Model {self.name!r}{token}>"

    def __copy__(self) -> Model:
        return self  # it does not change, and its files are open once

    def __deepcopy__(self, memo: object) -> Model:
        return self

    __eq__ = object.__eq__
    __hash__ = object.__hash__


_FIELDS = frozenset({"graph", "inputs", "outputs", "operations", "constants", "pools", "token"})


def _set(model: hal_model.PooledModel, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(model, name, value)  # the dataclass is frozen for its users


def model_of_files(file: OpenFile, beside: Beside, kind: type[Model] = Model) -> Model:
    """Return a loaded model, whose own file is open."""
    model = kind.__new__(kind)
    source = _Files(file, beside)
    _set(model, _source=source, name=file.path.name, _carried=lambda _: import_module("aionn.graph.digest").carried_files(file, beside))
    return model


class Source(Protocol):
    """What a model's token and graph are made of when they are needed. Its methods block, and may be called in several threads at once."""

    def to_read(self) -> Mapping[str, OpenFile]:
        """Return the files that a first `digest` has to read, by location, the model's own under "". Nothing if that takes no time."""

    def digest(self, model: Any, known: Mapping[Place, bytes] = NOTHING) -> None:
        """Give the model its token. Compare the token with the present contents if it has one.

        Args:
            known: digests of ranges of the files, as another process has read them after they were opened here.
        """

    def read(self, model: Any) -> None:
        """Give the model its graph. Check that the contents are still the same if it has one."""

    def compiled(self, model: Any, contents: bytes) -> None:
        """Check that a driver has compiled the weights that the model had before. The first compilation says what they are.

        The times of a file cannot show this: they can be set back, and they move also where another file takes the name.

        Args:
            contents: what `known_contents` is for the weights that were compiled.

        Raises:
            CallerError: they are others.
        """


def source_of(model: hal_model.PooledModel) -> Source | None:
    """Return the source of a model that may lack its token or its graph: files, or the plan of which it is a step."""
    found: Source | None = model.__dict__.get("_source")
    return found


def is_read(model: hal_model.PooledModel) -> bool:
    """Return whether a model's graph is known."""
    return "graph" in model.__dict__


def adopt(model: hal_model.PooledModel, inputs: Mapping[str, Operand], outputs: Mapping[str, Operand]) -> bool:
    """Return whether a compilation's operands are the model's. A model that does not know its operands takes these."""
    if "inputs" in model.__dict__:
        return list(model.inputs.items()) == list(inputs.items()) and list(model.outputs.items()) == list(outputs.items())
    _set(model, inputs=MappingProxyType(dict(inputs)), outputs=MappingProxyType(dict(outputs)))
    return True


def digests_of(model: hal_model.PooledModel) -> Mapping[str, bytes] | None:
    """Return the digest of each constant that may change, by name, as the token names them. None while that is not known."""
    return model._digests if isinstance(model, Model) else None


async def content_of(model: hal_model.PooledModel) -> tuple[ModelFile, ...] | None:
    """Return the files of an ONNX model, not read yet. A machine that loads them has a model with the same token.

    Returns None if they cannot be had: the model has another format, or is a step of a plan; or its file has changed since it was read
    whole; or it was given as bytes, many of which are not weights.

    Raises:
        CallerError: a file of a loaded model cannot be read, or has changed.
    """
    if not isinstance(model, Model):
        return None
    await model.digest()
    carried = model._carried
    return None if carried is None else await _in_thread(lambda: carried(model))


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread. A cancelled caller leaves at once, and the thread ends when it has read its present chunk."""
    running_loop()  # raises under another async library than asyncio
    left = threading.Event()
    try:
        return await in_thread(until, left.is_set, work)
    finally:
        left.set()


_MANY_BYTES = 8 << 20
"""To digest fewer takes a few milliseconds."""


class _Files:
    """The files of a loaded model, and what has been read of them (`Source`)."""

    def __init__(self, file: OpenFile, beside: Beside) -> None:
        self._file, self._beside = file, beside
        self._found: Survey | None = None
        self._digested: Digested | None = None
        self._read: ReadGraph | None = None
        # Two locks, so that an app which asks for `inputs` does not wait for the digest of the weights.
        self._digesting, self._reading, self._joining = threading.Lock(), threading.Lock(), threading.Lock()

    def to_read(self) -> Mapping[str, OpenFile]:
        """See `Source.to_read`."""
        with self._digesting:
            if self._digested is not None:
                return {}
            self._found = self._found or surveyed(self._file)
            files = {"": self._file, **open_outside(self._found, self._beside)}
            return files if sum(file.size for file in files.values()) > _MANY_BYTES else {}

    def digest(self, model: Model, known: Mapping[Place, bytes] = NOTHING) -> None:
        """See `Source.digest`."""
        with self._digesting:
            before = self._digested
            if before is not None and check_files(self._file, self._beside):
                return
            read = self._read
            now = digest_file(self._file, self._beside, self._found if read is None else read.survey, known)
            if before is not None and now.token != before.token:
                raise changed(self._file.where)
            for file in (self._file, *self._beside.files.values()):
                file.renew()
            self._join(model, now, None)

    def read(self, model: Model) -> None:
        """See `Source.read`."""
        with self._reading:
            check_files(self._file, self._beside)
            if self._read is not None:
                return
            from aionn.graph.reading import read_content  # brings `onnx`, which a cache hit does without

            frozen = _Frozen()
            read = read_content(self._file, self._beside, self._digested, frozen.allocate, FileMemory, lazy=True)
            frozen.freeze()
            check_files(self._file, self._beside)
            whole = hal_model.PooledModel(
                graph=read.graph,
                inputs=read.inputs,
                outputs=read.outputs,
                operations=read.operations,
                constants=read.constants,
                pools=read.pools,
                token=b"",
            )
            if not adopt(model, whole.inputs, whole.outputs):
                raise CallerError(
                    f"{self._file.where}: it has other inputs or outputs than the compilation that the cache has under this token; "
                    "a token is unique to one model"
                )
            self._join(model, None, read)
            _set(model, graph=whole.graph, operations=whole.operations, constants=whole.constants, pools=whole.pools)

    def compiled(self, model: Model, contents: bytes) -> None:
        """See `Source.compiled`."""
        with self._joining:
            if hal_model.known_contents(model) and hal_model.known_contents(model) != contents:
                raise changed(self._file.where)
            _set(model, _contents=contents)

    def _join(self, model: Model, digested: Digested | None, read: ReadGraph | None) -> None:
        """Note what has been found out. Once graph and digest are known, `contents` is, too."""
        with self._joining:
            digested, read = digested or self._digested, read or self._read
            if digested is not None and read is not None:
                contents = read.contents(digested)
                if not read.is_of(digested) or hal_model.known_contents(model) not in (b"", contents):
                    raise changed(self._file.where)
                _set(model, _contents=contents, _digests=read.digests(digested))
            if digested is not None:
                _set(model, token=digested.token)
            self._digested, self._read = digested, read


class _Frozen:
    """The pool for constants that do not stay in a file."""

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def allocate(self, size_bytes: int) -> IMemory:
        self._regions.append(Region.allocate(size_bytes, freezable=True))
        return self._regions[-1]

    def freeze(self) -> None:
        for region in self._regions:
            region.freeze()


def _by_name(memories: Mapping[str, Memory] | None) -> Iterable[tuple[str, Memory]]:
    """Return the pairs of `memories`. Raises `CallerError` if it is not a mapping, or a value is not a `Memory`."""
    if memories is None:
        return ()
    if not isinstance(memories, Mapping):
        raise CallerError(f"memories: expected a dict of memories by file name, got {type(memories).__name__}")
    for name, memory in memories.items():
        if not isinstance(memory, Memory):
            raise CallerError(f"memories[{name!r}]: expected a Memory, got {type(memory).__name__} (a HardwareBuffer has one as .memory)")
    return memories.items()
