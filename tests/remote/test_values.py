"""Values as bytes and back: every value that fits comes back equal, and no bytes of a hostile peer do more than fail."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aionn.errors import CallerError
from aionn.hal import Operand, OperandType, ValueKind, ValueType
from aionn.hal.values import Border, as_messages, from_messages
from aionn.remote import values
from aionn.remote.values import Encoded, decoded

FLOATS, TEXTS = Operand(OperandType.FLOAT32, None), Operand(OperandType.STRING, None)
ROWS = ValueType(ValueKind.SEQUENCE, ValueType(ValueKind.MAP, FLOATS, OperandType.STRING))
NUMBERS = tuple(kind for kind in OperandType if kind.in_numpy and kind.dtype.kind in "fiub")
KEYS = (OperandType.INT64, OperandType.STRING, OperandType.UINT8)

leaves = st.sampled_from([*NUMBERS, OperandType.STRING, OperandType.COMPLEX64, OperandType.BFLOAT16])
types = st.recursive(
    leaves.map(lambda kind: Operand(kind, None)),
    lambda inner: st.one_of(
        inner.map(lambda element: ValueType(ValueKind.SEQUENCE, element)),
        inner.map(lambda element: ValueType(ValueKind.OPTIONAL, element)),
        st.tuples(inner, st.sampled_from(KEYS)).map(lambda both: ValueType(ValueKind.MAP, *both)),
    ),
    max_leaves=4,
)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


def scalars(kind: OperandType) -> st.SearchStrategy[Any]:
    if kind is OperandType.STRING:
        return text
    return arrays.from_dtype(kind.dtype).map(lambda number: number.item())


def tensors(kind: OperandType) -> st.SearchStrategy[Any]:
    shape = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    if kind is OperandType.STRING:
        return arrays.arrays(object, shape, elements=text)
    if kind.in_numpy:
        return arrays.arrays(kind.dtype, shape)
    return arrays.arrays(np.float32, shape, elements=st.integers(-8, 8)).map(lambda array: array.astype(kind.dtype))


def values_of(operand: Operand) -> st.SearchStrategy[Any]:
    if not isinstance(operand, ValueType):
        return tensors(operand.type)
    inner = values_of(operand.element)
    if operand.kind is ValueKind.SEQUENCE:
        return st.lists(inner, max_size=3)
    if operand.kind is ValueKind.OPTIONAL:
        return st.none() | inner
    assert operand.key is not None
    if not isinstance(operand.element, ValueType) and operand.type in (*NUMBERS, OperandType.STRING):
        inner = scalars(operand.type) | inner.filter(lambda array: array.ndim > 0)
    elif not isinstance(operand.element, ValueType):
        inner = inner.filter(lambda array: array.ndim > 0)
    return st.dictionaries(scalars(operand.key), inner, max_size=3)


def there_and_back(operands: dict[str, Operand], given: dict[str, Any], *, owned: bool = True) -> dict[str, Any]:
    encoded = Encoded(operands, given, "input")
    data = bytearray(encoded.size_bytes)
    encoded.write(memoryview(data))
    return decoded(operands, encoded.tree, memoryview(data), "input", owned=owned)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        if one.dtype == object:
            return bool(one.shape == other.shape and one.tolist() == other.tolist())
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return bool(type(one) is type(other) and one == other)


@hypothesis.given(types.flatmap(lambda kind: st.tuples(st.just(kind), values_of(kind))), st.booleans())
def test_every_value_that_fits_its_type_comes_back_equal(both: tuple[Operand, Any], owned: bool) -> None:
    kind, value = both
    message = msgspec.msgpack.encode(as_messages({"x": kind, "y": FLOATS}))
    operands = from_messages(msgspec.msgpack.decode(message, type=tuple[tuple[str, Border], ...]))
    assert operands == {"x": kind, "y": FLOATS}
    numbers = np.arange(3, dtype=np.float32)
    found = there_and_back(operands, {"y": numbers, "x": value}, owned=owned)
    assert list(found) == ["x", "y"]
    assert same(value, found["x"])
    assert same(numbers, found["y"])
    assert found["y"].flags.writeable is owned


@pytest.mark.parametrize(
    ("operand", "value", "words"),
    [
        (ROWS, {"a": 1.0}, "input 'x': expected a list, for sequence(map(string, float32)), got dict"),
        (ROWS, [{}, [1.0]], "input 'x'[1]: expected a dict, for map(string, float32), got list"),
        (ROWS, [{}, {}, {"a": "b"}], "input 'x'[2]['a']: expected a value of type float32, got str"),
        (ROWS, [{1: 1.0}], "input 'x'[0]: key 1: expected a value of type string, got int"),
        (ROWS, [{"a": 10**400}], "input 'x'[0]['a']: an integer of 1329 bits does not fit float32"),
        (ROWS, [{"\ud800": 1.0}], "input 'x'[0]: key '\\ud800': the text is not Unicode"),
        (ValueType(ValueKind.MAP, TEXTS, OperandType.INT64), {1: "\ud800"}, "input 'x'[1]: the text is not Unicode"),
        (ROWS, [{"a": None}], "input 'x'[0]['a']: expected a value of type float32, got NoneType"),
        (FLOATS, [1.0], "input 'x': expected a NumPy array of float32, got list"),
        (FLOATS, np.zeros(1), "input 'x': expected a NumPy array of float32, got one of dtype float64"),
        (Operand(OperandType.FLOAT32, (2,)), np.zeros(3, np.float32), "input 'x': shape (3,) does not fit the model's (2,)"),
        (FLOATS, np.ma.masked_array(np.zeros(1, np.float32)), "a model knows no mask"),
        (TEXTS, np.array(["a", b"b"], object), "input 'x': expected str as every element, got bytes at 1"),
        (TEXTS, np.array([b"b"]), "input 'x': expected a NumPy array of string, got one of dtype |S1"),
        (TEXTS, np.array(["\ud800"], object), "the text at 0 is not Unicode"),
        (TEXTS, "a", "expected a NumPy array of string, got str"),
        (ValueType(ValueKind.OPTIONAL, TEXTS), 1, "input 'x': expected a NumPy array of string, got int"),
        (ValueType(ValueKind.MAP, FLOATS, OperandType.UINT8), {256: 1.0}, "256 does not fit uint8"),
        (ValueType(ValueKind.MAP, FLOATS, OperandType.INT64), {True: 1.0}, "expected a value of type int64, got bool"),
        (ValueType(ValueKind.SEQUENCE, ValueType(ValueKind.SEQUENCE, FLOATS)), [[], [1]], "input 'x'[1][0]: expected a NumPy array"),
    ],
)
def test_a_value_that_does_not_fit_is_named_by_its_path(operand: Operand, value: Any, words: str) -> None:
    with pytest.raises(CallerError) as refused:
        Encoded({"x": operand}, {"x": value}, "input")
    assert words in str(refused.value)


def test_missing_and_unknown_names_are_one_sentence() -> None:
    with pytest.raises(CallerError, match=r"inputs without \['y'\] and with \['z'\], which the model does not have; .* are \['x', 'y'\]"):
        Encoded({"x": FLOATS, "y": FLOATS}, {"x": np.zeros(1, np.float32), "z": 1}, "input")


def test_what_numpy_makes_of_a_list_of_texts_is_taken_as_strings() -> None:
    found = there_and_back({"x": TEXTS}, {"x": np.array([["a", "é"], ["", "語"]])})["x"]
    assert found.dtype == object
    assert found.tolist() == [["a", "é"], ["", "語"]]


FLOAT = Operand(OperandType.FLOAT32, (0,))
MANY = ValueType(ValueKind.SEQUENCE, FLOAT)


@pytest.mark.parametrize(
    ("operand", "node"),
    [
        (FLOAT, [[2], 0]),  # 8 bytes of 4
        (FLOAT, [[1], 4]),
        (FLOAT, [[1], -4]),
        (FLOAT, [[-1], 0]),
        (FLOAT, [[True], 0]),
        (FLOAT, [[2**63, 0], 0]),
        (FLOAT, [[2**40, 2**40, 0], 0]),
        (FLOAT, [[1] * 65, 0]),
        (FLOAT, [[1], 1]),
        (FLOAT, [[1]]),
        (FLOAT, [[1], 0, 0]),
        (FLOAT, "text"),
        (FLOAT, None),
        (MANY, [[[1], 0], [[1], 0]]),  # the same bytes twice
        (MANY, {}),
        (TEXTS, [[1], 0, 5]),
        (TEXTS, [[1], 0, 3]),
        (TEXTS, [[2**30], 0, 4]),
        (TEXTS, [[0], 0, 4]),
        (ROWS, [[["a"], []]]),
        (ROWS, [[["a"]]]),
        (ROWS, [[[["a"]], [1.0]]]),
        (ROWS, [[["a"], [[[1, 2], 0]]]]),
        (ValueType(ValueKind.OPTIONAL, FLOAT), []),
        (ValueType(ValueKind.OPTIONAL, FLOAT), [None]),
        (ValueType(ValueKind.MAP, FLOAT, OperandType.INT64), [[2**63], [1.0]]),
    ],
)
def test_a_tree_that_does_not_fit_fails_and_touches_nothing_outside_its_data(operand: Operand, node: Any) -> None:
    with pytest.raises(CallerError, match="came in a form that does not fit"):
        decoded({"x": operand}, msgspec.msgpack.encode([node]), memoryview(b"\xff\xff\xff\xff"), "input", owned=True)


@pytest.mark.parametrize("tree", [b"", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000 + b"\x90", b"\xc1", b"\x91\xff\x00", b"\x90"])
def test_bytes_that_are_no_tree_fail(tree: bytes) -> None:
    with pytest.raises(CallerError):
        decoded({"x": ROWS}, tree, memoryview(b""), "input", owned=True)


@hypothesis.given(types, st.binary(max_size=64), st.binary(max_size=64))
def test_random_bytes_are_a_value_or_one_error(kind: Operand, tree: bytes, data: bytes) -> None:
    with contextlib.suppress(CallerError):
        decoded({"x": kind}, b"\x91" + tree, memoryview(data), "input", owned=True)


def test_more_tensors_than_a_message_may_have_are_refused_on_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"x": [np.zeros(1, np.float32)] * 3}
    encoded = Encoded({"x": MANY}, given, "input")
    data = memoryview(bytearray(encoded.size_bytes))
    monkeypatch.setattr(values, "MAX_TENSORS", 2)
    with pytest.raises(CallerError, match="3 tensors"):
        Encoded({"x": MANY}, given, "input")
    with pytest.raises(CallerError, match="more than 2 tensors"):
        decoded({"x": MANY}, encoded.tree, data, "input", owned=True)
    monkeypatch.setattr(values, "MAX_TREE_BYTES", 2)
    with pytest.raises(CallerError, match="at most 2 are allowed"):
        decoded({"x": MANY}, encoded.tree, data, "input", owned=True)
