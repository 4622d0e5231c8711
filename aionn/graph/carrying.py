"""The files of a model, for another machine that makes a model with the same token of them. Without `onnx`.

A model that was loaded has its files open. A model that was read from bytes has most of them in its pool: what was not copied there is
kept (`_kept_of`), which is a few kilobytes unless the graph has large tensors that no engine uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from aionn.errors import CallerError
from aionn.graph.digest import Place, digest_file, digest_model
from aionn.graph.files import Beside, Home, OpenFile, changed, open_model
from aionn.graph.wire import Survey
from aionn.hal.model import Model
from aionn.hal.types import DataLocation, IMemory

_CHUNK_BYTES = 4 << 20
_MOST_KEPT_BYTES = 16 << 20
"""More than this is not kept beside the pool, because it would take memory from every app for a rare use."""

_Kept = tuple[bytes | DataLocation, ...]
"""A serialized model in pieces: bytes, and places in the pool of the model."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of an ONNX model, for another machine.

    Attributes:
        name: where the graph looks for the file, relative to the model's own file. Empty for the model's own file.
        size_bytes: of the whole file.
        chunks: reads the file from its beginning to its end, a few megabytes at a time. It blocks, so call it in a thread. It raises
            `CallerError` if the file cannot be read, or was written to since the model was loaded.
    """

    name: str
    size_bytes: int
    chunks: Callable[[], Iterator[bytes | memoryview]]


def _file_on_disk(name: str, file: OpenFile) -> ModelFile:
    """Return a file that is open."""
    return ModelFile(name, file.size, partial(_read, file))


def _read(file: OpenFile) -> Iterator[bytes]:
    file.check()
    for at in range(0, file.size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, file.size - at)
        chunk = file.read(at, length)
        if len(chunk) < length:
            raise changed(f"{file.where}: {file.path}")
        yield chunk
    file.check()


def _file_in_memory(name: str, home: Home) -> ModelFile:
    """Return memory that stands for a file."""
    return ModelFile(name, home.size, partial(_cut, home.pool, home.offset, home.size))


def _cut(pool: IMemory, offset: int, length: int) -> Iterator[memoryview]:
    view = pool.view()[offset : offset + length].toreadonly()
    for at in range(0, length, _CHUNK_BYTES):
        yield view[at : at + _CHUNK_BYTES]


def _kept_of(content: memoryview, survey: Survey, placed: Mapping[Place, DataLocation]) -> _Kept | None:
    """Return the pieces of a serialized model, or None if too many bytes lie outside the pool.

    Args:
        placed: where in the pool the bytes of spans lie.
    """
    spans = survey.spans
    turns: list[tuple[int, int]] = [turn for pair in zip(survey.kept, spans, strict=False) for turn in pair] + survey.kept[-1:]
    places = [placed.get((None, start, end - start)) if index % 2 else None for index, (start, end) in enumerate(turns)]
    if sum(end - start for (start, end), place in zip(turns, places, strict=True) if place is None) > _MOST_KEPT_BYTES:
        return None
    return tuple(bytes(content[start:end]) if place is None else place for (start, end), place in zip(turns, places, strict=True))


def _file_put_together(kept: _Kept, pools: Sequence[IMemory]) -> ModelFile:
    """Return the model's own file, from its pieces."""
    size = sum(len(piece) if isinstance(piece, bytes) else piece.length for piece in kept)
    return ModelFile("", size, partial(_joined, kept, pools))


def _joined(kept: _Kept, pools: Sequence[IMemory]) -> Iterator[bytes | memoryview]:
    for piece in kept:
        if isinstance(piece, bytes):
            yield piece
        else:
            yield from _cut(pools[piece.pool_index], piece.offset, piece.length)


def carried_by(
    source: str | os.PathLike[str] | bytes, survey: Survey, placed: Mapping[Place, DataLocation], homes: Mapping[str, Home]
) -> Callable[[Model], tuple[ModelFile, ...] | None]:
    """Return what finds the files of a model that was read whole, if that is ever asked for. It blocks.

    Args:
        source: what the model was read from: its path, or its contents.
        survey, placed: what reading has found.
        homes: memory that stands for files, by name.
    """
    if isinstance(source, str | os.PathLike):
        return partial(_opened_again, Path(source).absolute(), dict(homes))
    kept = _kept_of(memoryview(source).cast("B"), survey, placed)
    return partial(_still_there, kept, dict(homes))


def _opened_again(path: Path, homes: Mapping[str, Home], model: Model) -> tuple[ModelFile, ...] | None:
    try:
        file, directories = open_model(path)
        beside = Beside(file.where, directories, homes)
        token = digest_file(file, beside).token if not homes else digest_model(file, beside).token
    except CallerError:
        return None
    return carried_files(file, beside, homes) if token == model.token else None


def _still_there(kept: _Kept | None, homes: Mapping[str, Home], model: Model) -> tuple[ModelFile, ...] | None:
    if kept is None:
        return None
    return (_file_put_together(kept, model.pools), *(_file_in_memory(name, home) for name, home in homes.items()))


def carried_files(file: OpenFile, beside: Beside, homes: Mapping[str, Home] = MappingProxyType({})) -> tuple[ModelFile, ...]:
    """Return the files of a model that has been digested, so that all files beside it are open."""
    others = [_file_on_disk(name, other) for name, other in sorted(beside.files.items())]
    return (_file_on_disk("", file), *others, *(_file_in_memory(name, home) for name, home in homes.items()))
