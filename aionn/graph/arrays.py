"""Constants as arrays where their bytes lie. Without the `onnx` package: a driver that only loads artifacts never imports it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.hal.model import Constant, Model


def constant_arrays(model: Model) -> dict[str, NDArray[Any]]:
    """Return the large constants as arrays over the model's pools, by name. Nothing is copied, and read-only pools give read-only arrays.

    They keep the pools' mappings alive, not the pools.
    """
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
