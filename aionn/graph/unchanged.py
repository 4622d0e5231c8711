"""Private copies of constants that other processes may change. Without the `onnx` package, as `arrays`.

Constants in sealed memory cannot change. Those in files, or in memory that the app gave, can be overwritten at any time, and a file can
be cut off. A model's token names them as they were when it was made. `known_contents` says what that was, so a driver can compare.

    contents    BLAKE3 of the BLAKE3 digests of these constants, in the model's order; empty where the model has none

A driver never maps a file of constants. It copies them from the descriptor and digests the copy. So what an engine compiles is what was
digested, and a file that is cut off ends the reading, not the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from blake3 import blake3
from msgspec.structs import replace

from aionn.errors import AionnError, CallerError, CompilationError
from aionn.file_ranges import FileRange, copy_ranges, digest_ranges, private_memory
from aionn.hal import model as hal_model
from aionn.hal.model import Constant, PooledModel, may_change
from aionn.hal.types import DataLocation, IMemory, MemoryDescription, MemoryKind


def contents_of(digests: Iterable[bytes]) -> bytes:
    """`known_contents`, from the digests of the constants that may change, in order."""
    joined = b"".join(digests)
    return blake3(joined).digest() if joined else b""


def changeable_contents(model: PooledModel) -> bytes:
    """Return what `known_contents` is for the constants as they are now. Keeps nothing, and blocks for as long as it takes to read them.

    Raises:
        CompilationError: a file is shorter than it was, or cannot be read.
    """
    places = [_range(model, constant) for constant in model.constants if may_change(model.pools[constant.location.pool_index])]
    return contents_of(_read(lambda: digest_ranges(places)))


def own_constants(model: PooledModel, *, files_only: bool = False) -> tuple[PooledModel, bytes]:
    """Return the model with private copies of the constants that may change, and what `known_contents` is for these copies.

    Each copy is a pool that begins at a multiple of 64 bytes, and its memory is freed with the last view of it. Constants that cannot
    change stay in their pools. Blocks for as long as it takes to read the constants.

    Args:
        files_only: leave constants in memory that the app gave where they are.

    Raises:
        CompilationError: a file is shorter than it was, or cannot be read.
    """

    def is_copied(pool: IMemory) -> bool:
        return pool.description.kind is MemoryKind.MMAP_FD or (not files_only and may_change(pool))

    copied = [constant for constant in model.constants if is_copied(model.pools[constant.location.pool_index])]
    if not copied:
        return model, b""
    copies = [private_memory(constant.location.length) for constant in copied]
    digests = _read(lambda: copy_ranges([_range(model, constant) for constant in copied], copies))
    kept = [pool for pool in model.pools if not is_copied(pool)]
    numbers = count(len(kept))
    index = {id(pool): number for number, pool in enumerate(kept)}

    def moved(constant: Constant) -> Constant:
        place = constant.location
        pool = model.pools[place.pool_index]
        here = DataLocation(next(numbers), 0, place.length) if is_copied(pool) else replace(place, pool_index=index[id(pool)])
        return Constant(constant.name, constant.operand, here)

    own = hal_model.PooledModel(
        graph=model.graph,
        inputs=model.inputs,
        outputs=model.outputs,
        operations=model.operations,
        constants=tuple(map(moved, model.constants)),
        pools=(*kept, *map(PrivateMemory, copies)),
        token=model.token,
    )
    return own, contents_of(digests)


def _read(read: Callable[[], list[bytes]]) -> list[bytes]:
    try:
        return read()
    except (AionnError, OSError) as error:
        why = f"the weights beside the model cannot be read ({error}); if their file was cut off, put it back and read the model again"
        raise CompilationError(why, reason=str(error)) from error


def _range(model: PooledModel, constant: Constant) -> FileRange:
    pool, place = model.pools[constant.location.pool_index], constant.location
    return FileRange(pool.fileno(), pool.description.offset_bytes + place.offset, place.length)


class PrivateMemory:
    """Memory of this process alone. Satisfies `IMemory`, but has no descriptor, so it cannot be sent."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.size_bytes = content.nbytes
        self.description = MemoryDescription(MemoryKind.ASHMEM, content.nbytes, writable=False)

    def fileno(self) -> int:
        raise CallerError("a private copy of a model's constants has no descriptor, so it cannot be sent")

    def view(self) -> memoryview:
        return self._content
