"""Changes to the entries of a cache directory: staging, sealing, switching, removing. Blocking, for threads.

Only the holder of an entry's compile lock may change the entry.
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from aionn.caching.manifest import Manifest, StoredFile, encode_manifest, file_names
from aionn.caching.store.directory import (
    DIRECTORY_FLAGS,
    MANIFEST,
    CacheDirectory,
    Staged,
    UnsafeFileError,
    close_all,
    is_hex,
    remove_tree,
    stored_file,
)
from aionn.caching.store.locks import TURN
from aionn.hal.types import CacheFiles

__all__ = ["clean", "empty_trash", "heal", "remove_entry", "seal", "stage_files", "switch"]


def heal(directory: CacheDirectory, key: bytes) -> None:
    """Delete what has the name of an entry if it cannot hold one: another kind of file, or a directory with a wrong mode."""
    with directory:
        try:
            status = os.stat(key.hex(), dir_fd=directory.entries_fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o022 or mode & 0o700 != 0o700:
            _displace(directory, key)


def stage_files(directory: CacheDirectory, key: bytes, files: CacheFiles) -> Staged:
    """Make fresh empty files in a new directory of the entry."""
    name = os.urandom(8).hex()
    names = file_names(files)
    fds: list[int] = []
    with directory, directory.entry(key, make=True) as entry:
        os.mkdir(name, 0o700, dir_fd=entry)
        try:
            generation = os.open(name, DIRECTORY_FLAGS, dir_fd=entry)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fds.extend(os.open(file, flags, 0o600, dir_fd=generation) for file in names)
            finally:
                os.close(generation)
        except BaseException:
            close_all(fds)
            remove_tree(name, entry)
            raise
    return Staged(name, names, tuple(fds))


def seal(directory: CacheDirectory, key: bytes, staged: Staged) -> tuple[StoredFile, ...]:
    """Bring the staged files to disk. Return their lengths and digests.

    Raises:
        UnsafeFileError: a name no longer leads to the file that was staged.
    """
    with directory, directory.entry(key) as entry:
        generation = os.open(staged.directory, DIRECTORY_FLAGS, dir_fd=entry)
        try:
            for name, fd in zip(staged.names, staged.fds, strict=True):
                there, ours = os.stat(name, dir_fd=generation, follow_symlinks=False), os.fstat(fd)
                if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
                    raise UnsafeFileError(f"file {name} was replaced while the driver wrote it")
            # Read and digest while the disk is at work, which takes several times as long.
            with ThreadPoolExecutor(1, "aionn sync") as syncing:
                synced = [syncing.submit(os.fsync, fd) for fd in (*staged.fds, generation)]
                files = tuple(map(stored_file, staged.fds))
            for done in synced:
                done.result()
        finally:
            os.close(generation)
    return files


def switch(directory: CacheDirectory, key: bytes, manifest: Manifest) -> None:
    """Make `manifest` the entry's manifest, on disk when this returns. Before the rename the entry is the old one, then the new one."""
    with directory:
        with directory.entry(key, make=True) as entry:
            aside = f"{MANIFEST}.{os.urandom(4).hex()}"
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=entry)
            try:
                try:
                    text = encode_manifest(manifest)
                    while text:
                        text = text[os.write(fd, text) :]
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(aside, MANIFEST, src_dir_fd=entry, dst_dir_fd=entry)
            except BaseException:
                with suppress(OSError):
                    os.unlink(aside, dir_fd=entry)
                raise
            os.fsync(entry)
        os.fsync(directory.entries_fd)


def clean(directory: CacheDirectory, key: bytes) -> None:
    """Remove what no manifest names: other generations, staging that dead processes left, and an entry without a manifest."""
    try:
        with directory:
            manifest = directory.manifest(key)
            kept = {MANIFEST, manifest.directory} if isinstance(manifest, Manifest) else set()
            with directory.entry(key) as entry:
                for name in os.listdir(entry):
                    if name not in kept:
                        remove_tree(name, entry)
            os.rmdir(key.hex(), dir_fd=directory.entries_fd)  # fails unless it is empty
    except OSError:
        # Rubbish that stays costs space only. The next one who compiles this key tries again.
        return


def remove_entry(directory: CacheDirectory, key: bytes) -> None:
    """Remove a whole entry, whose locks the caller holds, then the locks. Readers find nothing from the first rename on."""
    with directory:
        with suppress(FileNotFoundError):  # removed by another process, or by hand
            _displace(directory, key)
        entry_lock = directory.entry_lock(key)
        for lock in (entry_lock, entry_lock + TURN, directory.compile_lock(key)):
            with suppress(OSError):
                os.unlink(lock)


def _displace(directory: CacheDirectory, key: bytes) -> None:
    """Move what has the name of an entry to the trash, then delete it."""
    entries = directory.entries_fd
    status = os.stat(key.hex(), dir_fd=entries, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
        os.chmod(key.hex(), 0o700, dir_fd=entries)  # a directory that its owner may not write to cannot be moved
    name = f"{key.hex()}.{os.urandom(4).hex()}"
    os.rename(key.hex(), name, src_dir_fd=entries, dst_dir_fd=directory.trash_fd)
    remove_tree(name, directory.trash_fd)


def empty_trash(directory: CacheDirectory) -> None:
    """Delete what `discard` began to delete, and nothing else: an app may have its own files in a `trash` of the same directory."""
    with suppress(OSError), directory:
        trash = directory.trash_fd
        for name in os.listdir(trash):
            if is_hex(name[:64], 64) and name[64:65] == "." and is_hex(name[65:], 8):
                remove_tree(name, trash)
