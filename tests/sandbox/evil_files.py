"""Attacks on the user's files, and on files of the kernel."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
from pathlib import Path

from tests.sandbox.evil_calls import GIVEN, NUMBERS, Target, attack, call, optional, privileged, raw

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000


def _is_secret(fd: int, target: Target) -> None:
    """Read the secret, or raise."""
    try:
        found = os.pread(fd, 64, 0)
    finally:
        os.close(fd)
    assert found.startswith(target.word.encode()), found


def _place(target: Target, name: str) -> str:
    return os.path.join(target.folder, name)


def _own(target: Target, name: str) -> str:
    """Return the path of the file that the test has made in the folder."""
    return _place(target, "file")


@attack
def open_the_secret(target: Target) -> None:
    _is_secret(os.open(target.secret, os.O_RDONLY), target)


@attack
def open_by_number(target: Target) -> None:
    number = "open" if NUMBERS["open"] >= 0 else "openat"
    arguments = (target.secret.encode(), 0) if number == "open" else (_AT_FDCWD, target.secret.encode(), 0)
    _is_secret(call(number, *arguments), target)


@attack
def openat2_of_the_secret(target: Target) -> None:
    how = (ctypes.c_uint64 * 3)()
    _is_secret(call("openat2", _AT_FDCWD, target.secret.encode(), how, ctypes.sizeof(how)), target)


@attack
def open_for_writing(target: Target) -> None:
    os.close(os.open(target.secret, os.O_WRONLY))


@attack
def open_below_a_directory_that_may_be_read(target: Target) -> None:
    folder = os.open("/usr/lib", os.O_RDONLY | os.O_DIRECTORY)
    try:
        _is_secret(os.open("../../" + target.secret.lstrip("/"), os.O_RDONLY, dir_fd=folder), target)
    finally:
        os.close(folder)


@attack
def open_below_a_directory_opened_as_a_path(target: Target) -> None:
    folder = os.open(os.path.dirname(target.secret), os.O_PATH)  # allowed, but it gives no right
    try:
        _is_secret(os.open(os.path.basename(target.secret), os.O_RDONLY, dir_fd=folder), target)
    finally:
        os.close(folder)


@attack
def list_a_directory_opened_as_a_path(target: Target) -> None:
    folder = os.open(target.folder, os.O_PATH)
    try:
        os.listdir(f"/proc/self/fd/{folder}")
    finally:
        os.close(folder)


@attack
def reopen_a_path_by_its_descriptor(target: Target) -> None:
    path = os.open(target.secret, os.O_PATH)
    try:
        _is_secret(os.open(f"/proc/self/fd/{path}", os.O_RDONLY), target)
    finally:
        os.close(path)


@attack
def reopen_a_library_for_writing(target: Target) -> None:
    fd = os.open(__file__, os.O_RDONLY)
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
    finally:
        os.close(fd)


@attack
def reopen_the_weights_for_writing(target: Target) -> None:
    assert GIVEN, "the app gave no file"
    for fd in GIVEN:
        os.pread(fd, 1, 0)
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))


@attack
def reopen_the_weights_for_reading(target: Target) -> None:
    """It would give another file offset, other locks, and leases."""
    for fd in GIVEN:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))


@attack
def open_by_the_root_link(target: Target) -> None:
    _is_secret(os.open(f"/proc/self/root{target.secret}", os.O_RDONLY), target)


@attack
def open_from_another_working_directory(target: Target) -> None:
    os.chdir(os.path.dirname(target.secret))
    try:
        _is_secret(os.open(os.path.basename(target.secret), os.O_RDONLY), target)
    finally:
        os.chdir("/")


@privileged
def open_by_a_file_handle(target: Target) -> None:
    handle, mount = ctypes.create_string_buffer(136), ctypes.c_int()
    ctypes.c_uint.from_buffer(handle).value = 128
    first, second = (NUMBERS["name_to_handle_at"], NUMBERS["open_by_handle_at"]) if NUMBERS["name_to_handle_at"] >= 0 else (264, 265)
    raw(first, _AT_FDCWD, target.secret.encode(), handle, ctypes.byref(mount), 0)
    folder = os.open(target.folder, os.O_RDONLY)
    try:
        _is_secret(raw(second, folder, handle, os.O_RDONLY), target)
    finally:
        os.close(folder)


@attack
def list_the_home_folder(target: Target) -> None:
    os.listdir(os.path.dirname(target.secret))


@attack
def list_the_temporary_folder(target: Target) -> None:
    os.listdir("/tmp")


@attack
def read_the_users(target: Target) -> None:
    Path("/etc/passwd").read_bytes()


@attack
def create(target: Target) -> None:
    with open(_place(target, "created"), "w"):
        pass


@attack
def create_in_shared_memory(target: Target) -> None:
    path = f"/dev/shm/evil-{os.getpid()}"
    os.close(os.open(path, os.O_CREAT | os.O_RDWR))
    os.unlink(path)


@attack
def create_without_a_name(target: Target) -> None:
    os.close(os.open(target.folder, os.O_TMPFILE | os.O_RDWR))


@attack
def make_a_folder(target: Target) -> None:
    os.mkdir(_place(target, "folder"))


@attack
def make_a_pipe(target: Target) -> None:
    os.mkfifo(_place(target, "pipe"))


@attack
def remove(target: Target) -> None:
    os.unlink(_place(target, "removed"))


@attack
def remove_a_folder(target: Target) -> None:
    os.rmdir(_place(target, "empty"))


@attack
def rename(target: Target) -> None:
    os.rename(_place(target, "renamed"), _place(target, "renamed2"))


@attack
def link(target: Target) -> None:
    os.link(_own(target, ""), _place(target, "linked"))


@attack
def link_an_open_path(target: Target) -> None:
    path = os.open(_own(target, ""), os.O_PATH)
    try:
        call("linkat", path, b"", _AT_FDCWD, _place(target, "linked2").encode(), _AT_EMPTY_PATH, reaches=(errno.ENOENT,))
    finally:
        os.close(path)


@attack
def symlink(target: Target) -> None:
    os.symlink("/etc/passwd", _place(target, "symlink"))


@attack
def truncate(target: Target) -> None:
    os.truncate(_own(target, ""), 1)


@attack
def truncate_by_opening(target: Target) -> None:
    os.close(os.open(_own(target, ""), os.O_RDONLY | os.O_TRUNC))


@attack
def chmod(target: Target) -> None:
    os.chmod(_own(target, ""), 0o666)


@attack
def chmod_of_an_open_file(target: Target) -> None:
    with open(__file__, "rb") as file:
        os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o777)


@attack
def chmod_at_a_path(target: Target) -> None:
    call("fchmodat", _AT_FDCWD, _own(target, "").encode(), 0o600)


@optional
def chmod_by_the_newest_call(target: Target) -> None:
    call("fchmodat2", _AT_FDCWD, _own(target, "").encode(), 0o600, 0)


@attack
def chown(target: Target) -> None:
    os.chown(_own(target, ""), os.getuid(), os.getgid())


@attack
def lchown(target: Target) -> None:
    os.lchown(_own(target, ""), os.getuid(), os.getgid())


@attack
def chown_of_an_open_file(target: Target) -> None:
    with open(__file__, "rb") as file:
        os.fchown(file.fileno(), -1, -1)


@attack
def set_an_attribute(target: Target) -> None:
    os.setxattr(_own(target, ""), "user.evil", b"1")


@optional
def set_an_attribute_by_the_newest_call(target: Target) -> None:
    value = ctypes.create_string_buffer(b"1")
    given = (ctypes.c_uint64 * 2)(ctypes.addressof(value), 1)
    call("setxattrat", _AT_FDCWD, _own(target, "").encode(), 0, b"user.evil2", given, 16)


@attack
def read_an_attribute(target: Target) -> None:
    assert os.getxattr(_own(target, ""), "user.secret") == target.word.encode()


@attack
def read_an_attribute_of_an_open_path(target: Target) -> None:
    path = os.open(_own(target, ""), os.O_PATH)
    try:
        assert os.getxattr(f"/proc/self/fd/{path}", "user.secret") == target.word.encode()
    finally:
        os.close(path)


@attack
def read_an_attribute_without_links(target: Target) -> None:
    assert os.getxattr(_own(target, ""), "user.secret", follow_symlinks=False) == target.word.encode()


@attack
def list_attributes(target: Target) -> None:
    assert "user.secret" in os.listxattr(_own(target, ""))


@attack
def remove_an_attribute(target: Target) -> None:
    os.removexattr(_own(target, ""), "user.removed")


@attack
def change_times(target: Target) -> None:
    os.utime(_own(target, ""), (1, 1))


@attack
def change_times_of_an_open_path(target: Target) -> None:
    path = os.open(_own(target, ""), os.O_PATH)
    try:
        os.utime(f"/proc/self/fd/{path}", (1, 1))
    finally:
        os.close(path)


@attack
def watch_a_folder(target: Target) -> None:
    fd = call("inotify_init1", 0)
    try:
        call("inotify_add_watch", fd, target.folder.encode(), 0xFFF)
    finally:
        os.close(fd)


@attack
def watch_a_folder_the_old_way(target: Target) -> None:
    fd = os.open("/usr/lib", os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_NOTIFY, fcntl.DN_CREATE)
    finally:
        os.close(fd)


@privileged
def watch_everything(target: Target) -> None:
    os.close(call("fanotify_init", 0, 0))


@attack
def copy_out(target: Target) -> None:
    shutil.copyfile(target.secret, _place(target, "copied"))


# Files of the kernel


def _writable(path: str) -> None:
    """Open a file of the kernel for writing, and write nothing."""
    os.close(os.open(path, os.O_WRONLY))


@attack
def write_its_own_memory_by_a_file(target: Target) -> None:
    """Memory that may not be written can be written this way, such as code."""
    _writable("/proc/self/mem")


@attack
def write_its_own_memory_by_the_files_of_a_thread(target: Target) -> None:
    _writable("/proc/thread-self/mem")


@attack
def choose_what_the_kernel_kills_first(target: Target) -> None:
    _writable("/proc/self/oom_score_adj")


@attack
def change_what_core_files_hold(target: Target) -> None:
    _writable("/proc/self/coredump_filter")


@privileged
def change_the_core_pattern(target: Target) -> None:
    _writable("/proc/sys/kernel/core_pattern")


@privileged
def read_the_log_of_the_kernel(target: Target) -> None:
    os.close(os.open("/dev/kmsg", os.O_RDONLY))


@attack
def open_a_terminal(target: Target) -> None:
    os.close(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))


@attack
def map_zeros_for_writing(target: Target) -> None:
    with open("/dev/zero", "r+b", buffering=0) as file:
        mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE).close()
