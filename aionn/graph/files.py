"""The bytes of a model: its file, the files beside it, or what the app gave. Without `onnx`, NumPy and protobuf.

A file is opened once. Its descriptor goes with the last object that uses it, and its identity says whether it is still what it was.
Every function blocks, so a caller in an event loop uses a thread.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec

from aionn.errors import NO_DESCRIPTOR_LEFT, CallerError
from aionn.file_ranges import FileRange, Identity, copy_ranges, digest_of, digest_ranges

if TYPE_CHECKING:
    from aionn.hal.types import IMemory

_SMALL_BYTES = 256 * 1024
"""A range of so many bytes is digested where it is read. Handing it to another thread costs more."""

_ELEMENT_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 14: 8, 15: 16}
"""By ONNX's number of an element type its size, for those that NumPy has."""

Entries = Mapping[str | bytes, str | bytes]
"""A tensor's external_data. A text that is not UTF-8 is bytes."""


class Home(msgspec.Struct, frozen=True):
    """Memory that constants already lie in.

    Attributes:
        pool: the whole of it.
        offset: where in the pool the file begins that the graph names; with `size` its bytes.
    """

    pool: IMemory
    offset: int
    size: int

    def digests(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return BLAKE3 of each [start, end)."""
        view = self.pool.view()[self.offset : self.offset + self.size]
        return [digest_of(view[start:end]) for start, end in ranges]


class Content(Protocol):
    """The serialized model, as `GivenBytes` or as an `OpenFile`. `where` names it in errors."""

    where: str

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes: ...

    def digests(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]: ...


class GivenBytes:
    """A model in memory. Satisfies `Content`."""

    def __init__(self, content: memoryview, where: str) -> None:
        self.view, self.where = content, where
        self.size = len(content)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.view[offset : offset + length])

    def digests(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [digest_of(self.view[start:end]) for start, end in ranges]


class OpenFile:
    """A file with weights, open for reading. Satisfies `Content`.

    Attributes:
        where: what it is, for errors.
        path: the path that was opened.
        identity: of the file as it was when it was opened.
    """

    def __init__(self, path: Path, where: str, fd: int = -1) -> None:
        """Open a file, or duplicate the descriptor of an open one.

        Raises:
            OSError: it cannot be opened.
        """
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd < 0 else fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        self.path, self.where = path, where
        self.identity = Identity.of(os.fstat(self._fd))

    @property
    def size(self) -> int:
        return self.identity.size

    def fileno(self) -> int:
        return self._fd

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file, fewer where it ends.

        Raises:
            CallerError: the file cannot be read.
        """
        pieces: list[bytes] = []
        while length:
            try:
                piece = os.pread(self._fd, length, offset)
            except OSError as error:
                raise self._unreadable(error) from error
            if not piece:
                break
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def copy(self, offset: int, target: memoryview) -> bytes:
        """Fill `target` from an offset on, and return BLAKE3 of the copy.

        Raises:
            CallerError: the file ends before that, or cannot be read.
        """
        try:
            (digest,) = copy_ranges([FileRange(self._fd, offset, len(target))], [target])
        except OSError as error:
            raise self._unreadable(error) from error
        return digest

    def digests(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return BLAKE3 of each [start, end), with all usable cores and without keeping the bytes.

        Raises:
            CallerError: the file ends before a range, or cannot be read.
        """
        large = [FileRange(self._fd, start, end - start) for start, end in ranges if end - start > _SMALL_BYTES]
        try:
            digests = iter(digest_ranges(large))
        except OSError as error:
            raise self._unreadable(error) from error
        return [next(digests) if end - start > _SMALL_BYTES else self._digest_small(start, end - start) for start, end in ranges]

    def _digest_small(self, offset: int, length: int) -> bytes:
        content = self.read(offset, length)
        if len(content) < length:
            raise self._changed()
        return digest_of(content)

    def _unreadable(self, error: OSError) -> CallerError:
        if error.strerror is None:  # `ShortFileError`
            return self._changed()
        return CallerError(f"{self.where}: it cannot be read ({error.strerror}); give a readable ONNX file")

    def _changed(self) -> CallerError:
        return changed(f"{self.where}: {self.path}")

    def check(self) -> bool:
        """Return whether the identity is the same in every part.

        The time of the last change of the inode alone also moves where another file takes this one's name. Then the bytes are the same,
        and the call returns False. A caller that knows their digest compares it.

        Raises:
            CallerError: the file was written to.
        """
        now = Identity.of(os.fstat(self._fd))
        if now[:4] != self.identity[:4]:
            raise self._changed()
        return now == self.identity

    def renew(self) -> None:
        """Take the file's present identity as the one that counts, after its bytes have been compared."""
        self.check()
        self.identity = Identity.of(os.fstat(self._fd))

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.where}: an open file cannot be copied or pickled")  # a copy would close this one's descriptor

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def changed(what: str) -> CallerError:
    """Return the error for a file that was written to."""
    return CallerError(f"{what} has changed since it was loaded; load the model again")


_BLANKS = b"\xef\xbb\xbf \t\r\n"
"""What may stand before the text of a page."""

_LOOKS_LIKE: tuple[tuple[int, bytes, str], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer, in place of the file; run `git lfs pull`"),
    (1, b"\0\0\0TFL3", "a TensorFlow Lite model; use aionn.Model.from_bytes and the device 'litert', or convert it to ONNX"),
    (0, b"PK\x03\x04", "a ZIP archive, as PyTorch and Keras save models; export the model to ONNX, or unpack the archive"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras saves models; export the model to ONNX"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it"),
    (0, b"<ir_version", "ONNX's text syntax; give onnx.parser.parse_model(text).SerializeToString()"),
)
"""Where in a file the bytes stand that another format begins with, and what to say of it. No ModelProto begins so."""


def check_format(head: bytes, where: str) -> None:
    """Refuse the first bytes of a file in another format than ONNX.

    Raises:
        CallerError: it looks like another format.
    """
    found = [what for offset, magic, what in _LOOKS_LIKE if head.startswith(magic, offset)]
    if head.lstrip(_BLANKS).startswith(b"<"):
        found.append("a page of HTML or XML, as a failed download leaves it; download the file itself")
    if found:
        raise CallerError(f"{where}: this is not an ONNX model. It looks like {found[0]}")


def open_model(source: str | os.PathLike[str], where: str = "", fd: int = -1) -> tuple[OpenFile, tuple[Path, ...]]:
    """Open a model's file. Return also the directories beside it: that of its path, and that of its real path.

    `where`: what errors call the model, in place of its path. `fd`: of the file, if it is open already.

    Raises:
        CallerError: it is not a readable file with at least one byte.
    """
    path = Path(source)
    where = where or f"model {os.fspath(path)!r}"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CallerError(f"{where}: this is not a file; give the path of an ONNX file (.onnx)")
        directories = tuple(dict.fromkeys((path.parent.resolve(), path.resolve().parent)))
        file = OpenFile(path, where, fd)
    except CallerError:  # which is a ValueError
        raise
    except FileNotFoundError as error:
        raise CallerError(f"{where}: there is no such file; give the path of an ONNX file (.onnx)") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        shortage = isinstance(error, OSError) and error.errno in NO_DESCRIPTOR_LEFT
        way_out = "close files or raise the limit (ulimit -n)" if shortage else "give a readable ONNX file"
        raise CallerError(f"{where}: it cannot be read ({why}); {way_out}") from error
    if not file.size:
        raise CallerError(f"{where}: it is empty; an ONNX model has a graph")
    check_format(file.read(0, min(file.size, 64)), where)
    return file, directories


class Beside:
    """The files beside a model, and the memory that stands for some of them. Each is opened once, when a tensor first names it.

    Attributes:
        files: by location, what has been opened.
    """

    def __init__(self, where: str, directories: tuple[Path, ...], homes: Mapping[str, Home]) -> None:
        self.files: dict[str, OpenFile] = {}
        self._where, self._directories, self._homes = where, directories, homes

    @property
    def directories(self) -> tuple[Path, ...]:
        return self._directories

    def place(self, entries: Entries, dims: Sequence[int], data_type: int, name: str) -> tuple[Home | OpenFile, int, int]:
        """Return where a tensor's bytes lie, as what holds them, offset and length.

        Raises:
            CallerError: its file is missing or refused, or does not have these bytes.
        """
        location = entries.get("location", "")
        home = self._homes.get(location) if isinstance(location, str) else None
        if home is not None:
            what = f"{self._where}: {name} lies in the memory given for {location!r}"
            return home, *self._range(entries, dims, data_type, home.size, what)
        what = f"{self._where}: {name} lies in the file {location!r}"
        if not isinstance(location, str):  # protobuf gives a name that is not UTF-8 as bytes
            raise CallerError(f"{what}, whose name is not UTF-8; export the model again")
        file = self.files.get(location)
        if file is None:
            file = self.files[location] = self.open(location, what)
        return file, *self._range(entries, dims, data_type, file.size, what)

    def open(self, location: str, what: str) -> OpenFile:
        """Open the file of that name beside the model.

        Raises:
            CallerError: it is missing, refused, or not a file; or the model has no path.
        """
        if not self._directories:
            raise CallerError(f"{what} beside the model; put it there, and give the model's path instead of its bytes")
        try:
            path = self._permitted(location)
            if path is None:
                raise CallerError(f"{what}, which is not inside the model's own directory; put it there")
            if not stat.S_ISREG(path.stat().st_mode):
                raise CallerError(f"{what}, which is not a file; put the model's own file there")
            return OpenFile(path, self._where)
        except CallerError:  # which is a ValueError
            raise
        except (OSError, ValueError, RuntimeError) as error:  # pathlib raises RuntimeError for links in a circle
            why = getattr(error, "strerror", None) or error
            raise CallerError(f"{what}, which cannot be read ({why}); put it beside the model") from error

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

    @staticmethod
    def _range(entries: Entries, dims: Sequence[int], data_type: int, size: int, what: str) -> tuple[int, int]:
        try:
            offset = int(entries.get("offset", "0"))
            rest = int(prod(dims)) * _ELEMENT_BYTES[data_type] if data_type in _ELEMENT_BYTES else size - offset
            length = int(entries["length"]) if "length" in entries else rest
        except ValueError as error:
            raise CallerError(f"{what}, but offset or length is not a number; export the model again") from error
        if offset < 0 or length < 0 or offset + length > size:
            raise CallerError(f"{what}, bytes {offset} to {offset + length}, but the file has {size}; put the model's own file there")
        return offset, length
