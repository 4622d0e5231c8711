"""What outputs of detection models mean, beside a second decoding that is written with plain loops."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aionn.adapters.frigate.decoding import DECODERS, MOST_OVERLAP, rows_of
from aionn.adapters.frigate.messages import RefusedRequestError
from tests.adapters.frigate.detector_models import KINDS, Kind


def label(kind: Kind) -> str:
    return f"{kind.model_type}-{'-'.join(kind.outputs)}"


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_rows_are_those_of_plain_loops(kind: Kind) -> None:
    session = onnxruntime.InferenceSession(kind.model(), providers=["CPUExecutionProvider"])
    height, width = kind.size
    seen = set()
    for seed in range(40):
        outputs = dict(zip(kind.outputs, session.run(None, kind.inputs(kind.picture(seed))), strict=True))
        rows, wanted = rows_of(kind.model_type, outputs, width, height), kind.rows(list(outputs.values()))
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, wanted, rtol=1e-5, atol=1e-6)
        seen.add(int((rows[:, 1] > 0).sum()))
    assert max(seen) > 3, "the pictures show something"


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_nothing_found_is_zeros(kind: Kind) -> None:
    height, width = kind.size
    outputs = {name: np.zeros(shape, np.float32) for name, (shape, _) in kind.outputs.items()}
    rows = rows_of(kind.model_type, outputs, width, height)
    assert rows.shape == (20, 6)
    assert not rows[:, 1].any()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e38, -1e38])
@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_odd_numbers_are_left_out(kind: Kind, number: float) -> None:
    height, width = kind.size
    outputs = {name: np.full(shape, number, np.float32) for name, (shape, _) in kind.outputs.items()}
    assert np.isfinite(rows_of(kind.model_type, outputs, width, height)).all()


@given(st.data())
@pytest.mark.parametrize("model_type", DECODERS)
def test_outputs_of_another_model_are_refused_or_decoded(model_type: str, data: st.DataObject) -> None:
    shapes = arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=9)
    outputs = {str(number): np.ones(shape, np.float32) for number, shape in enumerate(data.draw(st.lists(shapes, max_size=4)))}
    try:
        assert rows_of(model_type, outputs, 64, 64).shape == (20, 6)
    except RefusedRequestError as error:
        assert "expects" in str(error)


def test_neighbours_that_hardly_overlap_stay() -> None:
    """A decoder that hands corners to a function of widths and heights takes them for boxes that cover each other."""
    boxes = np.array([[[100, 100, 40, 40], [145, 100, 40, 40], [104, 100, 40, 40]]], np.float32)
    outputs = np.concatenate([boxes, np.array([[[0.9], [0.8], [0.7]]], np.float32)], axis=2).transpose(0, 2, 1)
    padded = np.pad(outputs, ((0, 0), (0, 0), (0, 10)))
    rows = rows_of("yologeneric", {"output0": padded}, 320, 320)
    np.testing.assert_allclose(rows[:3, 1], [0.9, 0.8, 0])
    np.testing.assert_allclose(rows[0, 2:] * 320, [80, 80, 120, 120], rtol=1e-6)


@given(seed=st.integers(0, 2**32), many=st.integers(0, 300), places=st.integers(1, 40), scores=st.integers(1, 50))
@example(seed=0, many=300, places=12, scores=3)
def test_the_boxes_that_stay_are_those_of_one_pass_for_each(seed: int, many: int, places: int, scores: int) -> None:
    """Many boxes lie at few places, so that better ones of all parts of the list take them out. Equal scores keep the model's order."""
    random = np.random.default_rng(seed)
    corners = random.random((places, 4), np.float32)[random.integers(0, places, many)] + random.random((many, 4), np.float32) / 20
    levels = (random.integers(0, scores, many) / scores / 2 + 0.45).astype(np.float32)
    order = np.argsort(-levels, kind="stable")
    boxes = np.hstack((np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])))
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    wanted: list[int] = []
    while order.size and len(wanted) < 20:
        best, order = int(order[0]), order[1:]
        wanted.append(best)
        sides = np.minimum(boxes[best, 2:], boxes[order, 2:]) - np.maximum(boxes[best, :2], boxes[order, :2])
        shared = sides[:, 0].clip(0) * sides[:, 1].clip(0)
        order = order[shared <= MOST_OVERLAP * (areas[best] + areas[order] - shared)]
    outputs = {"labels": np.arange(many)[None], "boxes": boxes[None], "scores": levels[None]}
    rows = rows_of("dfine", outputs, 1, 1)
    assert rows[rows[:, 1] > 0, 0].tolist() == wanted


def test_as_many_places_as_values_are_read_as_the_format_has_them() -> None:
    """Of a square output, the first axis is that of a box and its scores."""
    output = np.zeros((1, 84, 84), np.float32)
    output[0, :4, 7], output[0, 4 + 2, 7] = (100, 100, 40, 40), 0.9
    rows = rows_of("yologeneric", {"output0": output}, 320, 320)
    np.testing.assert_allclose(rows[0, :2], [2, 0.9], rtol=1e-6)
    assert not rows[1:].any()


def test_at_most_twenty_rows_best_first() -> None:
    places = np.arange(40, dtype=np.float32)
    output = np.zeros((1, 1, 40, 7), np.float32)
    output[0, 0, :, 2], output[0, 0, :, 1] = (places + 1) / 40, places
    rows = rows_of("ssd", {"out": output}, 300, 300)
    assert rows[:, 0].tolist() == list(range(39, 19, -1))


def test_a_negative_class_ends_the_list_of_yolonas() -> None:
    output = np.zeros((3, 7), np.float32)
    output[:, 5], output[:, 6] = (0.5, 0.9, 0.8), (1, -1, 2)
    assert rows_of("yolonas", {"flat": output}, 64, 64)[:2, 1].tolist() == [0.5, 0]
