"""What authentication costs: a save beside write + fsync, a load beside a read, and eviction from small and large caches.

    python -m tests.bench cache [--mb 60] [--repeat 9] [--entries 10000 100000] [--directory DIR] [--no-engines]

Rivals run in the same process, in turns, on the same directory. Times are milliseconds; the median and the least of the repeats are shown,
for the machine may be busy with other things.
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anyio
from blake3 import blake3

from aionn.caching import KeyParts, Wanted, encoded_keys
from aionn.caching.blob_cache import BlobCache, Capacity, Limits, Policy, Victim
from aionn.caching.integrity import IntegrityStore
from aionn.caching.manifest import Manifest, StoredFile, encode_manifest
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store import CacheStore, Hit, Miss
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.index import MANIFEST_BYTES
from aionn.hal.engine import Artifact
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import CacheFiles
from tests.bench import cache_hits

FILES = CacheFiles(model=1, data=1)


def timed_ms(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3


def line(name: str, times_ms: list[float], beside: list[float] | None = None, limit: float | None = None) -> None:
    ratio = ""
    if beside is not None:
        # Each repeat against the rival of the same repeat: what else the machine did meanwhile hit both.
        paired = statistics.median(mine / theirs for mine, theirs in zip(times_ms, beside, strict=True))
        ratio = f"   x {paired:.2f} median of pairs, x {min(times_ms) / min(beside):.2f} of the least"
        if limit is not None:
            ratio += f"   (limit {limit})"
    print(f"  {name:<52} median {statistics.median(times_ms):9.3f}   least {min(times_ms):9.3f}{ratio}")


def wanted(number: int) -> Wanted:
    parts = KeyParts(app_token=number.to_bytes(32, "little"), device="bench", device_version="1")
    keys = encoded_keys(parts)
    return Wanted(keys.entry, keys.family, "bench", "1", bytes(32), FILES)


# --- save and load ----------------------------------------------------------------------------------------------------


def write_and_sync(directory: Path, buffers: list[bytes]) -> None:
    for index, buffer in enumerate(buffers):
        fd = os.open(directory / f"plain{index}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        at = 0
        while at < len(buffer):
            at += os.pwrite(fd, buffer[at:] if at else buffer, at)
        os.fsync(fd)
        os.close(fd)
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def read_plain(directory: Path, count: int) -> list[bytes]:
    found = []
    for index in range(count):
        fd = os.open(directory / f"plain{index}", os.O_RDONLY)
        found.append(os.pread(fd, os.fstat(fd).st_size, 0))
        os.close(fd)
    return found


def save_and_sync(store: IntegrityStore, handles: CacheHandles, artifact: Artifact) -> None:
    assert store.save(handles, artifact) is None
    for fd in (*handles.model, *handles.data):
        os.fsync(fd)


async def save_and_load(directory: Path, megabytes: int, repeat: int) -> None:
    print(f"\n{megabytes} MB artifact in two files, ms")
    driver = IntegrityStore("bench", "1", FILES, state_directory=directory / "state")
    plain, saved, published, read, loaded, hits = [], [], [], [], [], []
    fds = [os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("model", "data")]
    handles = CacheHandles((fds[0],), (fds[1],), bytes(32))
    async with CacheStore(directory / "cache", max_bytes=None) as store:
        for _ in range(repeat):
            content = secrets.token_bytes(megabytes * 1_000_000)
            split = len(content) // 3
            artifact = Artifact((content[:split],), (content[split:],))
            buffers = [*artifact.model, *artifact.data]

            plain.append(timed_ms(lambda buffers=buffers: write_and_sync(directory, buffers)))  # type: ignore[misc]
            saved.append(timed_ms(lambda artifact=artifact: save_and_sync(driver, handles, artifact)))  # type: ignore[misc]
            began = time.perf_counter()
            missed = await store.open(wanted(0))
            if isinstance(missed, Hit):
                missed = await missed.reopen_as_miss(Refusal(MissReason.WRONG_BYTES))
            assert isinstance(missed, Miss)
            assert missed.publisher is not None
            assert driver.save(missed.publisher.handles, artifact) is None
            assert await missed.publisher.publish() is None
            published.append((time.perf_counter() - began) * 1e3)

            read.append(timed_ms(lambda: read_plain(directory, 2)))
            loaded.append(timed_ms(lambda: driver.load(handles)))
            began = time.perf_counter()
            async with await store.open(wanted(0)) as hit:
                assert isinstance(hit, Hit)
                assert isinstance(driver.load(hit.handles), Artifact)
            hits.append((time.perf_counter() - began) * 1e3)
    line("write + fsync", plain)
    line("authenticated save + fsync", saved, plain, 1.5)
    line("the same through the store (lock, digest, publish)", published, plain)
    line("read", read)
    line("verified load", loaded, read, 1.5)
    line("the same through the store (lookup, lock)", hits, read)
    driver.close()
    for fd in fds:
        os.close(fd)


# --- eviction ---------------------------------------------------------------------------------------------------------


def populate(directory: Path, entries: int) -> None:
    """Entries as the store leaves them, without its syncs and locks; the store finds them when it makes its index."""
    content = b"x"
    stored = StoredFile(1, blake3(content).digest())
    for number in range(entries):
        what = wanted(number)
        place = directory / "entries" / what.key.hex()
        (place / "0123456789abcdef").mkdir(parents=True, mode=0o700)
        for name in ("model0", "data0"):
            (place / "0123456789abcdef" / name).write_bytes(content)
        manifest = Manifest(
            key=what.key,
            family=what.family,
            device=what.device,
            device_version=what.device_version,
            model_digest=what.model_digest,
            model=(stored,),
            data=(stored,),
            directory="0123456789abcdef",
            generation=1,
            compile_ns=1_000_000 + number,
            created_ns=time.time_ns(),
        )
        (place / "manifest").write_bytes(encode_manifest(manifest))


async def evict(directories: dict[int, Path], repeat: int) -> dict[int, list[float]]:
    """Milliseconds per evicted entry for each size of cache, over rounds of 50 that take turns."""
    os.umask(0o077)
    rounds: dict[int, list[float]] = {entries: [] for entries in directories}
    stores = {entries: CacheStore(directory, max_bytes=None) for entries, directory in directories.items()}
    for entries, directory in directories.items():
        directory.mkdir(mode=0o700)
        populate(directory, entries)
        began = time.perf_counter()
        found = await stores[entries].open(wanted(0))
        await found.aclose()
        print(f"  index of {entries} entries made anew in {time.perf_counter() - began:.1f} s")
    for _ in range(repeat):
        for entries, store in stores.items():
            house = store._house
            place = house.current()
            assert isinstance(place, CacheDirectory)
            target = house.left_bytes() - 50 * (2 + MANIFEST_BYTES)
            began = time.perf_counter()
            removed, _ = await anyio.to_thread.run_sync(house.evict, place, target)
            rounds[entries].append((time.perf_counter() - began) * 1e3 / removed)
            assert removed == 50, removed
    for store in stores.values():
        await store.aclose()
    return rounds


def blob_evict(directories: dict[int, Path], repeat: int) -> dict[int, list[float]]:
    """Milliseconds per `set` that evicts, into a full blob cache of each size, over rounds of 200 that take turns."""
    rounds: dict[int, list[float]] = {entries: [] for entries in directories}
    caches = {}
    value = bytes(100)
    for entries, directory in directories.items():
        directory.mkdir(mode=0o700)
        caches[entries] = BlobCache(
            directory / "blobs.sqlite",
            limits=Limits(max_total_bytes=entries * 108, max_key_bytes=8, max_value_bytes=100),
            policy=Policy(Victim.LRU, Capacity.FIT),
            state_directory=directory / "state",
        )
        for number in range(entries):
            assert caches[entries].set(number.to_bytes(8, "big"), value)
    for turn in range(repeat):
        for entries, cache in caches.items():
            began = time.perf_counter()
            for number in range(200):
                assert cache.set((entries + turn * 200 + number).to_bytes(8, "big"), value)
            rounds[entries].append((time.perf_counter() - began) * 1e3 / 200)
    for entries, cache in caches.items():
        assert len(cache) == entries
        cache.close()
    return rounds


def show(rounds: dict[int, list[float]]) -> None:
    first = next(iter(rounds.values()))
    for entries, times in rounds.items():
        line(f"of {entries}", times, None if times is first else first, 2.0)


async def run(options: argparse.Namespace) -> None:
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {options.directory}")
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = anyio.Path(name)
        await save_and_load(Path(directory), options.mb, options.repeat)
        print("\nevicting one entry of the store, ms")
        show(await evict({entries: Path(directory / f"store{entries}") for entries in options.entries}, options.repeat))
        print("\nevicting `set` of the blob cache, ms")
        show(blob_evict({entries: Path(directory / f"blobs{entries}") for entries in options.entries}, options.repeat))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench cache", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--entries", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--no-engines", action="store_true", help="leave out `cache_hits`: cold, hit and own load of real models")
    options = parser.parse_args(argv)
    anyio.run(run, options)
    if not options.no_engines:
        print("\ncold compilation, verified hit and the engine's own load (python -m tests.bench cache_hits)")
        cache_hits.main(["--repeat", str(options.repeat), "--directory", options.directory])


if __name__ == "__main__":
    main(sys.argv[1:])
