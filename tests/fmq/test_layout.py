"""layout.py and ring.h tell the same offsets, and no two sides store to one cache line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aionn.errors import CallerError
from aionn.fmq import MessageQueue, layout, message_queue
from aionn.fmq._ring import CONTROL_BYTES
from aionn.fmq.event_flag import _RESERVED

FMQ = Path(layout.__file__).parent
RING = (FMQ / "ring.h").read_text()


def test_every_offset_that_c_asserts_is_the_one_python_uses() -> None:
    asserted = re.findall(r'_Static_assert\([^=]+== (\d+), "layout\.py: (\w+)"\)', RING)
    assert len(asserted) == 9
    assert {name: int(number) for number, name in asserted} == {name: getattr(layout, name) for _, name in asserted}
    assert CONTROL_BYTES == layout.CONTROL_BYTES


def test_every_field_of_the_control_words_is_asserted() -> None:
    (struct,) = re.findall(r"struct ring_control \{(.*?)\};", RING, re.DOTALL)
    fields = re.findall(r"_Atomic uint\d+_t (\w+);", struct)
    assert len(fields) == re.sub(r"/\*.*?\*/", "", struct, flags=re.DOTALL).count(";")
    assert fields == re.findall(r"offsetof\(struct ring_control, (\w+)\)", RING)


def test_the_flag_bits_are_the_same_in_both() -> None:
    defined = {name: int(number, 16) for name, number in re.findall(r"#define (RING_\w+) (0x[0-9a-fA-F]+)u", RING)}
    assert (defined["RING_NOT_FULL"], defined["RING_NOT_EMPTY"]) == (layout.NOT_FULL, layout.NOT_EMPTY) == (1, 2)
    assert defined["RING_FLIP_CLOSED"] | defined["RING_FLIP_LOCAL"] == _RESERVED


def test_the_refusals_are_the_same_in_both() -> None:
    (listed,) = re.findall(r"enum refusal \{ (.*?) \};", (FMQ / "ring_object.h").read_text())
    names = [name.removesuffix(" = 1") for name in listed.split(", ")]
    assert [getattr(message_queue, f"_{name}") for name in names] == list(range(1, len(names) + 1))


def test_what_the_two_sides_store_lies_on_lines_of_its_own() -> None:
    control = layout.CONTROL_OFFSET
    reader_stores = {layout.READ_OFFSET, control + layout.READER_ARMED_OFFSET, control + layout.READER_CPU_OFFSET}
    assert layout.CLAIMED_OFFSET // layout.LINE_BYTES == layout.READER_CPU_OFFSET // layout.LINE_BYTES  # the reader stores both
    writer_stores = {layout.WRITE_OFFSET, control + layout.WRITER_ARMED_OFFSET, control + layout.WRITER_CPU_OFFSET}
    lines = [offset // layout.LINE_BYTES for offset in [*reader_stores, *writer_stores, layout.FLAG_OFFSET, layout.DATA_OFFSET]]
    assert len(lines) == len(set(lines))
    assert layout.DATA_OFFSET % layout.LINE_BYTES == 0
    assert layout.CLOSED_OFFSET // layout.LINE_BYTES == layout.FUTEX_BITS_OFFSET // layout.LINE_BYTES  # both read at each commit


def test_a_queue_lies_where_the_layout_says() -> None:
    queue = MessageQueue.create(24, 1024)
    parts = [(part.offset, part.extent) for part in queue.descriptor().grantors]
    assert parts == [(0, 8), (64, 8), (512, 24 * 1024), (128, 4), (192, 320)]
    assert layout.memory_bytes_of(queue.descriptor()) == (512 + 24 * 1024,)
    queue.close()


@pytest.mark.parametrize("element", [0, -1, "O", "U0", object, int, [("a", "O")], len, "no such type"], ids=repr)
def test_what_is_no_plain_data_is_no_element(element: object) -> None:
    if element is int:  # NumPy's int64
        assert layout.quantum_of(int) == 8
        return
    with pytest.raises(CallerError, match="element"):
        layout.quantum_of(element)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [0, -1, 2**31, 2**64])
def test_no_queue_has_that_many_elements(capacity: int) -> None:
    with pytest.raises(CallerError, match="at least 1 element"):
        MessageQueue.create(1, capacity)
