"""Are a model's constants still what they were when it was read? Without the `onnx` package, as `arrays`.

Constants in sealed memory cannot change. Those in files beside the model, or in memory that the app gave, can be overwritten at any
time; a model's token names them as they were. `Model.contents` says what that was, so a driver can compare.

    contents    BLAKE3 of the BLAKE3 digests of these constants, in the model's order; empty where the model has none

The bytes are read from the descriptor: an engine may have written to its private mapping of them, and a file that has been cut off
ends the reading, not the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from blake3 import blake3

from aionn.hal.model import Constant, Model, may_change
from aionn.hal.types import IMemory

__all__ = ["changeable_contents", "contents_of", "written_ns"]

_CHUNK_BYTES = 1 << 20


def contents_of(digests: Iterable[bytes]) -> bytes:
    """`Model.contents`, from the digests of the constants that may change, in order."""
    joined = b"".join(digests)
    return blake3(joined).digest() if joined else b""


def changeable_contents(model: Model) -> bytes:
    """The same from the bytes as they are now. Blocks as long as it takes to read them.

    Raises:
        CallerError: a pool has been closed.
        OSError: a file cannot be read.
    """
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    places = [(constant, model.pools[constant.location.pool_index]) for constant in model.constants]
    return contents_of(_digest(constant, pool, chunk) for constant, pool in places if may_change(pool))


def _digest(constant: Constant, pool: IMemory, chunk: memoryview) -> bytes:
    digest = blake3()
    begin = pool.description.offset_bytes + constant.location.offset
    end = begin + constant.location.length
    while begin < end:
        got = os.preadv(pool.fileno(), [chunk[: end - begin]], begin)
        if not got:
            break  # the file has been cut off, so the digest is another
        digest.update(chunk[:got])
        begin += got
    return digest.digest()


def written_ns(model: Model) -> tuple[int, ...]:
    """When each of these files was written to last: shows also what was undone before anybody looked at the bytes again."""
    return tuple(os.fstat(pool.fileno()).st_mtime_ns for pool in model.pools if may_change(pool))
