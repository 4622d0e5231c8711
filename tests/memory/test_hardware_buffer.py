"""Images in shared memory: planes with their strides, tensors in place, and plain words where that cannot be."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aionn.errors import CallerError, MemoryAllocationError
from aionn.hal import MemoryKind, Operand, OperandType
from aionn.memory.hardware_buffer import HardwareBuffer, ImageFormat, PlaneLayout, TensorLayout
from aionn.memory.memory import Memory
from aionn.memory.region import Access, Region
from tests.leaks import leak_check

UINT8 = OperandType.UINT8
SHAPES: dict[ImageFormat, dict[str, tuple[int, ...]]] = {
    "gray8": {"gray": (4, 6, 1)},
    "rgb_888": {"rgb": (4, 6, 3)},
    "rgba_8888": {"rgba": (4, 6, 4)},
    "nv12": {"y": (4, 6, 1), "uv": (2, 3, 2)},
    "yuv420": {"y": (4, 6, 1), "u": (2, 3, 1), "v": (2, 3, 1)},
}
every_format = pytest.mark.parametrize("image_format", list(SHAPES))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with leak_check():
        yield


def shares(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], buffer: HardwareBuffer) -> bool:
    return np.shares_memory(array, np.frombuffer(buffer.view(), np.uint8))


@every_format
def test_planes_are_views_that_cover_the_image_exactly(image_format: ImageFormat) -> None:
    with HardwareBuffer.allocate(6, 4, image_format) as image:
        assert image.description.kind is MemoryKind.HARDWARE_BUFFER
        assert {name: plane.shape for name, plane in image.planes.items()} == SHAPES[image_format]
        for plane in image.planes.values():
            plane += 1
        assert set(image.view()) == {1}  # every byte belongs to exactly one pixel


@every_format
def test_a_driver_sees_the_same_pixels(image_format: ImageFormat) -> None:
    with HardwareBuffer.allocate(6, 4, image_format) as image:
        peer = Region.attach(os.dup(image.fileno()), image.description, Access.READ)
        next(iter(image.planes.values()))[0, 1, 0] = 9
        assert bytes(peer.view()) == bytes(image.view())
        peer.close()


@pytest.mark.parametrize(
    ("image_format", "dimensions", "shape"),
    [
        ("rgb_888", (1, 4, 6, 3), (1, 4, 6, 3)),
        ("rgb_888", (0, 0, 0, 3), (1, 4, 6, 3)),
        ("rgb_888", (4, 6, 3), (4, 6, 3)),
        ("rgb_888", (0, 0, 3), (4, 6, 3)),
        ("rgba_8888", (1, 4, 0, 4), (1, 4, 6, 4)),
        ("gray8", (1, 4, 6, 1), (1, 4, 6, 1)),
        ("gray8", (1, 1, 4, 6), (1, 1, 4, 6)),
        ("gray8", (4, 6), (4, 6)),
        ("gray8", (1, 4, 6), (1, 4, 6)),
        ("nv12", (6, 6), (6, 6)),
        ("nv12", (1, 6, 6, 1), (1, 6, 6, 1)),
        ("yuv420", (0, 6), (6, 6)),
    ],
)
def test_an_image_is_the_tensor_that_the_operand_wants(
    image_format: ImageFormat, dimensions: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    with HardwareBuffer.allocate(6, 4, image_format) as image:
        tensor = image.as_tensor(Operand(UINT8, dimensions))
        assert tensor.shape == shape
        assert tensor.flags.c_contiguous
        assert shares(tensor, image)
        place, told = image.locate(Operand(UINT8, dimensions))
        assert (place.pool, place.offset_bytes, place.size_bytes, told) == (image.memory.pool, 0, tensor.size, shape)
        place.close()


@pytest.mark.parametrize(("plane", "dimensions"), [("y", (1, 4, 6, 1)), ("uv", (1, 2, 3, 2))])
def test_a_plane_alone_is_a_tensor(plane: str, dimensions: tuple[int, ...]) -> None:
    with HardwareBuffer.allocate(6, 4, "nv12") as image:
        image.planes[plane][...] = 3
        tensor = image.as_tensor(Operand(UINT8, dimensions), plane=plane)
        assert (tensor == 3).all()
        assert shares(tensor, image)


@pytest.mark.parametrize(
    ("image_format", "operand", "words"),
    [
        ("rgb_888", Operand(OperandType.FLOAT32, (1, 4, 6, 3)), "Cast"),
        ("rgb_888", Operand(UINT8, (1, 3, 4, 6)), "wants NCHW"),
        ("rgb_888", Operand(UINT8, (1, 5, 6, 3)), "scale, crop or convert"),
        ("rgb_888", Operand(UINT8, (2, 4, 6, 3)), "scale, crop or convert"),
        ("rgb_888", Operand(UINT8, (4, 6)), "does not fit"),
        ("rgba_8888", Operand(UINT8, (1, 4, 6, 3)), "does not fit"),
        ("rgb_888", Operand(UINT8, (0, 0, 0, 0)), "say layout="),
        ("rgb_888", Operand(UINT8, None), "say layout="),
        ("gray8", Operand(UINT8, (0, 0, 0, 0)), "say layout="),
    ],
)
def test_nothing_is_guessed_and_nothing_converted(image_format: ImageFormat, operand: Operand, words: str) -> None:
    with HardwareBuffer.allocate(6, 4, image_format) as image, pytest.raises(CallerError, match=words) as caught:
        image.as_tensor(operand)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("layout", "shape"), [("NHWC", (1, 4, 6, 1)), ("NCHW", (1, 1, 4, 6))])
def test_the_app_says_the_layout_where_the_operand_does_not(layout: TensorLayout, shape: tuple[int, ...]) -> None:
    with HardwareBuffer.allocate(6, 4, "gray8") as image:
        assert image.as_tensor(Operand(UINT8, (0, 0, 0, 0)), layout=layout).shape == shape
        assert image.as_tensor(Operand(UINT8, None), layout=layout).shape == shape
        with pytest.raises(CallerError, match="does not fit"):
            image.as_tensor(Operand(UINT8, (1, 4, 6, 1)), layout="NCHW")


def test_an_image_as_tall_as_it_has_channels_is_not_taken_for_the_wrong_layout() -> None:
    with HardwareBuffer.allocate(3, 3, "rgb_888") as image:
        for dimensions in ((3, 0, 3), (1, 3, 0, 3), (1, 3, 3, 3)):
            with pytest.raises(CallerError, match="say layout="):
                image.as_tensor(Operand(UINT8, dimensions))
        assert image.as_tensor(Operand(UINT8, (3, 0, 3)), layout="NHWC").shape == (3, 3, 3)


# --- what an app already has ------------------------------------------------------------------------------------------------


def test_rows_with_padding_are_views_but_no_tensor(tmp_path: Path) -> None:
    (tmp_path / "frame").write_bytes(bytes(range(100)))
    with open(tmp_path / "frame", "r+b") as file:
        image = HardwareBuffer.from_fd(file, 4, 3, "rgb_888", [PlaneLayout(5, 16, 3)])
    assert image.description.kind is MemoryKind.MMAP_FD
    assert image.size_bytes == 5 + 2 * 16 + 4 * 3
    assert image.planes["rgb"].shape == (3, 4, 3)
    assert image.planes["rgb"][2, 1].tolist() == [40, 41, 42]
    with pytest.raises(CallerError, match=r"np.ascontiguousarray\(buffer.planes\['rgb'\]\)"):
        image.as_tensor(Operand(UINT8, (1, 3, 4, 3)))
    image.close()


def test_a_frame_in_the_midst_of_a_file_is_a_tensor_in_place(tmp_path: Path) -> None:
    (tmp_path / "frames").write_bytes(bytes(mmap.PAGESIZE) + bytes(range(60)))
    with open(tmp_path / "frames", "rb") as file:
        image = HardwareBuffer.from_fd(file, 4, 3, "rgb_888", [PlaneLayout(24, 12, 3)], size=60, prot=mmap.PROT_READ, offset=mmap.PAGESIZE)
    tensor = image.as_tensor(Operand(UINT8, (1, 3, 4, 3)))
    assert tensor.reshape(-1).tolist() == list(range(24, 60))
    assert not tensor.flags.writeable
    place, _ = image.locate(Operand(UINT8, (1, 3, 4, 3)))
    assert (place.offset_bytes, place.size_bytes) == (24, 36)
    place.close()
    image.close()


def test_android_yuv_with_interleaved_colour_has_both_planes() -> None:
    """YUV_420_888 as cameras give it: u and v with a pixel stride of 2, one byte apart."""
    with Memory.allocate(6 * 4 + 12) as memory:
        image = HardwareBuffer.from_memory(memory, 6, 4, "yuv420", [PlaneLayout(0, 6, 1), PlaneLayout(24, 6, 2), PlaneLayout(25, 6, 2)])
        image.planes["u"][...], image.planes["v"][...] = 1, 2
        assert bytes(memory.view()[24:]) == bytes([1, 2]) * 6
        with pytest.raises(CallerError, match="pixels 2 bytes apart"):
            image.as_tensor(Operand(UINT8, (6, 6)))
        image.close()
        memory.view()[0] = 1  # the app's own goes on


def test_planes_with_a_gap_between_them_are_tensors_one_by_one() -> None:
    with (
        Memory.allocate(64) as memory,
        HardwareBuffer.from_memory(memory, 6, 4, "nv12", [PlaneLayout(0, 6, 1), PlaneLayout(32, 6, 2)]) as image,
    ):
        with pytest.raises(CallerError, match="one by one"):
            image.as_tensor(Operand(UINT8, (6, 6)))
        assert image.as_tensor(Operand(UINT8, (1, 2, 3, 2)), plane="uv").shape == (1, 2, 3, 2)
        with pytest.raises(CallerError, match="has y, uv"):
            image.as_tensor(Operand(UINT8, (1, 2, 3, 2)), plane="u")


@pytest.mark.parametrize(
    ("width", "height", "image_format", "planes"),
    [
        (0, 4, "gray8", None),
        (4, 0, "gray8", None),
        (5, 4, "nv12", None),
        (4, 5, "yuv420", None),
        (4, 4, "bgr_888", None),
        (4, 4, "blob", None),
        (6, 4, "nv12", [PlaneLayout(0, 6, 1)]),
        (6, 4, "gray8", [PlaneLayout(-1, 6, 1)]),
        (6, 4, "gray8", [PlaneLayout(0, 5, 1)]),
        (6, 4, "gray8", [PlaneLayout(0, -6, 1)]),
        (6, 4, "gray8", [PlaneLayout(0, 6, 0)]),
        (6, 4, "rgb_888", [PlaneLayout(0, 18, 2)]),
        (6, 4, "gray8", [PlaneLayout(77, 6, 1)]),
        (6, 4, "gray8", [PlaneLayout(2**64 - 8, 6, 1)]),
        (6, 4, "gray8", [PlaneLayout(0, 2**62, 1)]),
    ],
)
def test_planes_that_cannot_be_are_refused(width: int, height: int, image_format: ImageFormat, planes: list[PlaneLayout] | None) -> None:
    with Memory.allocate(100) as memory, pytest.raises(CallerError):
        HardwareBuffer.from_memory(memory, width, height, image_format, planes)
    with os.fdopen(os.memfd_create("x"), "wb") as file, pytest.raises(CallerError):
        HardwareBuffer.from_fd(file, width, height, image_format, planes)


def test_an_image_too_large_for_the_machine_is_an_error_at_allocation() -> None:
    with pytest.raises(MemoryAllocationError):
        HardwareBuffer.allocate(2**23, 2**22, "rgba_8888")


def test_a_blob_takes_the_type_and_shape_of_its_operand() -> None:
    with HardwareBuffer.allocate(48) as blob:
        assert blob.planes["blob"].shape == (48,)
        tensor = blob.as_tensor(Operand(OperandType.FLOAT32, (3, 4)))
        tensor[:] = 1.5
        assert (blob.memory.array(np.float32, 12) == 1.5).all()
        assert blob.as_tensor(Operand(OperandType.FLOAT32, (0, 4))).shape == (3, 4)
        with pytest.raises(CallerError, match="same size"):
            blob.as_tensor(Operand(OperandType.FLOAT32, (3, 5)))


def test_use_after_close_is_a_clear_error() -> None:
    image = HardwareBuffer.allocate(6, 4, "rgb_888")
    image.close()
    for use in (image.view, image.fileno, lambda: image.planes, lambda: image.as_tensor(Operand(UINT8, (4, 6, 3)))):
        with pytest.raises(CallerError, match="has been closed"):
            use()
