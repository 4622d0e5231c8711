"""A model's token: 32 bytes that name its file and every byte that it refers to. Without `onnx`, NumPy and protobuf.

The file is cut at its spans, which are the `raw_data` of large tensors (`wire`). The token is BLAKE3 over one record per range.

    record   kind (1 byte) | length u64 little-endian | BLAKE3 of the range
    k, s     what is kept of the file and each span, in turn, from the file's first byte to its last
    o        each tensor outside, in the order of the file: its bytes in a file beside the model
    a        such a tensor whose bytes cannot be had now, with length and digest zero

The records of k and s are the whole file, and every o is all that a tensor names. So two models with one token have the same
bytes. Each range is digested by itself, because a driver compares the constants of a model one by one (`graph.unchanged`).

A tensor whose file is missing does not fail the digest. Another token says that it was missing, and reading the graph says what is wrong.

The files of a model may go to another machine, which makes a model with the same token of them. A model that was loaded has its files open.
A model that was read from bytes has most of them in its pool: what was not copied there is kept (`_kept_of`), which is a few kilobytes
unless the graph has large tensors that no engine uses.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import blake3
import msgspec

from aionn.errors import CallerError
from aionn.file_ranges import Identity, shows_changes
from aionn.graph.files import Beside, Content, Home, OpenFile, changed, open_model
from aionn.graph.wire import Survey, WireError, survey
from aionn.memo import Memo
from aionn.trace import span

if TYPE_CHECKING:  # else a digest would import NumPy
    from aionn.hal.model import PooledModel
    from aionn.hal.types import DataLocation, IMemory

Place = tuple[str | None, int, int]
"""A range of bytes: a file's location beside the model, or None for the model's own file; offset and length."""

NOTHING: Mapping[Place, bytes] = MappingProxyType({})

_TOKEN_CONTEXT = "aionn 3 model token"

_REMEMBERED = 32
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG}


class Digested(msgspec.Struct, frozen=True):
    """A model's token and what it was made of.

    Attributes:
        survey: where the spans lie.
        kept: digest of each range that is kept of the file.
        digests: of every range of the file, and of every tensor outside that can be had.
    """

    token: bytes
    survey: Survey
    kept: tuple[bytes, ...]
    digests: dict[Place, bytes]


def surveyed(content: Content) -> Survey:
    """Return where the model's tensors lie.

    Raises:
        CallerError: the bytes cannot be a model.
    """
    try:
        return survey(content.read, content.size)
    except WireError as error:
        raise not_a_model(content.where, error) from error


def not_a_model(where: str, error: Exception) -> CallerError:
    """Return the error for bytes that protobuf cannot read."""
    return CallerError(f"{where}: this is not an ONNX model, or not a whole one ({error}); give a serialized onnx.ModelProto")


def digest_model(content: Content, beside: Beside, found: Survey | None = None, known: Iterable[tuple[Place, bytes]] = ()) -> Digested:
    """Digest a model. Blocks as long as it takes to read all its bytes.

    Args:
        found: what `surveyed` has returned for `content`, if that is known.
        known: digests of ranges, which are not read again.

    Raises:
        CallerError: the bytes cannot be a model, or a file cannot be read to its end.
    """
    found = surveyed(content) if found is None else found
    with span("graph.digest", bytes=found.size):
        kept = found.kept
        turns = [place for pair in zip(kept, found.spans, strict=False) for place in pair] + kept[-1:]
        own: list[Place] = [(None, start, end - start) for start, end in turns]
        digests = dict(known)
        unread = [(place, turn) for place, turn in zip(own, turns, strict=True) if place not in digests]
        digests.update(zip((place for place, _ in unread), content.digests([turn for _, turn in unread]), strict=True))
        records = bytearray()
        for index, place in enumerate(own):
            records += _record(b"ks"[index % 2 : index % 2 + 1], place[2], digests[place])
        for outside in _digest_outside(beside, found, digests):
            records += _record(b"a", 0, bytes(32)) if outside is None else _record(b"o", outside[2], digests[outside])
        token = blake3.blake3(records, derive_key_context=_TOKEN_CONTEXT).digest()
        return Digested(token, found, tuple(digests[place] for place in own[::2]), digests)


def _record(kind: bytes, length: int, digest: bytes) -> bytes:
    return kind + length.to_bytes(8, "little") + digest


def _digest_outside(beside: Beside, found: Survey, digests: dict[Place, bytes]) -> list[Place | None]:
    """Digest every tensor outside, each range once. Returns their places in order, None where the bytes cannot be had."""
    places: list[Place | None] = []
    wanted: dict[str, tuple[Home | OpenFile, dict[Place, None]]] = {}
    for tensor in found.outside:
        try:
            holder, offset, length = beside.place(tensor.entries, tensor.dims, tensor.data_type, "a tensor")
        except CallerError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno not in _MISSING:
                raise  # it may be there, as when this process has too many open files
            places.append(None)
            continue
        location = str(tensor.entries["location"])
        place = (location, offset, length)
        places.append(place)
        wanted.setdefault(location, (holder, {}))[1][place] = None
    for holder, ranges in wanted.values():
        ordered = [place for place in ranges if place not in digests]
        digests.update(zip(ordered, holder.digests([(offset, offset + length) for _, offset, length in ordered]), strict=True))
    return places


# --- files -------------------------------------------------------------------------------------------------------------


class _Known(msgspec.Struct, frozen=True):
    digested: Digested
    files: dict[str, Identity]


_known: Memo[tuple[Identity, tuple[Path, ...]], _Known] = Memo(_REMEMBERED)
_known_lock = threading.Lock()


def digest_file(file: OpenFile, beside: Beside, found: Survey | None = None, known: Mapping[Place, bytes] = NOTHING) -> Digested:
    """Digest a model's file and what lies beside it, or return what is remembered of the same files.

    Digests are remembered in this process, for as long as every file's identity stays the same. `known`: as `digest_model` has it.

    Raises:
        CallerError: the bytes cannot be a model, or a file has changed since it was opened, or cannot be read.
    """
    key = (file.identity, beside.directories)
    if check_files(file, beside):
        with _known_lock:
            remembered = _known.get(key)
        if remembered is not None and _same_files(remembered, beside):
            return remembered.digested
    began_ns = time.time_ns()
    digested = digest_model(file, beside, found, known.items())
    if check_files(file, beside):
        _remember(key, _Known(digested, {location: other.identity for location, other in beside.files.items()}), began_ns)
    return digested


def files_beside(path: str | os.PathLike[str]) -> Mapping[str, OpenFile]:
    """Open the files in which tensors of the model at `path` lie.

    Raises:
        CallerError: the file cannot be a model, or cannot be read.
    """
    file, directories = open_model(path)
    return open_outside(surveyed(file), Beside(file.where, directories, {}))


def open_outside(found: Survey, beside: Beside) -> Mapping[str, OpenFile]:
    """Open the files in which tensors of a model lie. A tensor that cannot be had is left out, as a digest leaves it out."""
    for tensor in found.outside:
        with suppress(CallerError):
            beside.place(tensor.entries, tensor.dims, tensor.data_type, "a tensor")
    return beside.files


def check_files(file: OpenFile, beside: Beside) -> bool:
    """Return whether the identity of every file is the same in every part, as `OpenFile.check`.

    Raises:
        CallerError: a file was written to.
    """
    same = [other.check() for other in (file, *list(beside.files.values()))]  # each is asked, so that each may raise
    return all(same)


def _same_files(known: _Known, beside: Beside) -> bool:
    """Whether the same files lie beside the model as then. A name may lead to another file by now."""
    try:
        for location in known.files.keys() - beside.files.keys():
            beside.files[location] = beside.open(location, "a tensor")
    except CallerError:
        return False
    return all(beside.files[location].identity == identity for location, identity in known.files.items())


def _remember(key: tuple[Identity, tuple[Path, ...]], known: _Known, began_ns: int) -> None:
    outside = {str(tensor.entries.get("location", "")) for tensor in known.digested.survey.outside}
    if outside != known.files.keys():
        return  # a file was missing, and may come
    if shows_changes((key[0], *known.files.values()), began_ns):
        with _known_lock:
            _known[key] = known


_CHUNK_BYTES = 4 << 20
_MOST_KEPT_BYTES = 16 << 20
"""More than this is not kept beside the pool, because it would take memory from every app for a rare use."""

_Kept = tuple["bytes | DataLocation", ...]
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
) -> Callable[[PooledModel], tuple[ModelFile, ...] | None]:
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


def _opened_again(path: Path, homes: Mapping[str, Home], model: PooledModel) -> tuple[ModelFile, ...] | None:
    try:
        file, directories = open_model(path)
        beside = Beside(file.where, directories, homes)
        token = digest_file(file, beside).token if not homes else digest_model(file, beside).token
    except CallerError:
        return None
    return carried_files(file, beside, homes) if token == model.token else None


def _still_there(kept: _Kept | None, homes: Mapping[str, Home], model: PooledModel) -> tuple[ModelFile, ...] | None:
    if kept is None:
        return None
    return (_file_put_together(kept, model.pools), *(_file_in_memory(name, home) for name, home in homes.items()))


def carried_files(file: OpenFile, beside: Beside, homes: Mapping[str, Home] = MappingProxyType({})) -> tuple[ModelFile, ...]:
    """Return the files of a model that has been digested, so that all files beside it are open."""
    others = [_file_on_disk(name, other) for name, other in sorted(beside.files.items())]
    return (_file_on_disk("", file), *others, *(_file_in_memory(name, home) for name, home in homes.items()))
