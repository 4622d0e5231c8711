"""Regions and foreign descriptors: what is mapped, what is refused and with which words, and that nothing is left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from aionn.errors import AionnError, CallerError, MemoryAllocationError
from aionn.hal import ErrorStatus, MemoryDescription, MemoryKind
from aionn.memory.region import Access, MappingError, Region, reserve
from tests.leaks import leak_check

PAGE = mmap.PAGESIZE
F_ADD_SEALS, SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 1033, 1, 2, 4
KINDS_OF_OUR_OWN = [MemoryKind.ASHMEM, MemoryKind.HARDWARE_BUFFER_BLOB, MemoryKind.HARDWARE_BUFFER]


def sealed(size: int) -> int:
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_SEAL)
    return fd


def file_of(path: Path, size: int, flags: int = os.O_RDWR) -> int:
    path.write_bytes(bytes(range(256)) * (size // 256 + 1))
    os.truncate(path, size)
    return os.open(path, flags | os.O_CLOEXEC)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leak_check():
        yield


# --- what is mapped ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS_OF_OUR_OWN, ids=lambda k: k.value)
def test_memory_of_our_own_is_seen_by_both_sides(kind: MemoryKind) -> None:
    ours = Region.allocate(3 * PAGE + 5, kind=kind)
    assert ours.description == MemoryDescription(kind, 3 * PAGE + 5)
    theirs = Region.attach(os.dup(ours.fileno()), ours.description)
    ours.view()[-1] = 77
    assert theirs.view()[-1] == 77
    assert len(theirs.view()) == 3 * PAGE + 5
    ours.close()
    theirs.view()[-1] = 78
    theirs.close()


def test_mmap_fd_is_mapped_at_its_offset_and_written_through(tmp_path: Path) -> None:
    fd = file_of(tmp_path / "pool", 4 * PAGE)
    description = MemoryDescription(MemoryKind.MMAP_FD, PAGE + 8, offset_bytes=2 * PAGE)
    region = Region.attach(os.dup(fd), description)
    assert bytes(region.view()) == (tmp_path / "pool").read_bytes()[2 * PAGE : 3 * PAGE + 8]
    region.view()[:4] = b"abcd"
    assert region.flush()
    assert (tmp_path / "pool").read_bytes()[2 * PAGE : 2 * PAGE + 4] == b"abcd"
    region.close()
    os.close(fd)


def test_only_a_file_mapped_for_writing_is_flushed(tmp_path: Path) -> None:
    fd = file_of(tmp_path / "pool", PAGE)
    description = MemoryDescription(MemoryKind.MMAP_FD, PAGE)
    for access, flushed in ((Access.WRITE, True), (Access.READ, False), (Access.PRIVATE, False)):
        region = Region.attach(os.dup(fd), description, access)
        assert region.flush() is flushed
        region.close()
    os.close(fd)
    ours = Region.allocate(PAGE)
    assert ours.flush() is False
    ours.close()


def test_a_private_mapping_keeps_its_writes_to_itself(tmp_path: Path) -> None:
    fd = file_of(tmp_path / "pool", PAGE, os.O_RDONLY)
    region = Region.attach(fd, MemoryDescription(MemoryKind.MMAP_FD, PAGE, writable=False), Access.PRIVATE)
    region.view()[0] = 99
    assert (tmp_path / "pool").read_bytes()[0] == 0
    region.close()


def test_memory_of_our_own_can_neither_shrink_nor_grow_nor_be_unsealed() -> None:
    region = Region.allocate(PAGE)
    for size in (0, 1, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fileno(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fileno(), F_ADD_SEALS, SEAL_SEAL)
    region.close()


def test_a_frozen_region_gives_no_new_writable_mapping() -> None:
    region = Region.allocate(PAGE, freezable=True)
    region.view()[0] = 5
    region.freeze()
    with pytest.raises(CallerError, match="sent read-only"):
        Region.attach(os.dup(region.fileno()), region.description)
    with pytest.raises(MappingError) as caught:
        Region.attach(os.dup(region.fileno()), MemoryDescription(MemoryKind.ASHMEM, PAGE))
    assert caught.value.status is ErrorStatus.GENERAL_FAILURE
    reader = Region.attach(os.dup(region.fileno()), region.description, Access.READ)
    assert reader.view()[0] == region.view()[0] == 5
    reader.close()
    region.close()


def test_nothing_writes_to_a_frozen_region_but_a_view_from_before() -> None:
    region, viewed = Region.allocate(PAGE, freezable=True), Region.allocate(PAGE, freezable=True)
    region.freeze()
    assert region.view().readonly
    with pytest.raises(PermissionError):
        os.pwrite(region.fileno(), b"x", 0)
    view = viewed.view()
    viewed.freeze()
    view[0] = 7
    reader = Region.attach(os.dup(viewed.fileno()), viewed.description, Access.READ)
    assert reader.view()[0] == 7
    with pytest.raises(PermissionError):
        os.pwrite(viewed.fileno(), b"x", 0)
    for each in (reader, region, viewed):
        each.close()


def test_views_outlive_the_region() -> None:
    region = Region.allocate(PAGE)
    array = np.frombuffer(region.view(), np.uint8)
    region.close()
    region.close()
    assert array.sum() == 0
    for call in (region.view, region.fileno):
        with pytest.raises(CallerError, match="closed"):
            call()
    del array, region


def test_who_asked_is_told_once_when_a_region_closes() -> None:
    told: list[str] = []
    region = Region.allocate(PAGE)
    region.when_closed(lambda: told.append("kept"))
    region.when_closed(lambda: told.append("taken back"))()
    region.close()
    region.close()
    region.when_closed(lambda: told.append("late"))
    assert told == ["kept", "late"]


def test_reserved_memory_is_zero_writable_and_gone_with_its_view() -> None:
    memory = reserve(10_000)
    assert memory.nbytes == 10_000
    assert not any(memory)
    memory[9_999] = 1
    del memory


# --- what is refused -----------------------------------------------------------------------------------------------------


def pipe_end() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def socket_end() -> int:
    one, other = socket.socketpair()
    other.close()
    return one.detach()


def unsealed() -> int:
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, 4 * PAGE)
    return fd


def unsealable() -> int:
    fd = os.memfd_create("peer", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, 4 * PAGE)
    return fd


def grow_only() -> int:
    fd = unsealed()
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_GROW)
    return fd


def truncated() -> int:
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, PAGE)
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW)
    return fd


def closed() -> int:
    fd = os.memfd_create("peer")
    os.close(fd)
    return fd


HOSTILE: list[tuple[str, Callable[[], int], str]] = [
    ("pipe", pipe_end, "is a pipe"),
    ("socket", socket_end, "is a socket"),
    ("directory", lambda: os.open("/", os.O_RDONLY | os.O_DIRECTORY), "is a directory"),
    ("device", lambda: os.open("/dev/zero", os.O_RDWR), "is a character device"),
    ("eventfd", lambda: os.eventfd(0), "neither a file nor a memfd"),
    ("O_PATH", lambda: os.open(__file__, os.O_PATH), "opened with O_PATH"),
    ("closed", closed, "not open"),
    ("minus one", lambda: -1, "not open"),
    ("a number no descriptor has", lambda: 2**40, "not open"),
    ("truncated memfd", truncated, "shorter than claimed"),
    ("unsealed memfd", unsealed, "not sealed"),
    ("unsealable memfd", unsealable, "not sealed"),
    ("memfd sealed against growing only", grow_only, "not sealed"),
]


@pytest.mark.parametrize("kind", list(MemoryKind), ids=lambda k: k.value)
@pytest.mark.parametrize(("make", "words"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_descriptor_is_refused_in_one_sentence(kind: MemoryKind, make: Callable[[], int], words: str) -> None:
    for access in Access:
        with pytest.raises(CallerError, match=words) as caught:
            Region.attach(make(), MemoryDescription(kind, 4 * PAGE), access)
        assert kind.value in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_write_only_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="opened for writing only"):
        Region.attach(file_of(tmp_path / "pool", PAGE, os.O_WRONLY), MemoryDescription(MemoryKind.MMAP_FD, PAGE), Access.READ)


def test_a_read_only_descriptor_is_not_mapped_for_writing(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="opened for reading only"):
        Region.attach(file_of(tmp_path / "pool", PAGE, os.O_RDONLY), MemoryDescription(MemoryKind.MMAP_FD, PAGE))


@pytest.mark.parametrize(
    ("size", "offset"),
    [
        *((PAGE, offset) for offset in (2**64 - PAGE, 2**64, 2**63, 2**63 - PAGE, -PAGE, 1, 20, PAGE - 1, PAGE + 200)),
        *((size, 0) for size in (0, -1, 2**63, 2**64 - 1, 2**64)),
        (2**63 - 1, PAGE),
    ],
)
def test_sizes_and_offsets_that_can_never_be_right_are_refused(tmp_path: Path, size: int, offset: int) -> None:
    with pytest.raises(CallerError, match="multiple"):
        Region.attach(file_of(tmp_path / "pool", 4 * PAGE), MemoryDescription(MemoryKind.MMAP_FD, size, offset_bytes=offset))


@pytest.mark.parametrize(("size", "offset"), [(4 * PAGE + 1, 0), (1, 4 * PAGE), (PAGE + 1, 3 * PAGE), (2**62, PAGE), (PAGE, 2**62)])
def test_a_file_shorter_than_claimed_is_refused(tmp_path: Path, size: int, offset: int) -> None:
    with pytest.raises(CallerError, match="shorter than claimed"):
        Region.attach(file_of(tmp_path / "pool", 4 * PAGE), MemoryDescription(MemoryKind.MMAP_FD, size, offset_bytes=offset))


@pytest.mark.parametrize("kind", KINDS_OF_OUR_OWN, ids=lambda k: k.value)
def test_only_mmap_fd_has_an_offset(kind: MemoryKind) -> None:
    with pytest.raises(CallerError, match="only mmap_fd"):
        Region.attach(sealed(2 * PAGE), MemoryDescription(kind, PAGE, offset_bytes=PAGE))


def test_memory_is_mapped_without_a_further_descriptor() -> None:
    fd = sealed(PAGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, hard))
    fillers: list[int] = []
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.dup(fd))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(fd)
        region = Region.attach(fd, MemoryDescription(MemoryKind.ASHMEM, PAGE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
    assert bytes(region.view()) == bytes(PAGE)
    region.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_sealed_memory_stays_mapped_without_any_descriptor() -> None:
    before = descriptors()
    region = Region.allocate(PAGE)
    inode = region.inode()
    status = os.fstat(region.fileno())
    assert inode == (status.st_dev, status.st_ino)
    view = region.view()
    closed: list[str] = []
    region.when_closed(lambda: closed.append("first"))
    for _ in range(2):
        region.forget_descriptor()
        assert descriptors() == before
    view[:5] = b"bytes"
    assert bytes(region.view()[:5]) == b"bytes"
    assert region.inode() == inode
    region.when_closed(lambda: closed.append("second"))
    region.check_backing()
    assert not region.flush()
    with pytest.raises(CallerError, match="no descriptor any more"):
        region.fileno()
    with pytest.raises(CallerError, match="no descriptor any more"):
        region.freeze()
    assert closed == []
    for _ in range(2):
        region.close()
        assert closed == ["first", "second"]
    assert bytes(view[:5]) == b"bytes"
    with pytest.raises(CallerError, match="closed"):
        region.view()
    with pytest.raises(CallerError, match="closed"):
        region.fileno()
    region.forget_descriptor()


def test_a_file_keeps_the_descriptor_that_its_checks_need(tmp_path: Path) -> None:
    region = Region.attach(file_of(tmp_path / "pool", PAGE), MemoryDescription(MemoryKind.MMAP_FD, PAGE))
    region.forget_descriptor()
    region.view()[:1] = b"x"
    assert region.flush()
    os.truncate(tmp_path / "pool", 10)
    with pytest.raises(MappingError, match="cut off"):
        region.check_backing()
    region.close()


def test_a_region_that_is_dropped_after_its_descriptor_unmaps_and_reports_its_end() -> None:
    closed: list[bool] = []
    with leak_check():
        region = Region.allocate(PAGE)
        region.forget_descriptor()
        region.when_closed(lambda: closed.append(True))
        assert any("memfd:aionn" in line for line in Path("/proc/self/maps").read_text().splitlines())
        del region
        assert closed == [True]


def test_a_mapped_file_that_is_cut_off_later_is_noticed_before_it_is_touched(tmp_path: Path) -> None:
    region = Region.attach(file_of(tmp_path / "pool", 2 * PAGE), MemoryDescription(MemoryKind.MMAP_FD, PAGE, offset_bytes=PAGE))
    region.check_backing()
    os.truncate(tmp_path / "pool", PAGE + 10)
    with pytest.raises(MappingError, match="cut off") as caught:
        region.check_backing()
    assert caught.value.status is ErrorStatus.GENERAL_FAILURE
    region.close()


def test_holes_of_shared_memory_are_filled_when_it_is_mapped() -> None:
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 64 * PAGE)
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    with pytest.raises(CallerError, match="never reserved"):
        Region.attach(read_only, MemoryDescription(MemoryKind.ASHMEM, 64 * PAGE), Access.READ)
    assert os.fstat(fd).st_blocks == 0
    region = Region.attach(os.dup(fd), MemoryDescription(MemoryKind.ASHMEM, 64 * PAGE), Access.READ)
    assert os.fstat(fd).st_blocks * 512 == 64 * PAGE
    region.close()
    os.close(fd)


def test_holes_that_memory_cannot_fill_are_an_error_and_not_the_end() -> None:
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2**46)
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK)
    with pytest.raises(MemoryAllocationError) as caught:
        Region.attach(fd, MemoryDescription(MemoryKind.ASHMEM, 2**46))
    assert caught.value.needed_bytes == 2**46
    assert caught.value.available_bytes is not None


def test_allocation_refuses_what_is_no_size() -> None:
    for size in (0, -1):
        with pytest.raises(CallerError):
            Region.allocate(size)
    with pytest.raises(CallerError, match="mmap_fd"):
        Region.allocate(PAGE, kind=MemoryKind.MMAP_FD)
    for size in (2**46, 2**63 - 1, 2**63, 2**64, 2**70):
        with pytest.raises(MemoryAllocationError):
            Region.allocate(size)


def test_a_thousand_cycles_of_allocate_use_and_free_leave_nothing() -> None:
    for cycle in range(1000):
        region = Region.allocate(PAGE * (cycle % 3 + 1))
        peer = Region.attach(os.dup(region.fileno()), region.description, Access.READ)
        region.view()[0] = 1
        assert peer.view()[0] == 1
        region.close()
        if cycle % 7 == 0:
            with pytest.raises(AionnError):
                Region.attach(pipe_end(), region.description)
        peer.close()
