"""Constants as arrays, mostly where their bytes lie. Without the `onnx` package: a driver that only loads artifacts never imports it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CompilationError
from aionn.hal.model import Constant, PooledModel
from aionn.hal.types import MemoryKind


def constant_arrays(model: PooledModel) -> dict[str, NDArray[Any]]:
    """Return the large constants as arrays over the model's pools, by name. Read-only pools give read-only arrays.

    Constants in files are copied (`own_constants`). Others are not, and their arrays keep the pools' mappings alive, not the pools.

    Raises:
        CompilationError: a file with constants is shorter than it was, or cannot be read; or the model is not ONNX.
    """
    if model.format != "onnx":
        raise CompilationError(f"the model has the format {model.format!r}, but this device reads ONNX; compile it on another device")
    if any(pool.description.kind is MemoryKind.MMAP_FD for pool in model.pools):
        from aionn.graph.unchanged import own_constants  # reads files, which most models do not need

        model, _ = own_constants(model, files_only=True)
    return arrays_over([pool.view() for pool in model.pools], model.constants)


def arrays_over(pools: Sequence[Any], constants: Iterable[Constant]) -> dict[str, NDArray[Any]]:
    """Constants as arrays over the bytes-like `pools` that their locations speak of, by name: no copy.

    Raises:
        ValueError: a location is not within its pool, or not as long as type and shape need.
        IndexError: a location names a missing pool.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for constant in constants:
        place = constant.location
        content = np.frombuffer(pools[place.pool_index], np.uint8, place.length, place.offset)
        arrays[constant.name] = content.view(constant.operand.type.dtype).reshape(constant.operand.dimensions or ())
    return arrays
