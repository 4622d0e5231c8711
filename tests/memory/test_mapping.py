"""The native mapping: what it maps, what it refuses, and that it holds no descriptor."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from aionn._mapping import Mapping
from tests.leaks import leak_check

PAGE = mmap.PAGESIZE


@pytest.fixture
def fd() -> Iterator[int]:
    with leak_check():
        made = os.memfd_create("aionn-test", os.MFD_CLOEXEC)
        try:
            os.ftruncate(made, 3 * PAGE)
            yield made
        finally:
            os.close(made)


def mapped() -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("aionn-test" in line for line in maps)


def test_a_mapping_holds_no_descriptor_and_sees_what_others_write(fd: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    mapping = Mapping(fd, 3 * PAGE, True)
    assert len(os.listdir("/proc/self/fd")) == before
    memoryview(mapping)[:2] = b"ab"
    os.pwrite(fd, b"c", 2)
    assert bytes(memoryview(mapping)[:3]) == b"abc"
    assert os.pread(fd, 3, 0) == b"abc"


def test_a_mapping_begins_at_its_offset_and_has_its_length(fd: int) -> None:
    os.pwrite(fd, b"here", PAGE)
    view = memoryview(Mapping(fd, 10, False, False, PAGE))
    assert (len(view), bytes(view[:4]), view.readonly) == (10, b"here", True)
    with pytest.raises(TypeError):
        view[0] = 1


def test_a_private_mapping_writes_nothing_back(fd: int) -> None:
    view = memoryview(Mapping(fd, PAGE, True, True))
    view[:1] = b"x"
    assert os.pread(fd, 1, 0) == b"\0"


def test_a_mapping_ends_with_its_last_view(fd: int) -> None:
    array = np.frombuffer(memoryview(Mapping(fd, PAGE, True))[4:8], np.uint8)
    assert mapped() == 1
    array[:] = 7
    assert os.pread(fd, 4, 4) == bytes([7] * 4)
    del array
    assert mapped() == 0


def test_a_mapping_with_a_view_is_not_closed(fd: int) -> None:
    mapping = Mapping(fd, PAGE, True)
    with memoryview(mapping), pytest.raises(BufferError, match="release its views"):
        mapping.close()
    for _ in range(2):
        mapping.close()
        assert mapped() == 0
    with pytest.raises(ValueError, match="unmapped"):
        memoryview(mapping)


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (-1, 0), (PAGE, 1), (PAGE, -PAGE), (2**62, 0)])
def test_what_the_system_refuses_is_an_error(fd: int, size: int, offset: int) -> None:
    with pytest.raises(OSError, match=r"Invalid argument|Cannot allocate|Value too large"):
        Mapping(fd, size, True, False, offset)
    assert mapped() == 0


def test_a_descriptor_that_cannot_be_mapped_is_an_error(fd: int) -> None:
    read, write = os.pipe()
    try:
        for wrong in (read, -1):
            with pytest.raises(OSError, match=r"No such device|Bad file descriptor|Permission denied"):
                Mapping(wrong, PAGE, True)
    finally:
        os.close(read)
        os.close(write)


def test_numbers_that_no_system_call_can_take_are_refused(fd: int) -> None:
    for numbers in ((2**40, PAGE, True), (fd, 2**80, True), (fd, PAGE, True, False, 2**80)):
        with pytest.raises(OverflowError):
            Mapping(*numbers)
