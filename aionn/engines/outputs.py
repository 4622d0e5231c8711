"""Outputs that an engine has made, and the arrays that were given for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray


def deliver(made: dict[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> None:
    """Move outputs from `made` into the arrays of `outputs`. Keep an output in `made` if its array has another shape.

    NumPy would broadcast a smaller output over a larger array, so the shapes are compared.
    """
    for name, place in outputs.items():
        if made[name].shape == place.shape:
            place[...] = made.pop(name)
