"""Checks whether a request may touch the bytes it names, before anything is mapped. Pure logic, no I/O.

A request comes from another process and is not trusted. `check_request` compares it with the model's
operands and the sizes of the pools that came beside it. It returns None or the first violation as one sentence, which
the caller makes INVALID_ARGUMENT. A reader that maps a pool of the checked size, and touches only
[offset, offset + length) of each argument, stays inside the pool.

The rules are those of NNAPI's validateRequest, with its holes closed. Sums cannot wrap. An input is exactly as
long as its shape says (the reference reads a short one past its end). A known output fits. An output overlaps
nothing else in its pool.

A token (memory in the driver) is a pool without bytes here, of size 0. An argument in such a pool is all of it. So its
offset and length are 0, and its shape may be left to the buffer. An image (`hardware_buffer`) is a pool of bytes like any
other, whose offset and length say where its tensor lies. The reference cannot map images and treats them like tokens.

The dimensions of an input are its true extents, where 0 is an empty axis. The reference refuses those. A dimension of an output may be
open (0).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod

from aionn.hal.types import Operand, Request, RequestArgument

Extent = tuple[Hashable, int, int]
"""Bytes [begin, end) of a file, as (device and inode, begin, end). The same file may be mapped at several addresses."""


def check_request(
    inputs: Sequence[tuple[str, Operand]],
    outputs: Sequence[tuple[str, Operand]],
    request: Request,
    pool_sizes: Sequence[int],
    *,
    open_outputs: bool = True,
) -> str | None:
    """Check a request against its model. Return None if every access that it asks for is in range.

    Args:
        inputs, outputs: names and operands of the model, in its order.
        request: the arguments, in the same order.
        pool_sizes: bytes of each pool; 0 for tokens.
        open_outputs: whether an output's shape may still be open (HAL 1.3: not in a fenced execution).

    Returns:
        One sentence that names the argument, what was found and what was expected.
    """
    for word, operands, arguments in (("input", inputs, request.inputs), ("output", outputs, request.outputs)):
        if len(arguments) != len(operands):
            return f"the request has {len(arguments)} {word}s, the model has {len(operands)}"
        for (name, operand), argument in zip(operands, arguments, strict=True):
            wrong = _wrong_place(argument, pool_sizes)
            if wrong is None and not argument.has_no_value:
                in_place = pool_sizes[argument.location.pool_index] == 0
                wrong = _wrong_dimensions(operand, argument, is_input=word == "input", in_place=in_place, open_outputs=open_outputs)
                if wrong is None and not in_place:
                    wrong = _wrong_length(operand, argument, is_input=word == "input")
            if wrong is not None:
                return f"{word} {name!r}: {wrong}"
    return _overlap(_ranges(inputs, outputs, request))


def check_homes(
    inputs: Sequence[tuple[str, Operand]],
    outputs: Sequence[tuple[str, Operand]],
    request: Request,
    homes: Sequence[Extent | None],
    constants: Sequence[Extent] = (),
) -> str | None:
    """Check whether an output overlaps anything through two pools that are one file, or overlaps the model's constants.

    Args:
        inputs, outputs, request: as `check_request`, which has passed them.
        homes: for each pool, where its bytes really are. None if that is unknown, or the bytes are in the driver.
        constants: where the model's constants are, if another process may have mapped their memory, too.

    Returns:
        One sentence that names the output, as in `check_request`. None if nothing overlaps.
    """
    files = {home[0] for home in homes if home is not None}
    shared = len(files) < sum(home is not None for home in homes)
    reached = [extent for extent in constants if extent[0] in files]
    if not shared and not reached:
        return None
    numbers: dict[Hashable, int] = {}
    ranges = []
    for pool, begin, end, word, name in _ranges(inputs, outputs, request):
        home = homes[pool]
        file, base = (("pool", pool), 0) if home is None else (home[0], home[1])
        ranges.append((numbers.setdefault(file, len(numbers)), base + begin, base + end, word, name))
    ranges += [(numbers[file], begin, end, "constant", "of the model") for file, begin, end in reached if file in numbers]
    return _overlap(ranges)


def input_shape(operand: Operand, argument: RequestArgument) -> tuple[int, ...]:
    """Return the shape of an input that lies in a pool of bytes and has passed `check_request`. It is always known.

    If neither the model nor the request gives a rank, the input is a scalar. `check_request` has seen that its length is
    one element's. For an input that is used in place (a token), `DeviceBuffers.use` asks the buffer instead.
    """
    return argument.dimensions or operand.dimensions or ()


def output_shape(operand: Operand, argument: RequestArgument) -> tuple[int, ...] | None:
    """Return the shape of an output if it is known before the execution, or None while an extent is open."""
    shape = _merged(operand, argument)
    return None if shape is None or 0 in shape else shape


def _merged(operand: Operand, argument: RequestArgument) -> tuple[int, ...] | None:
    """Return each extent from the argument, or from the model if the argument leaves it open. None lacks even a rank."""
    own, given = operand.dimensions, argument.dimensions
    if not given or own is None:
        return given or own
    return tuple(extent or mine for extent, mine in zip(given, own, strict=True))


def _wrong_place(argument: RequestArgument, pool_sizes: Sequence[int]) -> str | None:
    place = argument.location
    if argument.has_no_value:
        if (place.pool_index, place.offset, place.length) != (0, 0, 0) or argument.dimensions:
            return "it has no value, so its pool index, offset and length must be 0 and its dimensions empty"
        return None
    if not 0 <= place.pool_index < len(pool_sizes):
        return f"pool {place.pool_index} of {len(pool_sizes)}; there is no such pool"
    size = pool_sizes[place.pool_index]
    # Python's integers do not wrap, so offset + length is right even near 2^64.
    if place.offset < 0 or place.length < 0 or place.offset + place.length > size:
        if size == 0:
            return (
                f"offset {place.offset} and length {place.length} in pool {place.pool_index}, which is memory in the driver "
                "and used as a whole; both must be 0"
            )
        return f"bytes {place.offset} to {place.offset + place.length} of pool {place.pool_index}, which has {size} bytes"
    return None


def _wrong_dimensions(operand: Operand, argument: RequestArgument, *, is_input: bool, in_place: bool, open_outputs: bool) -> str | None:
    own, given = operand.dimensions, argument.dimensions
    if any(extent < 0 for extent in given):
        return f"dimensions {given} have a negative extent; give at least 0"
    if given and own is not None:
        if len(given) != len(own):
            return f"dimensions {given} have rank {len(given)}, the model's {own} have rank {len(own)}"
        if any(mine not in (0, theirs) and (is_input or theirs) for mine, theirs in zip(own, given, strict=True)):
            return f"dimensions {given} do not fit the model's {own}; only an extent that the model leaves open (0) may be chosen"
    if is_input:
        if in_place and 0 in given:
            return f"dimensions {given} are empty, but memory in the driver holds at least one element; give an empty input in a pool"
        if not given and own is not None and 0 in own and not in_place:
            return f"the model leaves dimensions open in {own}, so the request must give the input's"
        return None
    if not open_outputs and output_shape(operand, argument) is None:
        return f"dimensions {given} leave the shape of {own} open; a fenced execution needs the full shape of its outputs"
    return None


def _wrong_length(operand: Operand, argument: RequestArgument, *, is_input: bool) -> str | None:
    length = argument.location.length
    shape = input_shape(operand, argument) if is_input else output_shape(operand, argument)
    if shape is not None:
        needed = prod(shape) * operand.type.element_bytes
        if length != needed if is_input else length < needed:
            return f"{length} bytes, its shape {shape} of {operand.type.value} {'has' if is_input else 'needs'} {needed}"
    elif length == 0:
        return "0 bytes; give the length of its memory, which the pool's size does not imply"
    return None


_Range = tuple[int, int, int, str, str]
"""(pool, begin, end, "input" or "output", name)"""


def _ranges(inputs: Sequence[tuple[str, Operand]], outputs: Sequence[tuple[str, Operand]], request: Request) -> list[_Range]:
    return [
        (argument.location.pool_index, argument.location.offset, argument.location.offset + argument.location.length, word, name)
        for word, operands, arguments in (("input", inputs, request.inputs), ("output", outputs, request.outputs))
        for (name, _), argument in zip(operands, arguments, strict=True)
        if argument.location.length > 0
    ]


_WAY_OUT = "give the output other memory"


def _overlap(ranges: list[_Range]) -> str | None:
    """Return a sentence about the first output that shares bytes with an input or another output. Inputs may share bytes.

    Look at the ranges once, in the order in which they begin. A range overlaps an earlier one exactly if it begins
    before the furthest end so far. Two furthest ends are kept, of outputs and of all, since two inputs may overlap.
    """
    ranges.sort()
    pool = -1
    furthest_end = furthest_output_end = 0
    furthest = furthest_output = ""
    for pool_index, begin, end, word, name in ranges:
        if pool_index != pool:
            pool, furthest_end, furthest_output_end = pool_index, 0, 0
        if word == "output" and begin < furthest_end:
            return f"output {name!r}: its bytes {begin} to {end} of pool {pool} overlap those of {furthest}; {_WAY_OUT}"
        if begin < furthest_output_end:
            return f"{furthest_output}: its bytes in pool {pool} overlap those of {word} {name!r}, {begin} to {end}; {_WAY_OUT}"
        if end > furthest_end:
            furthest_end, furthest = end, f"{word} {name!r}"
        if word == "output" and end > furthest_output_end:
            furthest_output_end, furthest_output = end, f"output {name!r}"
    return None
