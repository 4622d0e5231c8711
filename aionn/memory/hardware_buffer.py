"""Image-format buffers, for parity with NNAPI's AHardwareBuffer: a camera writes them and a model reads them, without a copy.

A `HardwareBuffer` is a `Memory` with a format, a width and a height in pixels. For each plane it knows the offset and
how far rows and pixels lie apart. It locks nothing and converts nothing.

    format      planes (name, shape of its array, uint8)                              as one tensor
    blob        "blob" (width,)                                                       any operand of that many bytes
    gray8       "gray" (height, width, 1)                                             NHWC and NCHW are the same bytes
    rgb_888     "rgb"  (height, width, 3), red first                                  NHWC
    rgba_8888   "rgba" (height, width, 4), red first                                  NHWC
    nv12        "y" (height, width, 1), "uv" (height/2, width/2, 2), u first          rows of y, then of uv: (height*3/2, width)
    yuv420      "y" (height, width, 1), "u" and "v" (height/2, width/2, 1)            rows of y, then u, then v: (height*3/2, width)

A blob is a pool like any other (kind `hardware_buffer_blob`) and may be a model's constant. An image (kind
`hardware_buffer`, or `mmap_fd` if it wraps a file) enters executions only, because `hal.Model` refuses it.
"""

# `format` is the word of the public face, and the field's own.
# ruff: noqa: A002

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError
from aionn.hal.types import MemoryDescription, MemoryKind, Operand, OperandType
from aionn.loopless import ClosedByWith
from aionn.memory.memory import HasFileno, Memory
from aionn.memory.region import PROT_READ, PROT_WRITE, Region

ImageFormat = Literal["blob", "rgb_888", "rgba_8888", "nv12", "yuv420", "gray8"]
TensorLayout = Literal["NHWC", "NCHW"]


class PlaneLayout(msgspec.Struct, frozen=True):
    """Where one plane lies in its buffer, in bytes.

    Attributes:
        offset: of the first pixel.
        row_stride: from one row to the next.
        pixel_stride: from one pixel to the next within a row.
    """

    offset: int
    row_stride: int
    pixel_stride: int


# The planes of each format: name, channels per pixel, and how many times smaller than the image each side is.
_PLANES: Mapping[str, tuple[tuple[str, int, int], ...]] = {
    "blob": (("blob", 1, 1),),
    "gray8": (("gray", 1, 1),),
    "rgb_888": (("rgb", 3, 1),),
    "rgba_8888": (("rgba", 4, 1),),
    "nv12": (("y", 1, 1), ("uv", 2, 2)),
    "yuv420": (("y", 1, 1), ("u", 1, 2), ("v", 1, 2)),
}


class HardwareBuffer(ClosedByWith):
    """An image, or a blob, in shared memory. It may stand wherever an array may.

    Attributes:
        memory: its bytes. A driver gets `buffer.memory.pool`.
        width, height: in pixels. A blob has its size as width, and the height 1.
        format: "blob", "gray8", "rgb_888", "rgba_8888", "nv12" or "yuv420"; `help(aionn.memory.hardware_buffer)` has their planes.
        layouts: where each plane lies, by name.

    Examples:
        >>> with aionn.HardwareBuffer.allocate(64, 48, "nv12") as picture:
        ...     picture.planes["y"][:] = 128
        ...     {name: plane.shape for name, plane in picture.planes.items()}
        {'y': (48, 64, 1), 'uv': (24, 32, 2)}
    """

    def __init__(
        self,
        memory: Memory,
        width: int,
        height: int,
        format: ImageFormat,
        planes: Sequence[PlaneLayout] | None = None,
    ) -> None:
        """Take over `memory`, which closes with the buffer. Apps call `allocate`, `from_fd` or `from_memory`."""
        self.memory, self.width, self.height, self.format = memory, width, height, format
        self.layouts = MappingProxyType(_checked_layouts(width, height, format, planes, memory.size_bytes))

    @classmethod
    def allocate(cls, width: int, height: int = 1, format: ImageFormat = "blob") -> HardwareBuffer:
        """Reserve a zeroed buffer whose rows and planes follow each other without gaps, so each tensor view is in place.

        Args:
            width: in pixels; even for nv12 and yuv420. A blob takes its bytes.
            height: the same; 1 for a blob.
            format: as above.

        Raises:
            CallerError: width, height or format is wrong.
            MemoryAllocationError: the memory cannot be had now.
        """
        size = dense_bytes(width, height, format)
        kind = MemoryKind.HARDWARE_BUFFER_BLOB if format == "blob" else MemoryKind.HARDWARE_BUFFER
        return cls(Memory(Region.allocate(size, kind=kind)), width, height, format)

    @classmethod
    def from_fd(
        cls,
        fd: int | HasFileno,
        width: int,
        height: int,
        format: ImageFormat,
        planes: Sequence[PlaneLayout] | None = None,
        *,
        size: int | None = None,
        prot: int = PROT_READ | PROT_WRITE,
        offset: int = 0,
    ) -> HardwareBuffer:
        """Wrap an image that lies in a file or sealed memfd, in place (pool kind `mmap_fd`). The descriptor is duplicated.

        Args:
            fd: as for `Memory.from_fd`, and so are `prot` and `offset`.
            width: in pixels.
            height: in pixels.
            format: as above.
            planes: where each plane lies, counted from `offset`, in the order of the module's table. None means without gaps.
            size: bytes of the whole. None means up to the end of the last plane.
            prot: `PROT_READ`, `PROT_WRITE` or both.
            offset: where the image begins, in bytes.

        Raises:
            CallerError: the descriptor cannot be mapped so, or a plane reaches beyond it.
            MemoryAllocationError: the file has holes, and the memory to fill them cannot be had now.
        """
        if size is None:
            size = max(
                _end(layout, *_extents(width, height, format)[name]) for name, layout in _layouts(width, height, format, planes).items()
            )
        memory = Memory.from_fd(fd, size, prot, offset)
        try:
            return cls(memory, width, height, format, planes)
        except BaseException:
            memory.close()
            raise

    @classmethod
    def from_memory(
        cls,
        memory: Memory,
        width: int,
        height: int,
        format: ImageFormat,
        planes: Sequence[PlaneLayout] | None = None,
    ) -> HardwareBuffer:
        """Make an image over memory the app has. It shares the bytes and closes separately. Arguments as `from_fd`."""
        part = memory[:]
        try:
            return cls(part, width, height, format, planes)
        except BaseException:
            part.close()
            raise

    @property
    def planes(self) -> Mapping[str, NDArray[np.uint8]]:
        """Return each plane as an array (height, width, channels) over its bytes, in place, with the buffer's strides."""
        view = self.memory.view()
        extents = _extents(self.width, self.height, self.format)
        arrays: dict[str, NDArray[np.uint8]] = {}
        for name, layout in self.layouts.items():
            strides = (layout.row_stride, layout.pixel_stride, 1)
            arrays[name] = np.ndarray(extents[name], np.uint8, buffer=view, offset=layout.offset, strides=strides)
        return {"blob": arrays["blob"].reshape(-1)} if self.format == "blob" else arrays

    def as_tensor(self, operand: Operand, *, plane: str | None = None, layout: TensorLayout | None = None) -> NDArray[Any]:
        """Return the image as the tensor the operand wants: a C-contiguous array over the buffer's bytes, never a copy.

        Images are uint8. A plane of c channels is NHWC, (1, height, width, c), or (height, width, c) for an operand of
        rank 3. A plane of one channel also fits NCHW (1, 1, height, width) and, at rank 2, (height, width). All of an nv12
        or yuv420 image is one channel of height*3/2 rows. A blob takes any type and shape of its size (`Memory.locate`).

        Args:
            operand: what the model wants. Its shape must show which axis is the channels, or `layout` must say so.
            plane: one plane by name; None means the whole image.
            layout: for an operand whose dimensions leave it open. A layout that contradicts them is an error.

        Raises:
            CallerError: type, shape or layout of the two differ, or rows or planes have gaps. The error says what to do.
        """
        place, shape = self.locate(operand, plane=plane, layout=layout)
        with place:
            return place.array(operand.type.dtype, shape)

    def locate(self, operand: Operand, *, plane: str | None = None, layout: TensorLayout | None = None) -> tuple[Memory, tuple[int, ...]]:
        """Find the tensor of `as_tensor`. Return a slice of the buffer's memory, to be closed, and the tensor's shape."""
        if self.format == "blob":
            return self.memory.locate(operand)
        if operand.type is not OperandType.UINT8:
            raise CallerError(
                f"an image of format {self.format} holds uint8, the operand wants {operand.type.value}; convert planes into a new "
                "array, or let the model begin with a Cast"
            )
        rows, columns, channels, offset = self._dense(plane)
        shape = _tensor_shape(operand, (rows, columns, channels), layout, f"{self.format} image" if plane is None else f"plane {plane!r}")
        with self.memory[offset : offset + rows * columns * channels] as place:
            return place.shaped(shape), shape

    def _dense(self, plane: str | None) -> tuple[int, int, int, int]:
        """Return rows, columns, channels and offset of one plane, or of the whole image, if it has no gaps."""
        if plane is not None and plane not in self.layouts:
            raise CallerError(f"plane {plane!r}: an image of format {self.format} has {', '.join(self.layouts)}")
        names = list(self.layouts) if plane is None else [plane]
        extents = _extents(self.width, self.height, self.format)
        begin = position = self.layouts[names[0]].offset
        for name in names:
            rows, columns, channels = extents[name]
            row_bytes, got = columns * channels, self.layouts[name]
            if (columns > 1 and got.pixel_stride != channels) or (rows > 1 and got.row_stride != row_bytes):
                raise CallerError(
                    f"plane {name!r}: rows {got.row_stride} and pixels {got.pixel_stride} bytes apart, "
                    f"a tensor has {row_bytes} and {channels}; "
                    f"pass np.ascontiguousarray(buffer.planes[{name!r}]), or have the image written without gaps"
                )
            if got.offset != position:
                raise CallerError(
                    f"plane {name!r} begins at byte {got.offset}, a tensor of the whole image has it at {position}; "
                    "pass the planes one by one (plane=...)"
                )
            position += rows * row_bytes
        if len(names) == 1:
            return (*extents[names[0]], begin)
        return self.height * 3 // 2, self.width, 1, begin

    @property
    def description(self) -> MemoryDescription:
        """Return how a driver maps it."""
        return self.memory.description

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all planes, gaps between rows included."""
        return self.memory.size_bytes

    def fileno(self) -> int:
        """Return the descriptor of its memory, which keeps owning it."""
        return self.memory.fileno()

    def view(self) -> memoryview:
        """Return all its bytes, in place."""
        return self.memory.view()

    @property
    def closed(self) -> bool:
        """Return whether `close` has been called."""
        return self.memory.closed

    def close(self) -> None:
        """End the use of this object, as `Memory.close`."""
        self.memory.close()

    def __repr__(self) -> str:
        return f"<HardwareBuffer {self.format} {self.width} x {self.height}{', closed' if self.closed else ''}>"


def dense_bytes(width: int, height: int, format: ImageFormat) -> int:
    """Return the bytes of an image without gaps."""
    return sum(prod(extents) for extents in _extents(width, height, format).values())


def _extents(width: int, height: int, format: str) -> dict[str, tuple[int, int, int]]:
    """Return rows, columns and channels of each plane."""
    planes = _PLANES.get(format)
    if planes is None:
        raise CallerError(f"unknown format {format!r}; choose one of {', '.join(_PLANES)}")
    if width < 1 or height < 1 or (format == "blob" and height != 1):
        raise CallerError(f"a {format} buffer of {width} x {height} was asked for; give at least 1 x 1, and the height 1 for a blob")
    if any(divisor > 1 and (width % divisor or height % divisor) for _, _, divisor in planes):
        raise CallerError(f"a {format} image of {width} x {height} was asked for; both must be even, since its colour has half of each")
    return {name: (height // divisor, width // divisor, channels) for name, channels, divisor in planes}


def _layouts(width: int, height: int, format: str, planes: Sequence[PlaneLayout] | None) -> dict[str, PlaneLayout]:
    """Return the planes as given, or planes without gaps for None."""
    extents = _extents(width, height, format)
    if planes is not None:
        if len(planes) != len(extents):
            raise CallerError(f"{len(planes)} planes were given; an image of format {format} has {', '.join(extents)}")
        return dict(zip(extents, planes, strict=True))
    layouts, offset = {}, 0
    for name, (rows, columns, channels) in extents.items():
        layouts[name] = PlaneLayout(offset, columns * channels, channels)
        offset += rows * columns * channels
    return layouts


def _checked_layouts(
    width: int,
    height: int,
    format: str,
    planes: Sequence[PlaneLayout] | None,
    size_bytes: int,
) -> dict[str, PlaneLayout]:
    layouts, extents = _layouts(width, height, format, planes), _extents(width, height, format)
    for name, layout in layouts.items():
        _, columns, channels = extents[name]
        shortest = (columns - 1) * layout.pixel_stride + channels
        if layout.offset < 0 or layout.pixel_stride < channels or layout.row_stride < shortest:
            raise CallerError(
                f"plane {name!r}: {layout}; expected pixels of {channels} bytes, rows of at least {shortest}, and an offset from 0"
            )
        end = _end(layout, *extents[name])
        if end > size_bytes:
            raise CallerError(f"plane {name!r}: its last pixel ends at byte {end} of a buffer of {size_bytes} bytes")
    return layouts


def _end(layout: PlaneLayout, rows: int, columns: int, channels: int) -> int:
    return layout.offset + (rows - 1) * layout.row_stride + (columns - 1) * layout.pixel_stride + channels


def _tensor_shape(operand: Operand, image: tuple[int, int, int], layout: TensorLayout | None, word: str) -> tuple[int, ...]:
    """Return the one shape of the operand that the image has. Guess nothing: raise an error instead."""
    rows, columns, channels = image
    # For an operand of any rank, only the app's `layout` says what it takes.
    dimensions = (0, 0, 0, 0) if operand.dimensions is None and layout is not None else operand.dimensions
    nhwc, nchw = (1, rows, columns, channels), (1, channels, rows, columns)
    fits: dict[str, tuple[int, ...]] = {}
    if dimensions is not None:
        rank = len(dimensions)
        # The shape of an operand with open channels does not show where they are.
        if rank in (3, 4) and operand.accepts(nhwc[4 - rank :]) and (dimensions[-1] or layout == "NHWC"):
            fits["NHWC"] = nhwc[4 - rank :]
        if rank in (3, 4) and operand.accepts(nchw[4 - rank :]) and (dimensions[-3] or layout == "NCHW"):
            fits["NCHW"] = nchw[4 - rank :]
        if rank == 3 and channels == 1 and operand.accepts((1, rows, columns)):
            fits.setdefault("NCHW", (1, rows, columns))
        if rank == 2 and channels == 1 and operand.accepts((rows, columns)):
            return rows, columns
    if layout is not None:
        fits = {name: shape for name, shape in fits.items() if name == layout}
    shapes = set(fits.values())
    # A 3 x 3 image of 3 channels fits both ways with one shape, and only one of them is right.
    ambiguous = len(shapes) > 1 or (len(fits) > 1 and channels > 1)
    if ambiguous or (not shapes and layout is None and (operand.accepts(nhwc) or operand.accepts(nhwc[1:]))):
        raise CallerError(
            f"the shape of an operand {_described(operand)} does not show where its channels are; say layout='NHWC' or layout='NCHW'"
        )
    if not shapes:
        raise CallerError(
            f"a {word} of {columns} x {rows} with {channels} channels does not fit the operand {_described(operand)}; "
            "scale, crop or convert it first"
        )
    (name, shape), *_ = fits.items()
    if name == "NCHW" and channels > 1:
        raise CallerError(
            f"the operand {_described(operand)} wants NCHW, a {word} lies in memory as NHWC; pass "
            "np.ascontiguousarray(plane.transpose(2, 0, 1)[None]) of the plane, or let the model begin with a Transpose"
        )
    return shape


def _described(operand: Operand) -> str:
    return f"{operand.type.value} {'of any rank' if operand.dimensions is None else operand.dimensions}"
