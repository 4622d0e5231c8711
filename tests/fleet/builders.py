"""What the journeys of artifacts need: a builder that compiles in its own state, and a backend that offers what a test says."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aionn
from aionn.caching.manifest import Manifest, decode_manifest, file_names
from aionn.fleet import ArtifactRequest, BuilderKey, Offered, encode_public_key
from aionn.hal.types import CacheFiles


def trust(folder: Path, key: BuilderKey) -> Path:
    """Put a builder's key into a keyring."""
    path = folder / f"{key.name}.pub"
    path.write_bytes(encode_public_key(key.public))
    path.chmod(0o644)
    return path


@dataclass(frozen=True)
class Pushed:
    """An artifact with its signed statement, as a store would have it."""

    signed: bytes
    manifest: Manifest
    folder: Path

    def offer(self) -> Offered:
        files = CacheFiles(len(self.manifest.model), len(self.manifest.data))
        fds = [os.open(self.folder / name, os.O_RDONLY) for name in file_names(files)]
        return Offered(self.signed, fds[: files.model], fds[files.model :])

    def held(self) -> list[str]:
        """Return which of its files this process has open. A number alone says nothing, because another file may get it at once."""
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [path for path in found if path.startswith(f"{self.folder.resolve()}/")]


def entry_of(cache_dir: Path) -> tuple[Manifest, Path]:
    """Return the only entry of a cache, and the folder of its files."""
    (path,) = cache_dir.rglob("manifest")
    manifest = decode_manifest(path.read_bytes())
    assert isinstance(manifest, Manifest)
    return manifest, path.parent / manifest.directory


async def build(folder: Path, source: aionn.Model, key: BuilderKey, device: str, options: Mapping[str, object] | None = None) -> Pushed:
    """Compile a model on what stands for another machine: another state directory, and another cache. `options`: of the engine."""
    asked = {device: options} if options else None
    async with aionn.Runtime(state_dir=folder / "state") as runtime:
        compilation = await runtime.compile(source, devices=(device,), cache_dir=folder / "cache", options=asked)
        assert [outcome.save_failure for outcome in compilation.outcomes] == [None]
    manifest, files = entry_of(folder / "cache")
    return Pushed(key.sign(manifest), manifest, files)


class Backend:
    """Offers what `answer` returns, and keeps the requests."""

    wait_s = 30.0

    def __init__(self, answer: Callable[[ArtifactRequest], Awaitable[Offered | None]]) -> None:
        self.answer, self.requests, self.offered = answer, list[ArtifactRequest](), list[Offered]()

    async def compile(self, request: ArtifactRequest) -> Offered | None:
        self.requests.append(request)
        offered = await self.answer(request)
        if offered is not None:
            self.offered.append(offered)
        return offered


def offering(pushed: Pushed) -> Backend:
    async def answer(request: ArtifactRequest) -> Offered:
        return pushed.offer()

    return Backend(answer)
