"""Open the address of an artifact store: a local directory, memory, or an S3-compatible bucket.

`StoreError` says that an artifact store cannot be used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from aionn.errors import AionnError, CallerError

try:
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, MemoryStore, S3Store
except ImportError as error:
    raise ImportError("artifact stores need obstore; install it with: pip install 'aionn[fleet]'") from error

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
