"""`check_request` against the rules, row by row, and against an oracle that counts single bytes."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aionn.hal import DataLocation, Operand, OperandType, Request, RequestArgument
from aionn.memory.requests import check_request, input_shape, output_shape

TYPES = [OperandType.FLOAT32, OperandType.FLOAT16, OperandType.UINT8, OperandType.INT8]
SHAPE = (1, 32, 32, 8)
OMITTED = RequestArgument(DataLocation(0, 0, 0), (), has_no_value=True)

every_type = pytest.mark.parametrize("operand_type", TYPES, ids=lambda t: t.value)


def at(offset: int, length: int, dimensions: tuple[int, ...] = (), pool: int = 0) -> RequestArgument:
    return RequestArgument(DataLocation(pool, offset, length), dimensions)


def verdict(
    operand: Operand,
    *,
    source: RequestArgument | None = None,
    target: RequestArgument | None = None,
    pools: tuple[int, ...],
    fenced: bool = False,
) -> str | None:
    """What is said about one input or one output of a model."""
    return check_request(
        [("x", operand)] if source else [],
        [("y", operand)] if target else [],
        Request((source,) if source else (), (target,) if target else ()),
        pools,
        open_outputs=not fenced,
    )


@every_type
def test_a_request_that_fits_is_accepted(operand_type: OperandType) -> None:
    operand = Operand(operand_type, SHAPE)
    size = prod(SHAPE) * operand_type.element_bytes
    request = Request((at(0, size), at(0, size, SHAPE)), (at(size, size), at(2 * size, size + 5, (1, 0, 32, 0))))
    assert check_request([("a", operand), ("b", operand)], [("c", operand), ("d", operand)], request, [3 * size + 5]) is None


@every_type
def test_validate_request_remove_input_and_remove_output(operand_type: OperandType) -> None:
    operand = Operand(operand_type, (4,))
    argument = at(0, 4 * operand_type.element_bytes)
    for inputs, outputs in ((1, 0), (0, 1), (3, 1), (2, 2)):
        request = Request((argument,) * inputs, (argument,) * outputs)
        assert check_request([("a", operand), ("b", operand)], [("c", operand)], request, [64]) is not None


@every_type
@pytest.mark.parametrize("difference", [-1, 1])
def test_an_input_is_exactly_as_long_as_its_shape(operand_type: OperandType, difference: int) -> None:
    operand = Operand(operand_type, SHAPE)
    size = operand.size_bytes
    assert size is not None
    assert verdict(operand, source=at(0, size), pools=(2 * size,)) is None
    wrong = verdict(operand, source=at(0, size + difference), pools=(2 * size,))
    assert wrong == f"input 'x': {size + difference} bytes, its shape {SHAPE} of {operand_type.value} has {size}"


@every_type
def test_an_output_may_be_longer_than_its_shape_but_not_shorter(operand_type: OperandType) -> None:
    operand = Operand(operand_type, SHAPE)
    size = operand.size_bytes
    assert size is not None
    assert verdict(operand, target=at(0, size + 7), pools=(2 * size,)) is None
    assert verdict(operand, target=at(0, size - 1), pools=(2 * size,)) is not None


def test_sums_near_two_to_the_64_do_not_wrap() -> None:
    operand = Operand(OperandType.UINT8, (16,))
    for offset in (2**32 - 8, 2**64 - 16, 2**64 - 8, 2**64 - 1, 2**63):
        assert "of pool 0, which has 64 bytes" in str(verdict(operand, source=at(offset, 16), pools=(64,)))
        assert "of pool 0, which has 64 bytes" in str(verdict(operand, target=at(offset, 16), pools=(64,)))
    assert verdict(operand, target=at(1, 2**64 - 1), pools=(64,)) is not None
    assert verdict(operand, target=at(-1, 16), pools=(64,)) is not None
    assert verdict(operand, target=at(64, -16), pools=(64,)) is not None


@pytest.mark.parametrize("dimensions", [(0, 3), (2, 0), (0, 0)])
def test_an_input_with_an_empty_axis_has_no_bytes(dimensions: tuple[int, ...]) -> None:
    operand = Operand(OperandType.FLOAT32, (0, 0))
    for offset in (0, 3, 64):
        argument = at(offset, 0, dimensions)
        assert verdict(operand, source=argument, pools=(64,)) is None
        assert input_shape(operand, argument) == dimensions
    wrong = verdict(operand, source=at(0, 4, dimensions), pools=(64,))
    assert wrong == f"input 'x': 4 bytes, its shape {dimensions} of float32 has 0"
    assert "of pool 0, which has 64 bytes" in str(verdict(operand, source=at(65, 0, dimensions), pools=(64,)))
    assert "memory in the driver holds at least one element" in str(verdict(operand, source=at(0, 0, dimensions), pools=(0,)))
    assert "do not fit" in str(verdict(Operand(OperandType.FLOAT32, (4, 5)), source=at(0, 0, dimensions), pools=(64,)))
    target = at(0, 64, dimensions)
    assert verdict(operand, target=target, pools=(64,)) is None
    assert output_shape(operand, target) is None


@pytest.mark.parametrize("pool", [1, 2**32 - 1, -1])
def test_a_pool_that_is_not_there_is_refused(pool: int) -> None:
    operand = Operand(OperandType.UINT8, (16,))
    assert verdict(operand, source=at(0, 16, pool=pool), pools=(64,)) == f"input 'x': pool {pool} of 1; there is no such pool"


@pytest.mark.parametrize("place", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_an_omitted_argument_has_no_place_and_no_shape(place: tuple[int, int, int]) -> None:
    operand = Operand(OperandType.FLOAT32, (4,))
    assert verdict(operand, source=OMITTED, pools=()) is None
    assert verdict(operand, target=OMITTED, pools=()) is None
    for wrong in (
        RequestArgument(DataLocation(*place), (), has_no_value=True),
        RequestArgument(DataLocation(0, 0, 0), (4,), has_no_value=True),
    ):
        assert verdict(operand, source=wrong, pools=(64, 64)) is not None
        assert verdict(operand, target=wrong, pools=(64, 64)) is not None


def test_an_omitted_output_in_pool_0_does_not_count_as_a_use_of_it() -> None:
    operand = Operand(OperandType.FLOAT32, (4,))
    assert check_request([("x", operand)], [("y", operand)], Request((at(0, 0),), (OMITTED,)), [0]) is None


@pytest.mark.parametrize("place", [(1, 0), (0, 4), (0, 16), (1, 4)])
def test_set_input_and_output_from_memory_of_the_device_allow_no_offset_and_no_length(place: tuple[int, int]) -> None:
    operand = Operand(OperandType.FLOAT32, (4,))
    assert verdict(operand, source=at(0, 0), pools=(0,)) is None
    assert verdict(operand, target=at(0, 0), pools=(0,)) is None
    assert "used as a whole" in str(verdict(operand, source=at(*place), pools=(0,)))
    assert "used as a whole" in str(verdict(operand, target=at(*place), pools=(0,)))


def test_the_length_of_ordinary_memory_is_never_implied() -> None:
    for dimensions in ((4,), (0,), None):
        operand = Operand(OperandType.FLOAT32, dimensions)
        assert verdict(operand, source=at(0, 0, (4,)), pools=(64,)) is not None
        assert verdict(operand, target=at(0, 0), pools=(64,)) is not None


def test_dimensions_may_only_choose_what_the_model_leaves_open() -> None:
    operand = Operand(OperandType.UINT8, (0, 3))
    assert verdict(operand, source=at(0, 6, (2, 3)), pools=(64,)) is None
    assert verdict(operand, target=at(0, 6, (2, 3)), pools=(64,)) is None
    assert verdict(operand, target=at(0, 6, (0, 0)), pools=(64,)) is None
    for wrong in ((2, 4), (2,), (2, 3, 1), (-2, 3), (2, -3)):
        assert verdict(operand, source=at(0, 6, wrong), pools=(64,)) is not None
        assert verdict(operand, target=at(0, 6, wrong), pools=(64,)) is not None


def test_the_shape_of_an_input_is_known_in_every_request() -> None:
    open_operand, any_rank = Operand(OperandType.UINT8, (0, 3)), Operand(OperandType.UINT8, None)
    assert verdict(open_operand, source=at(0, 6), pools=(64,)) is not None
    assert verdict(open_operand, source=at(0, 6, (0, 3)), pools=(64,)) is not None
    assert verdict(any_rank, source=at(0, 6, (0, 3)), pools=(64,)) is not None
    assert verdict(any_rank, source=at(0, 6, (2, 3)), pools=(64,)) is None
    assert verdict(any_rank, source=at(0, 1), pools=(64,)) is None  # a scalar
    assert verdict(any_rank, source=at(0, 6), pools=(64,)) is not None
    assert verdict(open_operand, source=at(0, 0), pools=(0,)) is None  # the buffer knows


def test_a_fenced_execution_needs_the_full_shape_of_its_outputs() -> None:
    operand = Operand(OperandType.UINT8, (0, 3))
    for dimensions in ((), (0, 3)):
        assert verdict(operand, target=at(0, 64, dimensions), pools=(64,)) is None
        assert "fenced" in str(verdict(operand, target=at(0, 64, dimensions), pools=(64,), fenced=True))
    assert verdict(operand, target=at(0, 64, (2, 3)), pools=(64,), fenced=True) is None
    assert verdict(Operand(OperandType.UINT8, None), target=at(0, 64), pools=(64,), fenced=True) is not None


def assert_overlap(said: str | None) -> None:
    assert said is not None
    assert "overlap" in said
    assert said.endswith("; give the output other memory")


def test_outputs_overlap_nothing_and_inputs_may_share() -> None:
    operand = Operand(OperandType.UINT8, (8,))

    def asked(inputs: list[RequestArgument], outputs: list[RequestArgument]) -> str | None:
        named = [[(f"{word}{i}", operand) for i in range(len(list_))] for word, list_ in (("i", inputs), ("o", outputs))]
        return check_request(named[0], named[1], Request(tuple(inputs), tuple(outputs)), [32, 32])

    assert asked([at(0, 8), at(0, 8), at(4, 8)], [at(12, 8)]) is None
    assert asked([at(0, 8)], [at(0, 8, pool=1)]) is None
    assert asked([at(0, 8)], [at(8, 8), at(16, 8)]) is None
    assert_overlap(asked([at(0, 8)], [at(7, 8)]))
    assert_overlap(asked([at(7, 8)], [at(0, 8)]))
    assert_overlap(asked([], [at(0, 8), at(7, 8)]))
    assert_overlap(asked([at(16, 8)], [at(0, 32)]))
    # The long input, not its neighbour, is what the output runs into.
    wide = Operand(OperandType.UINT8, (32,))
    request = Request((at(0, 32), at(0, 8)), (at(20, 8),))
    assert "input 'long'" in str(check_request([("long", wide), ("i", operand)], [("o", operand)], request, [32]))


def test_the_shape_of_an_argument_is_the_models_completed_by_the_request() -> None:
    operand = Operand(OperandType.UINT8, (0, 3))
    assert input_shape(operand, at(0, 6, (2, 3))) == (2, 3)
    assert input_shape(Operand(OperandType.UINT8, ()), at(0, 1)) == ()
    assert input_shape(Operand(OperandType.UINT8, None), at(0, 1)) == ()
    assert output_shape(operand, at(0, 6, (2, 0))) == (2, 3)
    assert output_shape(operand, at(0, 6, (0, 0))) is None
    assert output_shape(operand, at(0, 6)) is None
    assert output_shape(Operand(OperandType.UINT8, ()), at(0, 6)) == ()
    assert output_shape(Operand(OperandType.UINT8, None), at(0, 6)) is None
    assert output_shape(Operand(OperandType.UINT8, None), at(0, 6, (2, 3))) == (2, 3)


# --- against an oracle that looks at single bytes ----------------------------------------------------------------------

extents = st.integers(-1, 4)
operands = st.builds(Operand, st.sampled_from(TYPES), st.none() | st.lists(st.integers(0, 3), max_size=2).map(tuple))
numbers = st.integers(0, 16) | st.sampled_from([2**32 - 1, 2**64 - 1, 2**63, -1])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Operand], list[Operand], Request, list[int]]:
    """Mostly near misses: an argument of the right length somewhere near the end of its pool."""
    pools = draw(st.lists(st.sampled_from([0, 8, 16, 24]), min_size=1, max_size=2))

    def argument(operand: Operand) -> RequestArgument:
        if draw(st.integers(0, 9)) == 0:
            return draw(
                st.builds(
                    RequestArgument,
                    st.builds(DataLocation, st.integers(-1, 3), numbers, numbers),
                    st.lists(extents, max_size=3).map(tuple),
                    st.booleans(),
                )
            )
        own = operand.dimensions if operand.dimensions is not None else draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
        dimensions = tuple(extent or draw(st.integers(1, 3)) for extent in own)
        pool = draw(st.integers(0, len(pools) - 1))
        length = prod(dimensions) * operand.type.element_bytes if pools[pool] else 0
        offset = draw(st.integers(0, max(0, pools[pool] - length)))
        change = draw(st.integers(-1, 1)) if draw(st.integers(0, 9)) == 0 else 0
        return RequestArgument(DataLocation(pool, offset, length + change), draw(st.sampled_from([dimensions, ()])))

    inputs, outputs = draw(st.lists(operands, max_size=3)), draw(st.lists(operands, max_size=2))
    return inputs, outputs, Request(tuple(map(argument, inputs)), tuple(map(argument, outputs))), pools


def may_run(inputs: list[Operand], outputs: list[Operand], request: Request, pools: list[int]) -> bool:
    """The same question, answered by enumeration: every byte of every argument, and every shape it could have."""
    written: set[tuple[int, int]] = set()
    touched: set[tuple[int, int]] = set()
    for is_input, operand, argument in [
        *((True, o, a) for o, a in zip(inputs, request.inputs, strict=True)),
        *((False, o, a) for o, a in zip(outputs, request.outputs, strict=True)),
    ]:
        place, given = argument.location, argument.dimensions
        if argument.has_no_value:
            if place != DataLocation(0, 0, 0) or given != ():
                return False
            continue
        if place.pool_index not in range(len(pools)) or place.offset < 0 or place.length < 0 or place.length > 1000:
            return False
        own_bytes = [(place.pool_index, byte) for byte in range(place.offset, place.offset + place.length)]
        if place.offset > pools[place.pool_index] or any(byte >= pools[place.pool_index] for _, byte in own_bytes):
            return False
        whole = pools[place.pool_index] == 0
        # Shapes the argument could have, of at most 4 per axis: those that both sides allow.
        ranks = range(4) if operand.dimensions is None else [len(operand.dimensions)]
        shapes = [
            shape
            for rank in ranks
            for shape in itertools.product(range(1, 5), repeat=rank)
            if operand.accepts(shape)
            and (given == () or (len(given) == rank and all(g in (0, s) for g, s in zip(given, shape, strict=True))))
        ]
        if is_input and 0 in given:  # an empty input: it has this very shape, no bytes, and does not lie in memory of the driver
            if whole or place.length or len(given) not in ranks or not operand.accepts(given):
                return False
            continue
        if not shapes:
            return False
        told = operand.dimensions is not None or given != () or is_input
        if is_input and given == () and not whole:
            if operand.dimensions is not None and 0 in operand.dimensions:
                return False
            if operand.dimensions is None:
                shapes = [()]
        if not whole:
            lengths = {prod(shape) * operand.type.element_bytes for shape in shapes}
            if is_input and lengths != {place.length}:
                return False
            if not is_input and (place.length == 0 or (told and len(shapes) == 1 and place.length < min(lengths))):
                return False
        if not is_input:
            if touched & set(own_bytes):
                return False
            written |= set(own_bytes)
        elif written & set(own_bytes):
            return False
        touched |= set(own_bytes)
    return True


@given(cases())
@settings(max_examples=600)
def test_it_never_accepts_an_access_out_of_range_nor_refuses_one_in_range(
    case: tuple[list[Operand], list[Operand], Request, list[int]],
) -> None:
    inputs, outputs, request, pools = case
    said = check_request([(f"i{n}", o) for n, o in enumerate(inputs)], [(f"o{n}", o) for n, o in enumerate(outputs)], request, pools)
    assert (said is None) == may_run(inputs, outputs, request, pools), said
    assert said is None or "\n" not in said
