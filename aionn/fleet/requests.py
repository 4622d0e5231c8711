"""Object stores: opened by their address (a directory, memory, or an S3-compatible bucket), and asked with retries and a time limit.

A request that makes no progress for `patience_s` seconds raises `StoreError`. A local store is asked once, because asking a file system
again changes nothing. Objects are written whole or not at all. Nothing here renames an object.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import anyio
from blake3 import blake3

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        InvalidPathError,
        NotFoundError,
        NotSupportedError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
    from obstore.store import LocalStore, MemoryStore, S3Store
except ImportError as error:
    raise ImportError("artifact stores need obstore; install it with: pip install 'aionn[fleet]'") from error

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from aionn.caching.manifest import StoredFile
from aionn.errors import AionnError, CallerError
from aionn.escapes import escaped
from aionn.fleet.folders import BadContentsError, Found, found_below, read_small, unlink_below

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_FIRST_BACKOFF_S = 0.05
_NO_LIMIT_S = 86400.0  # obstore's limit for a whole request counts from its start, so it would cut a large transfer


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """An opened object store.

    Attributes:
        address: as the caller gave it.
        objects: obstore's store.
        folder: the directory of a local store. None for a bucket and for memory.
        patience_s: seconds without progress after which a request is given up.
    """

    address: str
    objects: ObjectStore
    folder: Path | None
    patience_s: float


def open_address(address: str | os.PathLike[str], *, patience_s: float, make: bool = False) -> OpenedStore:
    """Open a store. A local directory must exist. No request is sent to a bucket yet.

    Args:
        address: a path, `file:///path`, `memory://` (a new store of this process, for tests) or `s3://bucket/prefix`. Credentials,
            region and endpoint of a bucket come from the usual `AWS_*` variables.
        patience_s: see `OpenedStore`.
        make: whether a local directory that is missing is made.

    Raises:
        CallerError: this kind of address is not supported.
        StoreError: there is no such directory, or the bucket's settings are wrong.
    """
    text = os.fspath(address)
    parts = urlsplit(text)
    if parts.scheme in ("s3", "s3a"):
        # Not quoted, because an address goes into logs, and this one may have secrets.
        if "@" in parts.netloc or parts.query or parts.fragment or not parts.netloc:
            raise CallerError("the address of a bucket is s3://bucket/prefix; credentials come from the AWS_* variables")
        return _bucket(text, parts.netloc, unquote(parts.path).strip("/"), patience_s)
    if parts.scheme == "memory":
        return OpenedStore(text, MemoryStore(), None, patience_s)
    if parts.scheme == "file" and not parts.netloc and not parts.query and not parts.fragment:
        return _folder(text, Path(unquote(parts.path)), patience_s, make)
    if "://" in text or not text:
        raise CallerError(
            f"artifact store {text!r}: give a directory, file:///path or s3://bucket/prefix; write # and ? of a path as %23 and %3F"
        )
    return _folder(text, Path(text), patience_s, make)


def _folder(address: str, path: Path, patience_s: float, make: bool) -> OpenedStore:
    path = path.absolute()
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            raise StoreError(address, "opening it", f"there is no directory {str(path)!r}")
        return OpenedStore(address, LocalStore(path), path, patience_s)
    except OSError as error:
        raise StoreError(address, "opening it", error.strerror or str(error)) from error


def _bucket(address: str, bucket: str, prefix: str, patience_s: float) -> OpenedStore:
    backoff = {"init_backoff": timedelta(seconds=_FIRST_BACKOFF_S), "max_backoff": timedelta(seconds=1), "base": 2}
    # `Requests` repeats requests, too. obstore must report a failure before the patience of `Requests` ends.
    retries: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=patience_s / 2), "backoff": backoff}  # type: ignore[typeddict-item]
    limits: ClientConfig = {
        "connect_timeout": timedelta(seconds=patience_s),
        "read_timeout": timedelta(seconds=patience_s),
        "timeout": timedelta(seconds=_NO_LIMIT_S),
    }
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"):
        limits["allow_http"] = True
    try:
        # Not every S3-compatible store has the request that deletes many objects at once.
        objects = S3Store(bucket, prefix=prefix or None, client_options=limits, retry_config=retries, disable_bulk_delete=True)
    except (BaseError, ValueError) as error:
        raise StoreError(address, "opening it", str(error).partition("\n")[0]) from error
    return OpenedStore(address, objects, None, patience_s)


class StoreError(AionnError):
    """An artifact store cannot be used: it does not answer, it refuses, it is full, or its address is wrong.

    Attributes:
        store: the address.
        reason: what the store answered, or that it did not answer in time.
    """

    def __init__(self, store: str, doing: str, reason: str) -> None:
        super().__init__(f"artifact store {store}: {doing} failed: {reason}")
        self.store = store
        self.reason = reason


T = TypeVar("T")
MULTIPART_BYTES = 64_000_000  # larger files go up in parts, so a lost connection costs one part
_PART_BYTES = 16 << 20
_CHUNK_BYTES = 256 << 10  # comes within the patience, so it bounds how slow a transfer may be
_MAX_OBJECTS = 1_000_000
_MAX_REASON = 300
_STREAMED_AT_ONCE = 2
_SLOWEST_BYTES_PER_S = 1_000_000  # an upload shows no progress, so its time grows with its size
_RETRY_S = 0.1
_FINAL = (PermissionDeniedError, UnauthenticatedError, NotSupportedError, InvalidPathError, PreconditionError)


class Requests:
    """The requests of an artifact store to its object store. All raise `StoreError` if the store cannot be used."""

    def __init__(self, opened: OpenedStore) -> None:
        self.opened = opened

    async def put_new(self, path: str, content: bytes | memoryview) -> bool:
        """Write an object unless one of that name exists. Return False if one does.

        One of several writers wins, and the others get False. An object above `MULTIPART_BYTES` is looked up first instead: its name
        stands for its contents, so writing it twice changes nothing.
        """
        size = memoryview(content).nbytes
        if size > MULTIPART_BYTES:
            if await self.find(path) is not None:
                return False
            await self.replace(path, content)
            return True
        try:
            await self._ask(f"writing {path}", lambda: obstore.put_async(self.opened.objects, path, content, mode="create"), size)
        except AlreadyExistsError:
            return False
        return True

    async def put_chunks(self, path: str, chunks: Callable[[], Iterator[bytes | memoryview]], size_bytes: int) -> None:
        """Write an object, whether or not there is one of that name. A large object is never in memory as a whole.

        Args:
            chunks: reads the contents from their beginning. It is called in threads, and again if a request has to be repeated. What it
                raises ends the call, and the object is as it was.
        """
        if size_bytes <= MULTIPART_BYTES:
            await self.replace(path, await anyio.to_thread.run_sync(lambda: b"".join(chunks())))
            return

        async def put() -> None:
            await obstore.put_async(
                self.opened.objects, path, chunks(), use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_STREAMED_AT_ONCE
            )

        await self._ask(f"writing {path}", put, size_bytes)

    async def replace(self, path: str, content: bytes | memoryview) -> None:
        """Write an object, whether or not there is one of that name."""
        size = memoryview(content).nbytes
        put = partial(
            obstore.put_async,
            self.opened.objects,
            path,
            content,
            use_multipart=size > MULTIPART_BYTES,
            chunk_size=_PART_BYTES,
            max_concurrency=4,
        )
        await self._ask(f"writing {path}", put, size)

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """Return an object's contents, or None if there is no such object.

        Raises:
            StoreError: it cannot be read.
            BadContentsError: it has more than `max_bytes` bytes, or is not a regular file.
        """

        async def read() -> bytes:
            answer = await obstore.get_async(self.opened.objects, path)
            if answer.meta["size"] > max_bytes:
                raise BadContentsError(f"{path} has {answer.meta['size']} bytes, at most {max_bytes} are read")
            content = bytearray()
            async for chunk in answer.stream(min_chunk_size=0):  # a server may announce one size and send more
                content += memoryview(chunk).cast("B")
                if len(content) > max_bytes:
                    raise BadContentsError(f"{path} has more than {max_bytes} bytes")
            return bytes(content)

        folder = self.opened.folder
        here = partial(self._here, read_small, path, max_bytes)
        try:
            return await self._ask(f"reading {path}", read if folder is None else here)
        except (NotFoundError, FileNotFoundError):
            return None

    async def copy_file(self, path: str, stored: StoredFile, fd: int | None) -> bool:
        """Read an object whose digest is known, and write it to a file. Return False if there is no such object.

        Args:
            fd: an empty file, open for writing. None: check the contents only.

        Raises:
            StoreError: it cannot be read.
            BadContentsError: it has another length or digest, also when it is read a second time. What the file holds is of no use.
        """
        for last in (False, True):
            try:
                return await self._copied(path, stored, fd)
            except BadContentsError:
                if last:
                    raise
        raise AssertionError("unreachable")

    async def copy_object(self, path: str, most_bytes: int, fd: int) -> bool:
        """Copy an object to a file. Return False if there is no such object. The caller checks the contents.

        Raises:
            StoreError: it cannot be read.
            BadContentsError: it is longer, or has another length than the store says. The file has at most `most_bytes` bytes, of no use.
        """
        return await self._copied(path, StoredFile(most_bytes, b""), fd)

    async def _copied(self, path: str, stored: StoredFile, fd: int | None) -> bool:
        """Copy an object to a file. Return False if the store has no such object. Without a digest, `stored` has the most bytes to take."""
        answer: Any = None

        async def opened() -> None:
            nonlocal answer
            answer = await obstore.get_async(self.opened.objects, path)

        give_up_at = time.monotonic() + self.opened.patience_s
        while True:
            try:
                await self._ask(f"reading {path}", opened)
                length: int = answer.meta["size"]
                if length > stored.length or (stored.digest and length < stored.length):
                    expected = f"{stored.length}" if stored.digest else f"at most {stored.length}"
                    raise BadContentsError(f"{path} has {length} bytes, expected {expected}")
                await self._through(path, answer, StoredFile(length, stored.digest), fd)
                return True
            except (NotFoundError, FileNotFoundError):
                return False
            except BaseError as error:  # the answer was torn after it had begun
                if time.monotonic() > give_up_at or self.opened.folder is not None:
                    raise self._failed(f"reading {path}", error) from error
                await anyio.sleep(_RETRY_S)

    async def _through(self, path: str, answer: Any, stored: StoredFile, fd: int | None) -> None:
        """Copy an answer to a file, and compare its length and digest with `stored`. An empty digest is not compared."""
        hasher, at = blake3(), 0
        stream = answer.stream(min_chunk_size=_CHUNK_BYTES).__aiter__()
        while True:
            chunk = b""
            with anyio.move_on_after(self.opened.patience_s) as limit:
                try:
                    chunk = await stream.__anext__()
                except StopAsyncIteration:
                    break
            if limit.cancelled_caught:
                raise StoreError(self.opened.address, f"reading {path}", f"no byte came for {self.opened.patience_s:g} s")
            if at + len(chunk) > stored.length:
                raise BadContentsError(f"{path} has more than {stored.length} bytes")
            await anyio.to_thread.run_sync(_take, hasher, memoryview(chunk).cast("B"), fd, at)
            at += len(chunk)
        if at != stored.length or (stored.digest and hasher.digest() != stored.digest):
            raise BadContentsError(f"{path} has contents of another digest")

    async def find(self, path: str) -> Found | None:
        """Return what the store says about an object, or None if there is no such object."""
        folder = self.opened.folder
        here = partial(self._here, found_below, path)

        async def look() -> Found:
            if folder is not None:
                return await here()
            meta = await obstore.head_async(self.opened.objects, path)
            return Found(path, meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or "")

        try:
            return await self._ask(f"looking for {path}", look)
        except (NotFoundError, FileNotFoundError):
            return None

    async def remove_found(self, found: Found) -> bool:
        """Remove an object if it is still the one that `find` has returned. Return False if it is another one, or is gone.

        The object is looked at right before it is removed, because neither a file system nor obstore removes on a condition. What a
        writer puts there between the two is removed: in a folder within microseconds, in a bucket within the time of one request.
        """
        if self.opened.folder is None and await self.find(found.path) != found:
            return False
        return await self.remove(found.path, found)

    async def remove(self, path: str, expected: Found | None = None) -> bool:
        """Remove an object. Return False if a local store has no such object; a bucket does not say so.

        Args:
            expected: a local store removes the object only if it is this one.
        """
        folder = self.opened.folder
        unlink = partial(self._here, unlink_below, path, expected)
        delete = partial(obstore.delete_async, self.opened.objects, path)
        try:
            await self._ask(f"removing {path}", delete if folder is None else unlink)
        except (NotFoundError, FileNotFoundError):
            return False
        return True

    async def listing(self, prefix: str) -> list[Found]:
        """Return all objects below a prefix. For commands only, because a list takes long."""

        async def read() -> list[Found]:
            found = []
            async for batch in obstore.list(self.opened.objects, prefix, chunk_size=1000):
                limit.deadline = anyio.current_time() + self.opened.patience_s
                found += [Found(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in batch]
                if len(found) > _MAX_OBJECTS:
                    raise StoreError(self.opened.address, f"listing {prefix}", f"it has more than {_MAX_OBJECTS} objects there")
            return found

        give_up_at = time.monotonic() + self.opened.patience_s
        while True:
            with anyio.move_on_after(self.opened.patience_s) as limit:
                try:
                    return await read()
                except (BaseError, FileNotFoundError) as error:
                    # A folder changes while it is listed. A list that lacks objects must never look like a whole one.
                    again = self.opened.folder is not None or not isinstance(error, (*_FINAL, NotFoundError, FileNotFoundError))
                    if not again or time.monotonic() > give_up_at:
                        raise self._failed(f"listing {prefix}", error) from error
            if limit.cancelled_caught:
                raise self._late(f"listing {prefix}", self.opened.patience_s)
            await anyio.sleep(_RETRY_S)

    async def _here(self, act: Callable[..., T], *arguments: object) -> T:
        """Run a blocking function of a local store in a thread. Its first argument is the folder."""
        return await anyio.to_thread.run_sync(partial(act, self.opened.folder, *arguments), abandon_on_cancel=True)

    async def _ask(self, doing: str, ask: Callable[[], Awaitable[T]], size_bytes: int = 0) -> T:
        """Ask until there is an answer, a final refusal, or no patience is left."""
        patience_s = self.opened.patience_s + size_bytes / _SLOWEST_BYTES_PER_S
        give_up_at = time.monotonic() + patience_s
        failure: BaseError | None = None
        while True:
            with anyio.move_on_after(give_up_at - time.monotonic()):
                try:
                    return await ask()
                except (AlreadyExistsError, NotFoundError):
                    raise
                except BaseError as error:
                    failure = error
                    # A sweep removes empty folders, also one that is being made for this object.
                    if isinstance(error, _FINAL) or (self.opened.folder is not None and "kind: NotFound" not in str(error)):
                        raise self._failed(doing, error) from error
                except OSError as error:
                    if isinstance(error, FileNotFoundError):
                        raise
                    raise StoreError(self.opened.address, doing, error.strerror or str(error)) from error
                await anyio.sleep(_RETRY_S)
            if time.monotonic() >= give_up_at:
                raise self._late(doing, patience_s) if failure is None else self._failed(doing, failure)

    def _failed(self, doing: str, error: Exception) -> StoreError:
        return StoreError(self.opened.address, doing, _reason_of(error))

    def _late(self, doing: str, patience_s: float) -> StoreError:
        return StoreError(self.opened.address, doing, f"it did not answer within {patience_s:g} s")


def _reason_of(error: Exception) -> str:
    """Return obstore's error in one sentence, without its dump of internal objects.

    The text may quote a hostile server, so it is cut, and characters that are not printable become escapes.
    """
    text = str(error).partition("\n\nDebug source")[0]
    text = re.sub(r", after \d+ retries, max_retries: \d+, retry_timeout: \S+", "", " ".join(text.split()))
    return escaped(text, _MAX_REASON, one_line=True)


def _take(hasher: Any, chunk: memoryview, fd: int | None, at: int) -> None:
    hasher.update(chunk)
    while fd is not None and chunk:
        count = os.pwrite(fd, chunk, at)
        at, chunk = at + count, chunk[count:]
