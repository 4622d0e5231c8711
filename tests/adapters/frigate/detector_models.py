"""One model for each row of the protocol's table, and the decoding of that row, written once more with plain loops.

The outputs of a model are numbers of the picture, taken from places that a seed draws, and scaled into the range that a value needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper

SIDE, CLASSES = 64, 5
CELLS = [(stride, SIDE // stride) for stride in (8, 16, 32)]
N = sum(side * side for _, side in CELLS)
ANCHORS = {8: [(12, 16), (19, 36), (40, 28)], 16: [(36, 75), (76, 55), (72, 146)], 32: [(142, 110), (192, 243), (459, 401)]}

Array = NDArray[Any]
Row = tuple[float, float, float, float, float, float]
"""Class, score, ymin, xmin, ymax, xmax."""


@dataclass(frozen=True)
class Kind:
    """A row of the table.

    Attributes:
        outputs: by name the shape, and the least and the most of each value.
        found: returns the candidates, in the model's order.
        overlaps: whether candidates below the least score and those that overlap a better one are left out.
        sizes: whether the model has the input `orig_target_sizes`. It scales the boxes.
    """

    model_type: str
    outputs: Mapping[str, tuple[tuple[int, ...], ArrayLike]]
    found: Callable[..., Iterator[Row]]
    overlaps: bool = True
    dtype: str = "float32"
    shape: tuple[int, ...] = (1, 3, SIDE, SIDE)
    sizes: bool = False

    def model(self) -> bytes:
        """Return the model as ONNX."""
        random = np.random.default_rng(0)
        nodes = [helper.make_node("Cast", ["picture"], ["numbers"], to=TensorProto.FLOAT)]
        nodes += [helper.make_node("Div", ["numbers", "most"], ["shares"]), helper.make_node("Flatten", ["shares"], ["row"])]
        constants: dict[str, Array] = {"most": np.array(255 if self.dtype == "uint8" else 1, np.float32)}
        for name, (shape, ranges) in self.outputs.items():
            least, most = np.moveaxis(np.broadcast_to(np.array(ranges, np.float32), (*shape, 2)), -1, 0)
            places = random.integers(0, math.prod(self.shape), math.prod(shape))
            own = {"places": places, "span": most - least, "least": least, "shape": np.array(shape)}
            constants |= {f"{name}.{key}": np.ascontiguousarray(value) for key, value in own.items()}
            steps: list[tuple[str, list[str], dict[str, Any]]] = [
                ("Gather", ["row", f"{name}.places"], {"axis": 1}),
                ("Reshape", ["", f"{name}.shape"], {}),
                ("Mul", ["", f"{name}.span"], {}),
                ("Add", ["", f"{name}.least"], {}),
            ]
            if name == "labels":
                steps.append(("Cast", [""], {"to": TensorProto.INT64}))
            if name == "boxes" and self.sizes:
                steps.append(("Mul", ["", "pixels"], {}))
            last = ""
            for number, (operation, inputs, attributes) in enumerate(steps, 1):
                output = name if number == len(steps) else f"{name}.{number}"
                nodes.append(helper.make_node(operation, [each or last for each in inputs], [output], **attributes))
                last = output
        shown = [helper.make_tensor_value_info("picture", TensorProto.UINT8 if self.dtype == "uint8" else TensorProto.FLOAT, self.shape)]
        if self.sizes:
            shown.append(helper.make_tensor_value_info("orig_target_sizes", TensorProto.INT64, (1, 2)))
            constants["order"] = np.array([1, 0, 1, 0])
            nodes[3:3] = [
                helper.make_node("Gather", ["orig_target_sizes", "order"], ["whole"], axis=1),
                helper.make_node("Cast", ["whole"], ["pixels"], to=TensorProto.FLOAT),
            ]
        types = {name: TensorProto.INT64 if name == "labels" else TensorProto.FLOAT for name in self.outputs}
        outputs = [helper.make_tensor_value_info(name, types[name], shape) for name, (shape, _) in self.outputs.items()]
        initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
        graph = helper.make_graph(nodes, "detector", shown, outputs, initializers)
        content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
        return content

    def picture(self, seed: int) -> Array:
        random = np.random.default_rng(seed)
        return random.integers(0, 256, self.shape, np.uint8) if self.dtype == "uint8" else random.random(self.shape, np.float32)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.shape[2:] if self.shape[1] == 3 else self.shape[1:3]  # type: ignore[return-value]

    def inputs(self, picture: Array) -> dict[str, Array]:
        """Return what the model takes."""
        return {"picture": picture, **({"orig_target_sizes": np.array([self.size])} if self.sizes else {})}

    def rows(self, outputs: Sequence[Array]) -> Array:
        """Return the answer that the protocol asks for: (20, 6)."""
        candidates = sorted(self.found(self, *outputs), key=lambda row: -row[1])
        kept: list[Row] = []
        for row in candidates:
            if not self.overlaps or (row[1] > 0.4 and all(_overlap(row, better) <= 0.4 for better in kept)):
                kept.append(row)
        answer = np.zeros((20, 6), np.float32)
        for place, row in zip(answer, kept, strict=False):
            place[:] = row
        return answer


def _overlap(one: Row, other: Row) -> float:
    height = min(one[4], other[4]) - max(one[2], other[2])
    width = min(one[5], other[5]) - max(one[3], other[3])
    if height <= 0 or width <= 0:
        return 0.0
    both = height * width
    return both / (sum((row[4] - row[2]) * (row[5] - row[3]) for row in (one, other)) - both)


def _centred(kind: Kind, scores: Array, x: float, y: float, w: float, h: float, scale: bool = True) -> Row:
    """Return the row of a box in pixels, or of one in 0..1 that needs no scale."""
    height, width = kind.size if scale else (1, 1)
    label = int(np.argmax(scores))
    return label, float(scores[label]), (y - h / 2) / height, (x - w / 2) / width, (y + h / 2) / height, (x + w / 2) / width


def _yolo(kind: Kind, output: Array) -> Iterator[Row]:
    values = output[0] if output.shape[1] < output.shape[2] else output[0].T
    for candidate in values.T:
        x, y, w, h = map(float, candidate[:4])
        yield _centred(kind, candidate[4:], x, y, w, h)


def _yolo_of_cells(kind: Kind, *outputs: Array) -> Iterator[Row]:
    for output, (stride, side) in zip(outputs, CELLS, strict=True):
        values = output.reshape(3, 85, side, side)
        for anchor, row, column in np.ndindex(3, side, side):
            p = values[anchor, :, row, column]
            w, h = ((2 * float(p[2 + axis])) ** 2 * ANCHORS[stride][anchor][axis] for axis in (0, 1))
            x, y = (2 * float(p[0]) - 0.5 + column) * stride, (2 * float(p[1]) - 0.5 + row) * stride
            label, score, *corners = _centred(kind, p[4] * p[5:], x, y, w, h)
            ymin, xmin, ymax, xmax = (min(max(corner, 0.0), 1.0) for corner in corners)
            yield label, score, ymin, xmin, ymax, xmax


def _yolox(kind: Kind, output: Array) -> Iterator[Row]:
    candidates = iter(output[0])
    for stride, side in CELLS:
        for row, column in np.ndindex(side, side):
            p = next(candidates)
            w, h = math.exp(float(p[2])) * stride, math.exp(float(p[3])) * stride
            yield _centred(kind, p[4] * p[5:], (float(p[0]) + column) * stride, (float(p[1]) + row) * stride, w, h)


def _dfine(kind: Kind, labels: Array, boxes: Array, scores: Array) -> Iterator[Row]:
    height, width = kind.size
    for label, (xmin, ymin, xmax, ymax), score in zip(labels[0], boxes[0].tolist(), scores[0], strict=True):
        yield int(label), float(score), ymin / height, xmin / width, ymax / height, xmax / width


def _rfdetr(kind: Kind, boxes: Array, logits: Array) -> Iterator[Row]:
    for (x, y, w, h), values in zip(boxes[0].tolist(), logits[0], strict=True):
        shares = np.exp(values - values.max())
        yield _centred(kind, (shares / shares.sum())[1:], x, y, w, h, scale=False)


def _yolonas(kind: Kind, output: Array) -> Iterator[Row]:
    height, width = kind.size
    for _, xmin, ymin, xmax, ymax, score, label in output.tolist():
        if label < 0:
            return
        yield label, score, ymin / height, xmin / width, ymax / height, xmax / width


def _ssd(kind: Kind, output: Array) -> Iterator[Row]:
    for _, label, score, xmin, ymin, xmax, ymax in output[0, 0].tolist():
        yield label, score, ymin, xmin, ymax, xmax


_SHARE = (0.0, 1.0)
_SCORES = [(0.0, 0.5)] * CLASSES
_PLACE, _SIDE = (-4.0, SIDE + 4.0), (4.0, 24.0)
_LOW, _HIGH = (0.0, SIDE / 2), (SIDE / 2, float(SIDE))
_BOX = [_PLACE, _PLACE, _SIDE, _SIDE]
_COLUMN = [[each] for each in (*_BOX, *_SCORES)]
"""Ranges along the first of two axes."""

KINDS = (
    Kind(
        "ssd",
        {"detections": ((1, 1, 30, 7), [(0, 0), (0, 90), _SHARE, *[(0, 0.5)] * 2, *[(0.5, 1)] * 2])},
        _ssd,
        False,
        "uint8",
        (1, SIDE, 96, 3),
    ),
    Kind("yolonas", {"flat": ((30, 7), [(0, 0), _LOW, _LOW, _HIGH, _HIGH, _SHARE, (-0.2, 20)])}, _yolonas, False, "uint8"),
    Kind("yologeneric", {"output0": ((1, 4 + CLASSES, N), _COLUMN)}, _yolo),
    Kind("yologeneric", {"output0": ((1, N, 4 + CLASSES), [*_BOX, *_SCORES])}, _yolo, shape=(1, 3, SIDE, 96)),
    Kind(
        "yologeneric",
        {
            f"p{stride}": ((1, 255, side, side), np.array([*[_SHARE] * 4, *[(0, 0.62)], *[_SHARE] * 80] * 3)[:, None, None])
            for stride, side in CELLS
        },
        _yolo_of_cells,
    ),
    Kind("yolox", {"output": ((1, N, 5 + CLASSES), [_SHARE, _SHARE, (-1, 2), (-1, 2), (0.3, 1), *[(0.0, 0.7)] * CLASSES])}, _yolox),
    Kind("rfdetr", {"dets": ((1, 40, 4), [_SHARE, _SHARE, (0.05, 0.3), (0.05, 0.3)]), "logits": ((1, 40, 1 + CLASSES), (-3, 3))}, _rfdetr),
    Kind(
        "dfine",
        {"labels": ((1, 40), (0, 80)), "boxes": ((1, 40, 4), [(0, 0.5)] * 2 + [(0.5, 1)] * 2), "scores": ((1, 40), _SHARE)},
        _dfine,
        shape=(1, 3, SIDE, 96),
        sizes=True,
    ),
)
"""The seven rows of the table, one of them in both of its layouts."""
