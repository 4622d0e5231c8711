"""The folders that aionn writes to: the state directory of drivers, and caches. Looking leaves nothing in them."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from shlex import quote

from aionn.caching import blob_cache, integrity
from aionn.caching.private_folder import left_folders, missing_home
from aionn.caching.state import query, read_database, state_path
from aionn.caching.store import index
from aionn.caching.store.directory import UnsafeFileError, check_owner, is_hex, refusal_to_store
from aionn.cgroups import text_of
from aionn.cli.checks import ROOT, Row, fail, ok, warn
from aionn.cli.checks.leavings import cache_leavings, records_folders, state_leavings
from aionn.cli.printing import entries, size

_LEAST_FREE_BYTES, _GOOD_FREE_BYTES = 16 << 20, 256 << 20
_FUTURE_S = 60.0

_DATABASE = re.compile(r"(integrity|blobs)-[A-Za-z0-9_-]+\.sqlite")
"""A driver's database. A model file that has taken a driver over may leave files of any name, and a way out is pasted into a shell."""

_MADE_BY = {"integrity": integrity.make_tables, "blobs": blob_cache.make_tables, "index": index.make_tables}
"""What makes each kind of database. SQLite's own check of another schema may not end, because it computes columns and constraints."""

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs", "beegfs", "gpfs", "ocfs2", "gfs2")
"""File systems on which flock, or the shared memory of SQLite's WAL mode, may not work between machines."""


def state_directory(directory: str | None = None, root: Path = ROOT) -> list[Row]:
    """Check the directory in which drivers keep what they trust. It must belong to this account alone."""
    check, path = "state directory", state_path(directory)
    another = "name another folder: Runtime(state_dir=), --state-dir, $XDG_STATE_HOME"
    way_out = f"chown {os.geteuid()} {path}, or {another}"
    needed = "a folder of this account that it can write to; without one nothing is cached"
    try:
        status = path.lstat()
    except FileNotFoundError:
        homeless = missing_home(path)
        return [fail(check, homeless, needed, another) if homeless else _missing(check, path, needed, another)]
    except OSError as error:
        return [fail(check, f"{path}: {error.strerror}", needed, another)]
    if not stat.S_ISDIR(status.st_mode):
        return [fail(check, f"{path} is a symlink, or not a folder", needed, f"remove or rename it, or {another}")]
    if status.st_uid != os.geteuid():
        return [fail(check, f"{path} belongs to user {status.st_uid}, this is user {os.geteuid()}", needed, way_out)]
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        return [fail(check, f"{path} has mode {mode} or is read-only: nothing new is cached", needed, f"chmod 0700 {path}, or {another}")]
    folders = records_folders(path)
    databases = sorted(file for folder in folders for file in folder.glob("*.sqlite") if _DATABASE.fullmatch(file.name))
    rows = [_databases(check, path, databases)]
    rows += _place("state", path, root)
    if left := str(state_leavings(path)):
        rows.append(warn("state leavings", left, "none", "aionn doctor --fix removes them"))
    return rows


def export_folders() -> list[Row]:
    """Look for folders for temporary files that drivers of a killed app have left."""
    left = left_folders()
    if not left:
        return []
    words = f"{len(left)} folders for temporary files of ended drivers: {', '.join(left)}"
    return [warn("export leavings", words, "none", "aionn doctor --fix removes them; so does the next driver of such an engine")]


def cache_directory(directory: str, root: Path = ROOT) -> list[Row]:
    """Check a cache without reading its artifacts, as `aionn cache verify` does."""
    check, path = "cache directory", Path(directory)
    needed = "a folder that belongs to this account, and that no other account may write to"
    way_out = f"chown {os.geteuid()} {path} and chmod go-w {path}, or give another cache_dir"
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return [fail(check, f"{path} is a symlink, or not a folder", needed, "remove or rename it, or give another cache_dir")]
        for part in (path, *(path / name for name in ("entries", "locks", "trash") if (path / name).exists())):
            check_owner(part.lstat(), str(part))
    except FileNotFoundError:
        missing = _missing(check, path, needed, way_out)
        refusal = refusal_to_store(str(_parent(path))) if missing.status == "ok" else None
        return [missing if refusal is None else fail(check, f"{path} is not there, and cannot be made: {refusal}", needed, way_out)]
    except UnsafeFileError as error:
        return [fail(check, str(error), needed, way_out)]
    except OSError as error:
        return [fail(check, f"{path}: {error.strerror}", needed, way_out)]
    if not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
        return [fail(check, f"{path} cannot be read", needed, f"chmod u+rwx {path}")]
    if not os.access(path, os.W_OK, effective_ids=True):
        found, judge = "it is used, and nothing new is stored", warn
        if not _count(path):
            found, judge = "it holds no entry and can get none, so every start compiles again", fail
        return [judge(check, f"{path} is read-only: {found}", "a folder that can be written to", way_out)]
    if (refusal := refusal_to_store(str(path))) is not None:
        words = f"{refusal}: nothing new is stored, so every start compiles again"
        return [
            fail(check, words, "a folder that can be written to", f"free space or raise the limit, or {way_out}"),
            *_place("cache", path, root),
        ]
    rows = [_databases(check, path, [database] if (database := path / "index.sqlite").exists() else [], f", {entries(_count(path))}")]
    rows += _place("cache", path, root)
    if left := cache_leavings(path):
        what = f"{left} leavings of processes that died while they wrote"
        rows.append(warn("cache leavings", what, "none", f"aionn doctor --fix --cache-dir {path} removes them; so does the next app"))
    return rows


def _missing(check: str, path: Path, needed: str, way_out: str) -> Row:
    """Return the row of a folder that is not there yet. It is made at its first use, if its parent allows that."""
    parent = _parent(path)
    if os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        return ok(check, f"{path} is not there; it is made at its first use")
    return fail(check, f"{path} is not there, and {parent} cannot be written to", needed, way_out)


def _parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _count(path: Path) -> int:
    folder = path / "entries"
    return sum(is_hex(name, 64) for name in os.listdir(folder)) if folder.is_dir() else 0


def _databases(check: str, path: Path, databases: list[Path], more: str = "") -> Row:
    """Check that SQLite can read each database and finds it sound."""
    damaged = [f"{database.relative_to(path)} ({complaint})" for database in databases if (complaint := _complaint(database))]
    if damaged:
        way_out = (
            f"none needed for safety: the next use begins it anew; to do so now, rm {quote(str(path / damaged[0].partition(' ')[0]))}*"
        )
        return fail(check, f"{path}: damaged {', '.join(damaged)}", "databases that SQLite can read", way_out)
    return ok(check, f"{path}, {len(databases)} sound database{'s' * (len(databases) != 1)}{more}")


def _complaint(database: Path) -> str:
    try:
        kind = re.split("[-.]", database.name)[0]
        with closing(read_database(database, _MADE_BY[kind], synced=kind != "index")) as connection:
            ((answer,), *_) = query(connection, "PRAGMA quick_check(1)")
    except FileNotFoundError:
        return ""  # removed meanwhile
    except (OSError, sqlite3.Error) as error:
        return str(error)
    return "" if answer == "ok" else str(answer)


def _place(what: str, path: Path, root: Path) -> Iterator[Row]:
    """Check the file system of a folder: free space, network, and times that lie in the future."""
    free = os.statvfs(path)
    free_bytes = free.f_bavail * free.f_frsize
    found = f"{size(free_bytes)} free for {path}"
    if free_bytes >= _GOOD_FREE_BYTES and (free.f_favail or not free.f_files):
        yield ok(f"{what} space", found)
    else:
        judge = fail if free_bytes < _LEAST_FREE_BYTES else warn
        yield judge(f"{what} space", found, f"{size(_GOOD_FREE_BYTES)} and free inodes", "aionn cache prune --max-bytes, or a larger disk")
    kind = file_system(path, root)
    if kind in _NETWORK or kind.startswith("fuse."):
        yield warn(
            f"{what} file system",
            f"{path} lies on {kind}",
            "a local file system: locks (flock) and SQLite may fail between machines",
            "give each machine its own folder, and share with aionn fleet or by copying",
        )
    within = (entry for folder in (path, *(records_folders(path) if what == "state" else ())) for entry in _listed(folder))
    ahead_s = max((entry.stat(follow_symlinks=False).st_mtime for entry in within), default=0.0) - time.time()
    if ahead_s > _FUTURE_S:
        found = f"{path} holds files from {ahead_s / 3600:.1f} h in the future, so the clock was set back"
        yield warn(f"{what} times", found, "times in the past, by which old entries are forgotten", "let an NTP service set the clock")


def _listed(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as found:
        return list(found)


def file_system(path: Path, root: Path = ROOT) -> str:
    """Return the type of the file system that holds a path, or an empty text."""
    place, best = str(path.resolve()), ("", "")
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        fields, kind = front.split(), back.split()
        if len(fields) < 5 or not kind:
            continue
        mount = fields[4].replace("\\040", " ")
        if (place == mount or place.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best[0]):
            best = (mount, kind[0])
    return best[1]
