"""What the outputs of a detection model mean: rows of class, score and corners, for each `model_type` of Frigate.

    ssd, yolonas    the model has decided already, and its detections are taken as they come
    the others      each candidate above `LEAST_SCORE` counts, unless it overlaps a better one by more than `MOST_OVERLAP`

Overlap is the area that two boxes share, divided by the area that they cover together. It counts across classes, as in Frigate.
Frigate itself hands corners to a function of OpenCV that takes width and height. So it drops neighbours that hardly overlap. This
module computes the overlap of the real boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aionn.adapters.frigate.messages import RefusedRequestError

MOST_ROWS = 20
LEAST_SCORE = 0.4
MOST_OVERLAP = 0.4
_BLOCK = 32
"""So many boxes are compared with each other at once. A NumPy call for each box takes longer, and more boxes are seldom needed."""

SIZES = "orig_target_sizes"
"""The second input of a D-FINE model: height and width of the picture, int64 of shape (1, 2)."""

_STRIDES = (8, 16, 32)
_ANCHORS = {
    8: ((12, 16), (19, 36), (40, 28)),
    16: ((36, 75), (76, 55), (72, 146)),
    32: ((142, 110), (192, 243), (459, 401)),
}
"""Width and height in pixels, by the stride of the output's cells."""

Array = NDArray[Any]


class Detections(NamedTuple):
    """Detections of one picture.

    Attributes:
        classes, scores: of shape (n,).
        corners: (n, 4): xmin, ymin, xmax, ymax, scaled to 0..1.
        final: the model has removed what overlaps. Else `rows_of` does.
    """

    classes: Array
    scores: Array
    corners: Array
    final: bool = False


def rows_of(model_type: str, outputs: Mapping[str, Array], width: int, height: int) -> NDArray[np.float32]:
    """Return the detections as Frigate takes them: float32 (20, 6), best first, with zeros below.

    A row is class, score, ymin, xmin, ymax, xmax, scaled to 0..1. A detection with a number that is not finite is left out.

    Args:
        outputs: of the model, in its order.
        width, height: of the model's input, in pixels.

    Raises:
        RefusedRequestError: the model's outputs have other shapes than this type has.
    """
    with np.errstate(all="ignore"):  # a model may answer any numbers
        try:
            found = DECODERS[model_type](outputs, width, height)
        except RefusedRequestError as error:
            raise RefusedRequestError(f"a client asked with model_type={model_type!r}, which does not fit its model: {error}") from None
        rows = np.column_stack((found.classes, found.scores, found.corners[:, [1, 0, 3, 2]])).astype(np.float32)
        rows = rows[np.isfinite(rows).all(axis=1)]
        rows = rows[np.argsort(-rows[:, 1], kind="stable")]
        if not found.final:
            rows = rows[_without_overlaps(rows[:, 2:])]
    answer = np.zeros((MOST_ROWS, 6), np.float32)
    answer[: len(rows)] = rows[:MOST_ROWS]
    return answer


def _without_overlaps(boxes: Array) -> Array:
    """Return which boxes stay, best first, as far as the first `MOST_ROWS`. The boxes come best first."""
    low, high = np.ascontiguousarray(boxes.T).reshape(2, 2, -1)
    areas = np.multiply(*(high - low).clip(0))

    def apart(some: Array, rest: Array) -> Any:
        sides = np.minimum(high[:, some][..., None], high[:, rest][:, None]) - np.maximum(low[:, some][..., None], low[:, rest][:, None])
        shared = np.multiply(*sides.clip(0))
        # No division, because two boxes without an area cover nothing together.
        return shared <= MOST_OVERLAP * (areas[some, None] + areas[rest] - shared)

    kept = best = np.arange(0)
    left = np.arange(len(boxes))
    while left.size and len(kept) < MOST_ROWS:
        left = left[apart(best, left).all(axis=0)]
        block, left = left[:_BLOCK], left[_BLOCK:]
        stays = np.ones(len(block), bool)
        for place, others in enumerate(apart(block, block) | np.tri(len(block), dtype=bool)):  # a box takes no better one out
            if stays[place]:
                stays &= others
        best = block[stays]
        kept = np.append(kept, best)
    return kept


def _yologeneric(outputs: Mapping[str, Array], width: int, height: int) -> Detections:
    arrays = list(outputs.values())
    if len(arrays) == 3:
        return _yolo_of_cells(arrays, width, height)
    expected = "one output (1, 4 + classes, n) or its transpose, or three outputs (1, 255, ny, nx)"
    _check(len(arrays) == 1 and arrays[0].ndim == 3 and arrays[0].shape[0] == 1 and min(arrays[0].shape) > 0, outputs, expected)
    values = arrays[0][0] if arrays[0].shape[1] <= arrays[0].shape[2] else arrays[0][0].T
    _check(len(values) > 4, outputs, expected)
    best = values[4:].max(axis=0)
    chosen = np.flatnonzero(best > LEAST_SCORE)
    x, y, w, h, *_ = values = values[:, chosen].astype(np.float32, copy=False)
    return _centred(values[4:].T, best[chosen], (x, y, w, h), width, height)


def _yolo_of_cells(arrays: list[Array], width: int, height: int) -> Detections:
    """Decode three outputs of values between 0 and 1, each with three anchors for each cell."""
    parts = []
    for array in arrays:
        stride = height // array.shape[2] if array.ndim == 4 and array.shape[2] else 0
        fits = stride in _ANCHORS and array.shape[::3] == (1, width // stride) and array.shape[1] % 3 == 0 and array.shape[1] > 15
        _check(fits, dict(enumerate(arrays)), "three outputs (1, 3 x (5 + classes), ny, nx) with cells of 8, 16 and 32 pixels")
        cells = array.reshape(3, array.shape[1] // 3, *array.shape[2:])
        anchor, row, column = np.nonzero(cells[:, 4] > LEAST_SCORE)  # no class makes the score higher than this
        values = cells[anchor, :, row, column].astype(np.float32)
        centres = (2 * values[:, :2] - 0.5 + np.column_stack((column, row))) * stride
        sizes = (2 * values[:, 2:4]) ** 2 * np.array(_ANCHORS[stride], np.float32)[anchor]
        parts.append(np.hstack((centres, sizes, values[:, 4:5] * values[:, 5:])))
    values = np.vstack(parts)
    values = values[values[:, 4:].max(axis=1) > LEAST_SCORE]
    x, y, w, h = values[:, :4].T
    found = _centred(values[:, 4:], values[:, 4:].max(axis=1), (x, y, w, h), width, height)
    return Detections(found.classes, found.scores, found.corners.clip(0, 1))


def _yolox(outputs: Mapping[str, Array], width: int, height: int) -> Detections:
    grids = [(height // stride, width // stride, stride) for stride in _STRIDES]
    (array,) = outputs.values() if len(outputs) == 1 else (np.empty(0),)
    fits = array.ndim == 3 and array.shape[:2] == (1, sum(ny * nx for ny, nx, _ in grids)) and array.shape[2] > 5
    _check(fits, outputs, "one output (1, n, 5 + classes) with a row for each cell of 8, 16 and 32 pixels")
    values = array[0]
    chosen = np.flatnonzero(values[:, 4] * values[:, 5:].max(axis=1) > LEAST_SCORE)
    values = values[chosen].astype(np.float32)
    cells = np.vstack([np.column_stack((np.tile(np.arange(nx), ny), np.repeat(np.arange(ny), nx))) for ny, nx, _ in grids])[chosen]
    strides = np.concatenate([np.full(ny * nx, stride, np.float32) for ny, nx, stride in grids])[chosen, None]
    scores = values[:, 4:5] * values[:, 5:]
    x, y, w, h = np.hstack(((values[:, :2] + cells) * strides, np.exp(values[:, 2:4]) * strides)).T
    return _centred(scores, scores.max(axis=1), (x, y, w, h), width, height)


def _dfine(outputs: Mapping[str, Array], width: int, height: int) -> Detections:
    names = ("labels", "boxes", "scores")
    ordered = [outputs[name] for name in names] if outputs.keys() >= set(names) else list(outputs.values())
    fits = len(ordered) == 3 and ordered[0].ndim == 2 and ordered[0].shape[0] == 1
    fits = fits and ordered[2].shape == ordered[0].shape and ordered[1].shape == (*ordered[0].shape, 4)
    _check(fits, outputs, "labels (1, n), boxes (1, n, 4) and scores (1, n)")
    labels, boxes, scores = (array[0] for array in ordered)
    chosen = scores > LEAST_SCORE
    return Detections(labels[chosen], scores[chosen], boxes[chosen] / np.array([width, height, width, height], np.float32))


def _rfdetr(outputs: Mapping[str, Array], width: int, height: int) -> Detections:
    ordered = list(outputs.values())
    fits = len(ordered) == 2 and ordered[0].ndim == ordered[1].ndim == 3 and ordered[0].shape[::2] == (1, 4)
    fits = fits and ordered[1].shape[:2] == ordered[0].shape[:2] and ordered[1].shape[2] > 1
    _check(fits, outputs, "boxes (1, n, 4) and logits (1, n, 1 + classes)")
    boxes, logits = (array[0].astype(np.float32) for array in ordered)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = shares[:, 1:] / shares.sum(axis=1, keepdims=True)  # the first column is the background
    best = scores.max(axis=1)
    chosen = best > LEAST_SCORE
    x, y, w, h = boxes[chosen].T
    return _centred(scores[chosen], best[chosen], (x, y, w, h), 1, 1)


def _yolonas(outputs: Mapping[str, Array], width: int, height: int) -> Detections:
    (array,) = outputs.values() if len(outputs) == 1 else (np.empty(0),)
    _check(array.ndim == 2 and array.shape[1] == 7, outputs, "one output (n, 7)")
    ends = np.flatnonzero(array[:, 6] < 0)
    array = array[: ends[0]] if ends.size else array
    return Detections(array[:, 6], array[:, 5], array[:, 1:5] / np.array([width, height, width, height], np.float32), final=True)


def _ssd(outputs: Mapping[str, Array], width: int, height: int) -> Detections:
    (array,) = outputs.values() if len(outputs) == 1 else (np.empty(0),)
    _check(array.ndim == 4 and array.shape[:2] == (1, 1) and array.shape[3] == 7, outputs, "one output (1, 1, n, 7)")
    array = array[0, 0]
    return Detections(array[:, 1], array[:, 2], array[:, 3:], final=True)


DECODERS: Mapping[str, Callable[[Mapping[str, Array], int, int], Detections]] = {
    "ssd": _ssd,
    "yolonas": _yolonas,
    "yologeneric": _yologeneric,
    "yolox": _yolox,
    "rfdetr": _rfdetr,
    "dfine": _dfine,
}
"""By Frigate's `model_type`."""


def _centred(scores: Array, best: Array, box: tuple[Array, Array, Array, Array], width: int, height: int) -> Detections:
    """Return detections by their centre and size in pixels. `scores`: (n, classes). `best`: the highest of each row."""
    x, y, w, h = box
    corners = np.column_stack(((x - w / 2) / width, (y - h / 2) / height, (x + w / 2) / width, (y + h / 2) / height))
    return Detections(scores.argmax(axis=1), best, corners)


def _check(fits: bool, outputs: Mapping[Any, Array], expected: str) -> None:
    if not fits:
        shapes = ", ".join(str(array.shape) for array in outputs.values())
        raise RefusedRequestError(f"the outputs have the shapes {shapes}; this type expects {expected}")
