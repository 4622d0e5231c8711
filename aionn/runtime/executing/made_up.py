"""Inputs that are made up, for a model that no app has given inputs yet: random numbers, always the same, and 1 for open dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError
from aionn.hal.model import Model
from aionn.hal.types import Operand

__all__ = ["made_up_array", "made_up_inputs"]


def made_up_array(operand: Operand, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[Any]:
    """Return numbers for an input: from 0 to below 1, or 0 and 1 for an input that takes no fractions."""
    dtype = operand.type.dtype
    return random.random(shape).astype(dtype) if dtype.kind == "f" else random.integers(0, 2, shape).astype(dtype)


def made_up_inputs(model: Model, way_out: str) -> Mapping[str, NDArray[Any]]:
    """Return an array for each input that has no default.

    Args:
        way_out: what to do about an input that cannot be made up, as the end of the error's sentence.

    Raises:
        CallerError: an input has no shape in the model, or takes texts, sequences, maps or optionals.
    """
    random = np.random.default_rng(0)
    inputs = {}
    for name, operand in model.inputs.items():
        if operand.default is not None:
            continue
        if not operand.in_frames:
            raise CallerError(f"input {name!r} is of type {operand.word}, and only numbers are made up; {way_out}")
        if operand.dimensions is None:
            raise CallerError(f"input {name!r} has no shape in the model, so none can be made up; {way_out}")
        inputs[name] = made_up_array(operand, tuple(extent or 1 for extent in operand.dimensions), random)
    return inputs
