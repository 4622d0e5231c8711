"""Models in an artifact store, for machines that compile them: one object for each, named by the model's token.

    "aionn.model" 0x01 | length of the list u32 little-endian | list, msgpack: [name, bytes] of each file | the files, one after the other

A token is a digest of the model's files. So the machine that fetches them makes the token anew, and takes nothing whose token differs.
`check_model` does the same for `aionn fleet verify`.

The name of a file is what the graph calls it. It need not be a name that a file system takes, because a model may have its weights in
memory under any name. So the files are unpacked under numbers, and the names lead to these (`_Unpacked`).

No statement names these objects. A sweep removes them when they are old, and the next compile that needs one writes it again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import anyio
import msgspec

from aionn.caching.outcomes import MissReason, Refusal, refusal_of_os_error
from aionn.errors import CallerError
from aionn.fleet.artifact_store import ArtifactStore
from aionn.fleet.folders import BadContentsError
from aionn.fleet.places import model_path
from aionn.fleet.requests import StoreError
from aionn.graph.digest import ModelFile
from aionn.graph.files import Beside, OpenFile, open_model
from aionn.runtime.model import Model, model_of_files

DAMAGED = (MissReason.WRONG_BYTES, MissReason.UNREADABLE)
"""Reasons of `fetch_model` for which the object of the store is to blame, and not this machine's disk."""

_MAGIC = b"aionn.model\x01"
_MOST_LIST_BYTES = 1 << 20
_FRESH_S = 12 * 3600.0  # half the grace of a sweep: an object this young stays until a machine has fetched it
_COPY_BYTES = 16 << 20
_OWN = "model.onnx"

_Entry = tuple[str, Annotated[int, msgspec.Meta(ge=0)]]
_decoder = msgspec.msgpack.Decoder(list[_Entry])


def _head_of(files: Sequence[ModelFile]) -> bytes:
    listed = msgspec.msgpack.encode([(file.name, file.size_bytes) for file in files])
    return _MAGIC + len(listed).to_bytes(4, "little") + listed


def object_size(files: Sequence[ModelFile]) -> int:
    """Return how many bytes the object of a model has."""
    return len(_head_of(files)) + sum(file.size_bytes for file in files)


async def put_model(store: ArtifactStore, token: bytes, files: Sequence[ModelFile], *, anew: bool = False) -> bool:
    """Store a model, unless the store has it and it is younger than 12 hours. Return whether it was written.

    Args:
        token: `Model.token`, 32 bytes.
        anew: write the model in any case, because a node could not read what the store has.

    Raises:
        StoreError: the store cannot be used.
        CallerError: a file of the model cannot be read, or was written to.
    """
    path, size = model_path(token), object_size(files)
    found = None if anew else await store.requests.find(path)
    if found is not None and found.size_bytes == size and time.time() - found.written_s <= _FRESH_S:
        return False

    def chunks() -> Iterator[bytes | memoryview]:
        yield _head_of(files)
        for file in files:
            yield from file.chunks()

    await store.requests.put_chunks(path, chunks, size)
    return True


async def fetch_model(store: ArtifactStore, token: bytes, most_bytes: int, folder: Path) -> Model | Refusal:
    """Fetch a model into an empty folder, and open it there.

    Args:
        most_bytes: of the object. A store that sends more must not fill this machine's disk. Objects of one model may differ in size
            (`object_size`), because files may hold bytes that the model does not use.

    Returns:
        The model, or why it cannot be opened: the store does not have it (ABSENT), has other bytes under its name (`DAMAGED`), or the
        folder cannot be written to.

    Raises:
        StoreError: the store cannot be used.
    """
    path, whole = model_path(token), folder / "object"
    try:
        with whole.open("xb") as file:
            there = await store.requests.copy_object(path, most_bytes, file.fileno())
    except BadContentsError as error:
        return Refusal(MissReason.WRONG_BYTES, f"artifact store {store.address}: {error}")
    except OSError as error:
        return refusal_of_os_error(error, "writing the model's files")
    if not there:
        return Refusal(MissReason.ABSENT, f"artifact store {store.address} has no {path}")
    try:
        model = await anyio.to_thread.run_sync(_unpack, whole, folder / "files")
        found = await model.digest()
    except (CallerError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        if isinstance(error.__cause__, OSError):
            return refusal_of_os_error(error.__cause__, "reading the model's files")
        return Refusal(MissReason.UNREADABLE, f"artifact store {store.address}: {path}: {error}")
    except OSError as error:
        return refusal_of_os_error(error, "writing the model's files")
    if found != token:
        return Refusal(MissReason.WRONG_BYTES, f"artifact store {store.address}: {path} holds another model ({found.hex()[:16]})")
    return model


async def check_model(store: ArtifactStore, token: bytes, size_bytes: int) -> Refusal | None:
    """Return why no machine could use a model, or None if it is whole, or gone by now.

    The model is copied to a temporary folder, which takes twice its size for a while. It is never in memory as a whole.

    Raises:
        StoreError: the store cannot be used, or the temporary folder cannot be written to.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="aionn-model-", ignore_cleanup_errors=True) as folder:
            found = await fetch_model(store, token, size_bytes, Path(folder))
    except OSError as error:
        found = refusal_of_os_error(error, "making a temporary folder")
    if not isinstance(found, Refusal) or found.reason is MissReason.ABSENT:
        return None
    if found.reason not in DAMAGED:
        raise StoreError(store.address, f"checking {model_path(token)}", f"{found.detail}; TMPDIR names a folder for temporary files")
    return found


class _Unpacked(Beside):
    """The files beside an unpacked model. A name of the list leads to a number, and no other name leads to a file."""

    def __init__(self, where: str, directories: tuple[Path, ...], numbers: Mapping[str, int]) -> None:
        super().__init__(where, directories, {})
        self._numbers = numbers

    def open(self, location: str, what: str) -> OpenFile:
        """Open a file of the list, as `Beside.open`."""
        if location not in self._numbers:
            raise CallerError(f"{what}, which did not come with the model")
        return super().open(str(self._numbers[location]), what)


def _unpack(whole: Path, folder: Path) -> Model:
    """Write each file of a model into a new folder, and return the model, of which nothing is read yet. The store is not trusted.

    Raises:
        CallerError, msgspec.MsgspecError: this is not a whole model.
        OSError: a file cannot be written.
    """
    folder.mkdir()
    with whole.open("rb") as source:
        head = source.read(len(_MAGIC) + 4)
        size = int.from_bytes(head[len(_MAGIC) :], "little")
        if not head.startswith(_MAGIC) or size > _MOST_LIST_BYTES:
            raise CallerError("this is not a model of this release")
        entries = _decoder.decode(source.read(size))
        names = [name for name, _ in entries]
        if names[:1] != [""] or len(set(names)) < len(names):
            raise CallerError("the list of files does not begin with the model, or names a file twice")
        for number, (_, length) in enumerate(entries):
            _copy_out(source.fileno(), source.tell(), folder / (str(number) if number else _OWN), length)
            source.seek(length, os.SEEK_CUR)
        if source.tell() != os.fstat(source.fileno()).st_size:
            raise CallerError("it has other bytes than its list of files says")
    whole.unlink()
    file, directories = open_model(folder / _OWN)
    return model_of_files(file, _Unpacked(file.where, directories, {name: number for number, name in enumerate(names) if number}))


def _copy_out(source: int, at: int, path: Path, length: int) -> None:
    with path.open("xb") as target:
        while length:
            chunk = os.pread(source, min(length, _COPY_BYTES), at)
            if not chunk:
                raise CallerError("it is cut off")
            target.write(chunk)
            at, length = at + len(chunk), length - len(chunk)
