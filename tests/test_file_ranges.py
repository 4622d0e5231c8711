"""Ranges of files: copied, digested, and refused where the file ends too early."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from aionn import file_ranges
from aionn.file_ranges import FileRange, ShortFileError, StoppedError, copy_ranges, digest_ranges, until

CHUNK_BYTES = 4 << 20


@pytest.fixture
def content(tmp_path: Path) -> tuple[int, bytes]:
    """Return an open file of 11 chunks and a bit, and what it holds."""
    whole = np.random.default_rng(0).bytes(11 * CHUNK_BYTES + 12_345)
    (tmp_path / "file").write_bytes(whole)
    return os.open(tmp_path / "file", os.O_RDONLY), whole


RANGES = {
    "nothing": [(0, 0)],
    "one byte": [(7, 1)],
    "few bytes, in the calling thread": [(1, 100), (3, CHUNK_BYTES)],
    "the whole file": [(0, 11 * CHUNK_BYTES + 12_345)],
    "exactly so many chunks as are read ahead": [(5, 4 * CHUNK_BYTES)],
    "one byte more than them": [(5, 4 * CHUNK_BYTES + 1)],
    "small, large, empty and overlapping": [(11, 3), (0, 9 * CHUNK_BYTES), (0, 0), (3 * CHUNK_BYTES, 2 * CHUNK_BYTES + 7), (99, 1)],
}


@pytest.mark.parametrize("places", RANGES.values(), ids=RANGES)
def test_ranges_are_copied_and_digested_as_they_are(content: tuple[int, bytes], places: list[tuple[int, int]]) -> None:
    fd, whole = content
    ranges = [FileRange(fd, offset, length) for offset, length in places]
    wanted = [whole[offset : offset + length] for offset, length in places]
    targets = [bytearray(length) for _, length in places]
    assert digest_ranges(ranges) == [blake3(part).digest() for part in wanted]
    assert copy_ranges(ranges, targets) == [blake3(part).digest() for part in wanted]
    assert targets == wanted
    os.close(fd)


@pytest.mark.parametrize("length", [20, 30 * CHUNK_BYTES], ids=["short", "long"])
def test_a_file_that_ends_too_early_is_an_error_that_says_where(content: tuple[int, bytes], length: int) -> None:
    fd, whole = content
    ranges = [FileRange(fd, len(whole) - 10, length)]
    with pytest.raises(ShortFileError, match=f"ends at byte {len(whole)}"):
        digest_ranges(ranges)
    with pytest.raises(ShortFileError):
        copy_ranges(ranges, [bytearray(length)])
    os.close(fd)


def test_a_target_of_another_length_is_refused(content: tuple[int, bytes]) -> None:
    with pytest.raises(ValueError, match="3 bytes for a range of 4"):
        copy_ranges([FileRange(content[0], 0, 4)], [bytearray(3)])
    os.close(content[0])


def test_a_reading_ends_between_two_chunks_when_its_caller_has_left(content: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    fd, whole = content
    read: list[int] = []
    act = file_ranges._read

    def counted(fd: int, chunk: Any) -> None:
        read.append(chunk.offset)
        act(fd, chunk)

    monkeypatch.setattr(file_ranges, "_read", counted)
    ranges = [FileRange(fd, 0, len(whole))]
    asked = iter([False, True])
    with pytest.raises(StoppedError):
        until(lambda: next(asked), lambda: digest_ranges(ranges))
    assert 1 <= len(read) < 12  # it has begun, and was not read to its end
    assert until(lambda: False, lambda: digest_ranges(ranges)) == [blake3(whole).digest()]
    os.close(fd)
