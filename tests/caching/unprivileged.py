"""Modes of files as they bind an account that is not root. Run as `python -m tests.caching.unprivileged SCENARIO DIRECTORY`.

Root may write to anything whatever its mode. So a process of root's gives those rights up first, for itself and for its drivers.
`heal`: an entry's directory that its own account cannot use. `mode`, `volume`: a cache that cannot be written to, because of its modes or
because it lies on a volume mounted read-only; its driver has the records. With "all", those are read-only, too.
Any complaint is an exception.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sqlite3
import sys
from pathlib import Path

import anyio
import numpy as np

import aionn
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store import CacheStore, Miss
from aionn.testing import identity_model
from aionn.testing.fake_engine import FakeEngine
from tests.caching.entries import expected, fill, miss, read, replacing, stored, wanted

FAKE = f"{FakeEngine.__module__}:{FakeEngine.__qualname__}"
_PR_CAPBSET_DROP = 24
_CAPABILITIES_VERSION = 0x20080522
_OVERRIDES = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


class NotPossibleError(Exception):
    """The system does not let this account do it."""


def _libc(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise NotPossibleError(f"{name}: {os.strerror(number)}")


def obey_modes() -> None:
    """Give up root's right to override the modes of files, before any thread is started."""
    if os.geteuid() != 0:
        return
    for capability in _OVERRIDES:
        _libc("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    _libc("capget", header, sets)
    for which in range(3):  # effective, permitted, inheritable
        for capability in _OVERRIDES:
            sets[which] &= ~(1 << capability) & 0xFFFFFFFF
    _libc("capset", header, sets)


def mount_read_only(path: Path) -> None:
    """Mount a directory over itself, read-only, for this process and those it starts."""
    user = os.geteuid()
    _libc("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_bytes(b"deny")
        Path("/proc/self/uid_map").write_bytes(b"%d %d 1" % (user, user))
    target = os.fsencode(path)
    _libc("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _libc("mount", target, target, None, _MS_BIND, None)
    _libc("mount", None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None)


async def heal(directory: Path) -> None:
    entry = directory / "cache" / "entries" / wanted().key.hex()
    for mode in (0o000, 0o400, 0o300, 0o770, 0o500):
        async with CacheStore(directory / "cache") as store:
            await stored(store, wanted())
            entry.chmod(mode)
            # What can be read is a hit still; a better stage cannot replace it.
            publisher = await replacing(store, wanted()) if mode == 0o500 else await miss(store, wanted())
            async with publisher:
                fill(publisher.handles, b"healed")
                assert await publisher.publish() is None
            assert await read(store, wanted()) == expected(b"healed")
            report = await store.prune(0)
            assert not isinstance(report, Refusal)
            assert (report.removed, report.in_use) == (1, 0)


async def read_only(directory: Path) -> None:
    """A cache with one model of two, in a directory that cannot be written to any more."""
    cache_dir, warnings = directory / "cache", list[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger("aionn").addHandler(Listener(logging.WARNING))
    before = sorted(str(path) for path in cache_dir.rglob("*"))
    for features, kind, expected_warnings in ((16, "HIT", 0), (16, "HIT", 0), (8, "MISS", 1)):
        model = aionn.Model.from_onnx(identity_model({"x": (1, features)}, outputs=["y"]))
        async with aionn.Runtime(state_dir=directory / "state") as runtime:
            for _ in range(2):
                compilation = await runtime.compile(model, devices=(FAKE,), cache_dir=cache_dir, token=model.token)
                assert (await compilation.compute({"x": np.full((1, features), 3, np.float32)}))["y"].tolist() == [[3.0] * features]
                (outcome,) = compilation.outcomes
                assert outcome.kind.name == kind, outcome
                if kind == "MISS":
                    assert outcome.reason is MissReason.ABSENT, outcome
                    assert outcome.save_failure is not None
                    assert outcome.save_failure.reason is MissReason.NO_PERMISSION, outcome
        assert len(warnings) == expected_warnings, warnings
    async with CacheStore(cache_dir) as store:
        listed = await store.entries()
        assert not isinstance(listed, Refusal)
        assert len(listed) == 1
        assert [bad async for bad in store.verify()] == []
        refused = await store.prune(0)
        assert isinstance(refused, Refusal)
        assert refused.reason is MissReason.NO_PERMISSION
        async with await store.open(wanted()) as missed:
            assert isinstance(missed, Miss)
            assert missed.publisher is None
            assert missed.outcome.save_failure is not None
            assert missed.outcome.save_failure.reason is MissReason.NO_PERMISSION
    assert sorted(str(path) for path in cache_dir.rglob("*")) == before


async def make_cache(directory: Path) -> None:
    model = aionn.Model.from_onnx(identity_model({"x": (1, 16)}, outputs=["y"]))
    async with aionn.Runtime(state_dir=directory / "state") as runtime:
        await runtime.compile(model, devices=(FAKE,), cache_dir=directory / "cache", token=model.token)


def main(scenario: str, directory: str) -> None:
    place = Path(directory)
    if scenario == "heal":
        obey_modes()
        anyio.run(heal, place)
        return
    how, _, what = scenario.partition(" ")
    anyio.run(make_cache, place)
    closed = place if what == "all" else place / "cache"
    if how == "volume":
        mount_read_only(closed)
        anyio.run(read_only, place)
        return
    for database in (place / "state").glob("*/*.sqlite"):
        connection = sqlite3.connect(database)  # its last user leaves no log behind, unlike a driver that is ended
        connection.execute("SELECT token FROM records")
        connection.close()
        assert not Path(f"{database}-wal").exists()
    obey_modes()
    paths = [closed, *closed.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    anyio.run(read_only, place)
    for path in paths:
        path.chmod(path.stat().st_mode | 0o200)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except NotPossibleError as error:
        print(error, file=sys.stderr)
        sys.exit(77)
