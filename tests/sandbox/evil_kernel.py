"""Attacks on the kernel itself: its less used parts, and memory that holds code."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from typing import Any

from tests.sandbox.evil_calls import ATTACKS, MADE_CODE, OPTIONAL, PRIVILEGED, Target, attack, call, raw

_PAGE = mmap.PAGESIZE
_X32 = 0x4000_0000
_TIOCSTI = 0x5412


def _plain(words: str, name: str, *arguments: Any, reaches: tuple[int, ...] = (), root: bool = False, lacks: bool = False) -> None:
    """Register an attack that is one call."""
    ATTACKS[words] = lambda _: call(name, *arguments, reaches=reaches)
    if root:
        PRIVILEGED.add(words)
    if lacks:
        OPTIONAL.add(words)


_plain("io_uring", "io_uring_setup", 4, bytes(120), lacks=True)
_plain("userfaultfd", "userfaultfd", 0o2000000, lacks=True, root=True)
_plain("make a map for bpf", "bpf", 0, struct.pack("@IIII", 2, 4, 4, 1) + bytes(104), 120, root=True, lacks=True)
_plain("bpf", "bpf", 0, bytes(120), 120, reaches=(errno.EINVAL,), lacks=True)
_plain("read a keyring", "keyctl", 0, -3, 0, reaches=(errno.ENOKEY,), lacks=True)
_plain("add a key", "add_key", b"user", b"evil", b"1", 1, -1, lacks=True)
_plain("ask for a key", "request_key", b"user", b"evil", None, -1, reaches=(errno.ENOKEY,), lacks=True)
_plain("leave the mount namespace", "unshare", 0x0002_0000, root=True)
_plain("leave the network namespace", "unshare", 0x4000_0000, root=True)
_plain("unshare nothing", "unshare", 0)
_plain("setns", "setns", -1, 0, reaches=(errno.EBADF,))
_plain("mount", "mount", b"none", b"/no-such-file-of-aionn", b"tmpfs", 0, None, reaches=(errno.ENOENT,))
_plain("unmount", "umount2", b"/no-such-file-of-aionn", 0, reaches=(errno.ENOENT,), root=True)
_plain("open a tree of mounts", "open_tree", -100, b"/usr", 0, root=True)
_plain("open a file system", "fsopen", b"tmpfs", 0, root=True)
_plain("pivot the root", "pivot_root", b"/no-such-file-of-aionn", b"/no-such-file-of-aionn", reaches=(errno.ENOENT,), root=True)
_plain("change the root", "chroot", b"/", root=True)
_plain("perf events", "perf_event_open", struct.pack("@IIQ", 1, 112, 0) + bytes(112), 0, -1, -1, 0, root=True, lacks=True)
_plain("message queues", "mq_open", b"evil", 0o102, 0o600, None, lacks=True)
_plain("reboot", "reboot", 0xFEE1_DEAD, 672274793, 1, None, reaches=(errno.EINVAL,), root=True)
_plain("load another kernel", "kexec_load", 0, 0, None, 0x0FFF_0000, reaches=(errno.EINVAL,), root=True, lacks=True)
_plain("load a module", "init_module", None, 0, None, reaches=(errno.EFAULT, errno.EINVAL, errno.ENOEXEC), root=True, lacks=True)
_plain("unload a module", "delete_module", b"nonexistent-evil", 0o4000, reaches=(errno.ENOENT,), root=True, lacks=True)
_plain("swap", "swapon", b"/no-such-file-of-aionn", 0, reaches=(errno.ENOENT,), root=True, lacks=True)
_plain("account", "acct", b"/no-such-file-of-aionn", reaches=(errno.ENOENT,), root=True, lacks=True)
_plain("set the clock", "clock_settime", 1, bytes(16), reaches=(errno.EINVAL,))
_plain("set the time of day", "settimeofday", None, None)
_plain("adjust the clock", "adjtimex", bytes(208))
_plain("name the host", "sethostname", b"x", -1, reaches=(errno.EINVAL,), root=True)
_plain("size of the kernel's log", "syslog", 10, None, 0, root=True)
_plain("quotas", "quotactl", 0xFFFF_FFFF, None, 0, None, reaches=(errno.EINVAL, errno.ENODEV, errno.ENOTBLK, errno.ENOENT), lacks=True)
_plain("another personality", "personality", 0xFFFF_FFFF)
_plain("capabilities", "capget", struct.pack("@Ii", 0x2008_0522, 0), bytes(24))
_plain("another filter", "seccomp", 2, 0, struct.pack("@I", 0x7FFF_0000))
_plain("another ruleset", "landlock_create_ruleset", None, 0, 1, lacks=True)
_plain("secret memory", "memfd_secret", 0, lacks=True)
_plain("legacy asynchronous input", "io_setup", 1, bytes(8), lacks=True)
_plain("statistics of the cache", "cachestat", 0, bytes(16), bytes(40), 0, reaches=(errno.EOPNOTSUPP, errno.EBADF), lacks=True)
_plain("poison memory", "madvise", 0, _PAGE, 100, reaches=(errno.EFAULT, errno.ENOMEM, errno.EINVAL), root=True)
_plain("list mounts", "listmount", struct.pack("@IIQQ", 24, 0, 2**64 - 1, 0), bytes(80), 10, 0, lacks=True)
_plain("a file's attributes by the newest call", "file_getattr", -100, b"/usr", bytes(24), 24, 0, lacks=True)
_plain("open a tree by the newest call", "open_tree_attr", -100, b"/usr", 0, None, 0, root=True, lacks=True)
_plain("a number that no kernel has", "cachestat", lacks=True)
ATTACKS["a number that no kernel has"] = lambda _: raw(4095)
for _name in ("iopl", "ioperm", "modify_ldt", "sysfs"):
    _plain(_name, _name, *((0, bytes(16), 16) if _name == "modify_ldt" else (3,) if _name == "sysfs" else (0, 1, 0)), lacks=True, root=True)


def _x32(name: str, number: int, *arguments: Any) -> None:
    words = f"{name} by its number of x32"
    ATTACKS[words] = lambda _: raw(_X32 | number, *arguments)
    OPTIONAL.add(words)


_x32("getpid", 39)
_x32("socket", 41, 2, 1, 0)
_x32("execve", 520, b"/no-such-file-of-aionn", None, None)


@attack
def segments_of_shared_memory(target: Target) -> None:
    call("shmctl", call("shmget", 0, _PAGE, 0o1600), 0, None)


@attack
def semaphores(target: Target) -> None:
    call("semctl", call("semget", 0, 1, 0o1600), 0, 0, None)


@attack
def queues_of_messages(target: Target) -> None:
    call("msgctl", call("msgget", 0, 0o1600), 0, None)


@attack
def type_into_a_terminal(target: Target) -> None:
    """The kernel refuses it only because the descriptor is not a terminal."""
    try:
        fcntl.ioctl(0, _TIOCSTI, b"x")
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise


@attack
def ioctl_with_high_bits(target: Target) -> None:
    """The kernel ignores the upper half of the number."""
    call("ioctl", 0, (1 << 32) | _TIOCSTI, b"x", reaches=(errno.ENOTTY,))


@attack
def pipes_of_pages(target: Target) -> None:
    one, other = os.pipe()
    page = ctypes.create_string_buffer(16)
    try:
        call("vmsplice", other, (ctypes.c_uint64 * 2)(ctypes.addressof(page), 16), 1, 0)
    finally:
        os.close(one)
        os.close(other)


@attack
def filter_the_packets_of_a_socket(target: Target) -> None:
    """Classic BPF on a socket is compiled by the kernel."""
    import socket

    one, other = socket.socketpair()
    with one, other:
        code = ctypes.create_string_buffer(struct.pack("@HBBI", 0x06, 0, 0, 0xFFFF))
        one.setsockopt(socket.SOL_SOCKET, 26, struct.pack("@HP", 1, ctypes.addressof(code)))


def _mapped(length: int, protection: int, flags: int, fd: int = -1) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    found = libc.mmap(None, ctypes.c_size_t(length), protection, flags, fd, ctypes.c_long(0))
    if found in (None, ctypes.c_void_p(-1).value):
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    return int(found)


def _made_code(function: Any) -> Any:
    MADE_CODE.add(function.__name__.replace("_", " "))
    return attack(function)


@_made_code
def memory_to_write_and_run(target: Target) -> None:
    address = _mapped(_PAGE, 7, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    call("munmap", address, _PAGE)


@_made_code
def written_memory_becomes_code(target: Target) -> None:
    address = _mapped(_PAGE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        ctypes.memset(address, 0xC3, 16)
        call("mprotect", address, _PAGE, 5)
    finally:
        call("munmap", address, _PAGE)


@_made_code
def memory_becomes_code_with_a_key(target: Target) -> None:
    address = _mapped(_PAGE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        call("pkey_mprotect", address, _PAGE, 5, -1)
    finally:
        call("munmap", address, _PAGE)


@attack
def memory_becomes_code_by_the_personality_of_readers(target: Target) -> None:
    """With READ_IMPLIES_EXEC each page that may be read may be run."""
    call("personality", 0x0040_0000)
    try:
        call("munmap", _mapped(_PAGE, 7, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), _PAGE)
    finally:
        call("personality", 0)
