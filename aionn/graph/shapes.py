"""What the shapes of given inputs say about the shapes of outputs. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from aionn.hal.types import Operand


def resolve_shapes(
    outputs: Mapping[str, Operand], inputs: Mapping[str, Operand], input_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...] | None]:
    """The shape of each output, as far as it is known before the execution.

    An open axis with a symbol has the extent of the input axis with the same symbol.

    Args:
        outputs: the model's outputs.
        inputs: the model's inputs.
        input_shapes: the concrete shape of each input that is given; an omitted one says nothing.

    Returns:
        Per output its shape, or None where any axis stays open. An axis stays open without a symbol, with a symbol that
        the given inputs lack, or with one about which two inputs disagree. Exporters do reuse names.
    """
    extents: dict[str, set[int]] = {}
    for name, shape in input_shapes.items():
        operand = inputs[name]
        if operand.dimensions is None or len(operand.dimensions) != len(shape):
            continue
        for symbol, want, got in zip(operand.symbols, operand.dimensions, shape, strict=False):
            if symbol is not None and want == 0:
                extents.setdefault(symbol, set()).add(got)
    known = {symbol: next(iter(found)) for symbol, found in extents.items() if len(found) == 1}
    return {name: _resolve(operand, known) for name, operand in outputs.items()}


def _resolve(operand: Operand, known: Mapping[str, int]) -> tuple[int, ...] | None:
    if operand.dimensions is None:
        return None
    symbols = operand.symbols or (None,) * len(operand.dimensions)
    shape = []
    for extent, symbol in zip(operand.dimensions, symbols, strict=True):
        if extent == 0:
            if symbol is None or symbol not in known:
                return None
            shape.append(known[symbol])
        else:
            shape.append(extent)
    return tuple(shape)
