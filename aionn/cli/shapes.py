"""The shapes of inputs that `aionn run --shape` and `aionn bench MODEL --shape` make up."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from math import prod

import aionn
from aionn.cli.printing import UsageError, size

Shape = tuple[int, ...]

_MOST_EXTENT = 2**31 - 1


def parse_shapes(texts: Sequence[str]) -> dict[str, Shape]:
    """Read options of the form NAME=1x3x224x224, or NAME=scalar. Returns the shape of each input by its name.

    Raises:
        UsageError: a text has another form, or two of them name the same input.
    """
    shapes: dict[str, Shape] = {}
    for text in texts:
        name, equals, extents = text.rpartition("=")  # from the right, because names of tensors may hold "="
        if not equals or not name:
            raise UsageError(f"--shape {text!r} does not name an input and a shape; give NAME=1x3x224x224")
        if name in shapes:
            raise UsageError(f"--shape names input {name!r} twice; give one shape for each input")
        shapes[name] = () if extents == "scalar" else tuple(_extent(text, part) for part in extents.split("x"))
    return shapes


def _extent(text: str, part: str) -> int:
    extent = int(part) if part.isascii() and part.isdigit() else 0
    if not 1 <= extent <= _MOST_EXTENT:
        raise UsageError(
            f"--shape {text!r}: {part!r} is not an extent; give whole numbers from 1 on with x between, as in NAME=1x3x224x224"
        )
    return extent


def check_shapes(shapes: Mapping[str, Shape], given: Collection[str], model: aionn.Model) -> None:
    """Check shapes against a model.

    Args:
        given: the inputs that a file gives, which have the shape of the file.

    Raises:
        UsageError: the model has no such input, or the input has another shape, or it would not fit into this machine's memory.
    """
    for name, shape in shapes.items():
        operand = model.inputs.get(name)
        if operand is None:
            raise UsageError(f"--shape: the model has no input {name!r}; its inputs are {', '.join(model.inputs)}")
        if name in given:
            raise UsageError(f"input {name!r} has both --input and --shape; a file brings its own shape, so leave out --shape")
        if not operand.in_frames:
            raise UsageError(f"input {name!r} is of type {operand.word}, which has no shape to make up; leave out --shape {name}=...")
        known = operand.dimensions
        if known is not None and (
            len(known) != len(shape) or any(extent not in (0, wanted) for extent, wanted in zip(known, shape, strict=True))
        ):
            wanted_shape = "x".join(str(extent or "?") for extent in known) or "scalar"
            raise UsageError(
                f"input {name!r} has shape {wanted_shape} in the model, and --shape gives {'x'.join(map(str, shape)) or 'scalar'}; "
                "give a number for each ? and the model's own extents elsewhere"
            )
        needed = prod(shape) * 8  # random numbers are made as float64
        if needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise UsageError(f"--shape {name}={'x'.join(map(str, shape))} needs {size(needed)}, more than this machine's memory")
