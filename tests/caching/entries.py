"""What the caching tests share: a wanted entry, and a driver's part in filling and reading its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from aionn.caching import KeyParts, Wanted, encoded_keys
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store import CacheStore, Hit, Miss, Publisher
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import CacheFiles

FILES = CacheFiles(model=2, data=1)


def wanted(token: int = 0, *, version: str = "1.0", model: int = 7, files: CacheFiles = FILES, device: str = "fake", **more: Any) -> Wanted:
    parts = KeyParts(app_token=token.to_bytes(32, "little"), device=device, device_version=version, **more)
    keys = encoded_keys(parts)
    return Wanted(keys.entry, keys.family, device, version, bytes([model]) * 32, files, keys.encoded)


def fill(handles: CacheHandles, content: bytes) -> None:
    """Write as a driver does: truncate, then from the beginning, a different text into each file."""
    for index, fd in enumerate((*handles.model, *handles.data)):
        os.ftruncate(fd, 0)
        os.pwrite(fd, bytes([index]) + content, 0)


def contents(handles: CacheHandles) -> list[bytes]:
    return [os.pread(fd, os.fstat(fd).st_size, 0) for fd in (*handles.model, *handles.data)]


def expected(content: bytes, files: CacheFiles = FILES) -> list[bytes]:
    return [bytes([index]) + content for index in range(files.model + files.data)]


async def miss(store: CacheStore, what: Wanted) -> Publisher:
    found = await store.open(what)
    assert isinstance(found, Miss), found
    assert found.publisher is not None, found.outcome
    return found.publisher


async def replacing(store: CacheStore, what: Wanted) -> Publisher:
    """Refuse the stored generation, as a device does; return the publisher of the next one."""
    found = await store.open(what)
    assert isinstance(found, Hit), found
    again = await found.reopen_as_miss(Refusal(MissReason.WRONG_BYTES))
    assert isinstance(again, Miss), again
    assert again.publisher is not None, again.outcome
    return again.publisher


async def stored(store: CacheStore, what: Wanted, content: bytes = b"artifact", compile_ns: int = 1_000_000) -> None:
    """Compile and publish once."""
    async with await miss(store, what) as publisher:
        fill(publisher.handles, content)
        assert await publisher.publish(compile_ns=compile_ns) is None


async def read(store: CacheStore, what: Wanted) -> list[bytes]:
    found = await store.open(what)
    assert isinstance(found, Hit), found.outcome
    async with found:
        return contents(found.handles)


def generations(directory: Path, what: Wanted) -> list[str]:
    """Names of all generation directories of an entry, staging included."""
    entry = directory / "entries" / what.key.hex()
    return sorted(path.name for path in entry.iterdir() if path.is_dir()) if entry.exists() else []


def open_descriptors() -> set[str]:
    return {f"{fd}:{os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}
