"""`Memory`: shared memory as an app holds it, for bytes that must not be copied on their way to a driver.

An app makes a memory (`allocate`) or wraps a file it has (`from_fd`). A memory, or a slice of it, may stand wherever an
array may. All of it lies in one pool (`Region`), mapped once. A slice is another `Memory` over the same pool.

Lifetime. Every `Memory`, the first one and each slice, is one user of the pool, from its making to its `close` (or its
end as an object). Descriptor and mapping end with the last user. Views and arrays keep the bytes mapped even longer,
so nothing is ever unmapped under a reader. Code that needs the pool beyond the app's `close` takes a slice,
`memory[:]`, as an execution in flight does.

Invariants
    pool.users is the number of open `Memory` objects over it; the region is closed  <=>  it is 0.
    0 <= offset_bytes, and offset_bytes + size_bytes <= size of the pool.
"""

from __future__ import annotations

import fcntl
import operator
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from aionn.errors import NO_DESCRIPTOR_LEFT, CallerError
from aionn.hal.types import MemoryDescription, MemoryKind, Operand
from aionn.loopless import ClosedByWith
from aionn.memory import limits
from aionn.memory.region import PROT_READ, PROT_WRITE, Access, Region

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

_MOST_BYTES = 2**63
"""More bytes than any file, memory or array has."""


class HasFileno(Protocol):
    """Anything with a descriptor: an open file, a socket, a `Memory`."""

    def fileno(self) -> int: ...


def _whole_bytes(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise CallerError(f"{name}={value!r}: expected a whole number of bytes, as an int") from None


def _sendable(memory: Memory) -> Region:
    """Return the pool of a memory that is a whole pool: a driver maps pools, not slices."""
    region = memory.pool
    if (memory.offset_bytes, memory.size_bytes) != (0, region.size_bytes):
        raise CallerError(f"a slice of {memory.size_bytes} bytes cannot be sent as a pool; send `.pool` and the slice's place in it")
    return region


def extents_of(shape: Iterable[int | np.integer[Any]]) -> tuple[int, ...]:
    """Return an app's shape as plain ints.

    Raises:
        CallerError: `shape` is not a sequence of whole numbers, or no memory can hold so many elements.
    """
    try:
        extents = tuple(int(operator.index(extent)) for extent in shape)
    except TypeError:
        raise CallerError(f"shape={shape!r}: expected a tuple of whole numbers, as in (1, 16)") from None
    if prod(max(abs(extent), 1) for extent in extents) >= _MOST_BYTES:
        raise CallerError(f"shape={extents} has more elements than a memory can hold; give a shape of at most 2^63 - 1")
    return extents


class _Pool:
    """One mapped region and the number of its users."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.users = 0
        # Reentrant: the garbage collector may end a forgotten slice while this thread counts another.
        self._lock = threading.RLock()

    def enter(self) -> None:
        with self._lock:
            self.users += 1

    def leave(self) -> None:
        with self._lock:
            self.users -= 1
            last = self.users == 0
        if last:
            self.region.close()


class Memory(ClosedByWith):
    """Shared memory that an app holds. It may stand wherever an array may. A whole memory satisfies `hal.IMemory`.

    Attributes:
        offset_bytes: where it begins within its pool (0 for a whole memory).
        size_bytes: how long it is.
        shape: of the tensor it holds, if `shaped` gave one. If it is None, the operand decides.

    Examples:
        >>> with aionn.Memory.allocate(64) as memory:
        ...     memory.array(np.float32, (1, 16))[:] = 1
        ...     outputs = await compilation.compute({"x": memory})  # read in place
    """

    def __init__(self, region: Region) -> None:
        """Take over a region. Apps call `allocate` or `from_fd`."""
        self._open(_Pool(region), 0, region.size_bytes)

    def _open(self, pool: _Pool, offset_bytes: int, size_bytes: int) -> None:
        pool.enter()
        self._pool: _Pool | None = pool
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes
        self.shape: tuple[int, ...] | None = None

    @classmethod
    def allocate(cls, size: int) -> Memory:
        """Reserve zeroed shared memory (pool kind `ashmem`).

        Args:
            size: bytes, at least 1.

        Raises:
            CallerError: `size` is not a positive whole number.
            MemoryAllocationError: the memory cannot be had now. The error says which limit leaves how much.
        """
        return cls(Region.allocate(_whole_bytes("size", size)))

    @classmethod
    def from_fd(cls, fd: int | HasFileno, size: int, prot: int = PROT_READ | PROT_WRITE, offset: int = 0) -> Memory:
        """Map a file the app has open, in place (pool kind `mmap_fd`). NNAPI: ANeuralNetworksMemory_createFromFd.

        The descriptor is duplicated, so the app may close it at once. A driver writes outputs through to the file
        and flushes it after each success. Do not cut the file off while it is in use.

        Args:
            fd: a descriptor, or something with `fileno()`. It is a regular file, a memfd whose size is sealed, or a dma-buf.
            size: bytes from `offset` on. The file must have all of them.
            prot: `mmap.PROT_READ`, or `mmap.PROT_READ | mmap.PROT_WRITE`.
            offset: where in the file it begins, in bytes, up to 2^63. It is a multiple of the page size. Slice the mapped
                memory to begin elsewhere.

        Raises:
            CallerError: the descriptor cannot be mapped so. The message says why.
            MemoryAllocationError: the file has holes, and the disk or the memory lacks the space to fill them.
        """
        if prot not in (PROT_READ, PROT_READ | PROT_WRITE):
            raise CallerError(f"prot={prot}: expected PROT_READ ({PROT_READ}) or PROT_READ | PROT_WRITE ({PROT_READ | PROT_WRITE})")
        size, offset = _whole_bytes("size", size), _whole_bytes("offset", offset)
        if not isinstance(fd, int) and not hasattr(fd, "fileno"):
            raise CallerError(f"expected a descriptor, got {type(fd).__name__}; give its number, or an open file")
        number = fd if isinstance(fd, int) else fd.fileno()
        try:
            own = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 0)
        except (OSError, OverflowError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR_LEFT:
                raise limits.allocation_error(size, error) from error
            raise CallerError(f"descriptor {number} is not open; give the descriptor of an open file") from error
        writable = bool(prot & PROT_WRITE)
        description = MemoryDescription(MemoryKind.MMAP_FD, size, writable=writable, offset_bytes=offset)
        return cls(Region.attach(own, description, Access.WRITE if writable else Access.READ))

    @property
    def pool(self) -> Region:
        """Return the whole pool, which is sent to a driver. `offset_bytes` and `size_bytes` are the memory's place in it."""
        return self._living().region

    def _living(self) -> _Pool:
        if self._pool is None:
            raise CallerError("this memory has been closed; allocate it, or slice it, again")
        return self._pool

    @property
    def description(self) -> MemoryDescription:
        """Return how a driver maps a whole memory. A slice raises a `CallerError`."""
        return _sendable(self).description

    def fileno(self) -> int:
        """Return the pool's descriptor, which the memory keeps owning."""
        return _sendable(self).fileno()

    def view(self) -> memoryview:
        """Return all its bytes, in place, read-only if they are mapped so. The view keeps the bytes mapped, not the memory open.

        Raises:
            CallerError: the memory has been closed.
            ExecutionError: the mapped file has been cut off meanwhile. Touching its bytes would end this process (SIGBUS).
        """
        pool = self.pool
        pool.check_backing()
        return pool.view()[self.offset_bytes : self.offset_bytes + self.size_bytes]

    @contextmanager
    def in_use(self) -> Iterator[memoryview]:
        """Give its bytes for the body. Use this for a dma-buf, whose device and CPU see each other's bytes only then.

        Executions do so by themselves. For other memory it is `view`.

        Raises:
            CallerError, ExecutionError: as `view`.
        """
        with self[:] as part:  # open for the body, also when the app closes this memory meanwhile
            pool = part.pool
            pool.begin_use()
            try:
                yield part.view()
            finally:
                pool.end_use()

    def array(self, dtype: DTypeLike, shape: int | np.integer[Any] | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """Return an array over its bytes, in place and C-contiguous. It is writable if the memory is.

        Args:
            dtype: of one element, in native byte order or as given. Python objects are refused.
            shape: extents, each at least 0.
            offset: bytes from the beginning of this memory (or slice).

        Raises:
            CallerError: the array would reach beyond the memory, or the memory has been closed.
        """
        import numpy as np

        try:
            element = np.dtype(dtype)
        except TypeError as error:
            raise CallerError(f"dtype={dtype!r}: NumPy knows no such element type ({error}); give one, as in np.float32") from error
        extents = extents_of((shape,) if isinstance(shape, int | np.integer) else shape)
        if element.hasobject:
            raise CallerError(f"dtype {element} holds references to Python objects; shared memory holds plain numbers only")
        needed = element.itemsize
        for extent in extents:
            needed *= extent
        if offset < 0 or min(extents, default=0) < 0 or offset + needed > self.size_bytes:
            raise CallerError(f"an array {extents} of {element} at byte {offset} needs {needed} bytes; this memory has {self.size_bytes}")
        return np.ndarray(extents, element, buffer=self.view(), offset=offset)

    def locate(self, operand: Operand, shape: tuple[int, ...] | None = None) -> tuple[Memory, tuple[int, ...]]:
        """Take all of this memory as a tensor for that operand. Return a slice, to be closed, and the tensor's shape.

        Args:
            operand: what a model wants. One open extent follows from the size. More than one must be given.
            shape: for an operand that leaves more than one extent open. `shaped` is another way to give it.

        Raises:
            CallerError: the sizes differ, or the shape is not known.
        """
        pool, size = self._living(), self.size_bytes
        shape = self.shape if shape is None else extents_of(shape)
        known = operand.dimensions if shape is None else shape
        if shape is not None and not operand.accepts(shape):
            raise CallerError(f"shape {shape} does not fit an operand of dimensions {operand.dimensions}; choose open extents (0) only")
        if known is None or known.count(0) > 1:
            raise CallerError(
                f"the operand's dimensions {operand.dimensions} leave the shape of {size} bytes open; "
                "give shape=, as in memory.shaped(shape)"
            )
        row_bytes = operand.type.element_bytes
        for extent in known:
            row_bytes *= extent or 1
        is_open = 0 in known
        found = tuple([extent or size // row_bytes for extent in known]) if is_open else known
        needed = row_bytes * (size // row_bytes if is_open else 1)
        if needed != size or 0 in found:
            raise CallerError(
                f"memory of {size} bytes was given for an operand {operand.type.value} {known}, which takes "
                f"{'a multiple of ' if is_open else ''}{row_bytes} bytes; pass a slice of the same size"
            )
        return _part(pool, self.offset_bytes, size), found

    def __getitem__(self, index: slice) -> Memory:
        """Return another `Memory` over a part of the bytes: `memory[begin:end]`, in bytes.

        The slice keeps the mapping alive until it is closed or goes out of scope. Unlike a list's, its ends are not clipped.

        Raises:
            CallerError: the slice reaches beyond the memory, is empty or has a step, or the memory has been closed.
        """
        pool = self._living()
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise CallerError(f"memory[{index!r}]: expected a plain slice; use `memory[begin:end]`, or `array()` for single elements")
        try:
            ends = [end if end is None else operator.index(end) for end in (index.start, index.stop)]
        except TypeError:
            raise CallerError(f"memory[{index.start!r}:{index.stop!r}]: expected whole numbers of bytes as the ends of a slice") from None
        begin, end = (value if value is None or value >= 0 else value + self.size_bytes for value in ends)
        begin, end = begin or 0, self.size_bytes if end is None else end
        if not 0 <= begin < end <= self.size_bytes:
            raise CallerError(f"memory[{begin}:{end}] of {self.size_bytes} bytes: expected a slice of at least one byte within the memory")
        return _part(pool, self.offset_bytes + begin, end - begin)

    def shaped(self, shape: tuple[int, ...]) -> Memory:
        """Return another `Memory` over the same bytes, as a tensor of that shape, for operands with several open dimensions.

        The use of the memory checks whether type and size fit.

        Raises:
            CallerError: an extent is below 1, or the memory has been closed.
        """
        shape = extents_of(shape)
        if min(shape, default=1) < 1:
            raise CallerError(f"shape {shape}: expected extents of at least 1")
        part = self[:]
        part.shape = shape
        return part

    def __len__(self) -> int:
        return self.size_bytes

    def flush(self) -> bool:
        """Write a mapped file's bytes back to it now, as `Region.flush`. Return whether there is a file to write to."""
        return self.pool.flush()

    @property
    def closed(self) -> bool:
        """Return whether `close` has been called on this object."""
        return self._pool is None

    def close(self) -> None:
        """End the use of this object. The mapping ends with the last slice, execution and view over it."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.leave()

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._pool is None else self._pool.region.description.kind.value
        return f"<Memory {state}, bytes {self.offset_bytes} to {self.offset_bytes + self.size_bytes} of its pool>"


def _part(pool: _Pool, offset_bytes: int, size_bytes: int) -> Memory:
    part = Memory.__new__(Memory)
    part._open(pool, offset_bytes, size_bytes)
    return part


def whole_of(memory: Memory) -> Memory:
    """Return another `Memory` over the whole pool of one."""
    whole = memory[:]
    whole.offset_bytes, whole.size_bytes = 0, whole.pool.size_bytes
    return whole
