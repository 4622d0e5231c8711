"""Models with strings, sequences, maps and optionals at their border."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto, TypeProto, helper

import aionn

FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
TEXTS = helper.make_tensor_type_proto(TensorProto.STRING, None)
INTEGERS = helper.make_tensor_type_proto(TensorProto.INT64, None)


def rows_of(key: int) -> TypeProto:
    """The type of ZipMap's output."""
    return helper.make_sequence_type_proto(helper.make_map_type_proto(key, FLOATS))


def model_of(nodes: Sequence[onnx.NodeProto], inputs: dict[str, Any], outputs: dict[str, Any]) -> aionn.Model:
    """Return a model. Ends are types, or (element type, shape)."""
    sources, results = (
        [
            helper.make_value_info(name, kind if isinstance(kind, TypeProto) else helper.make_tensor_type_proto(*kind))
            for name, kind in side.items()
        ]
        for side in (inputs, outputs)
    )
    graph = helper.make_graph(list(nodes), "graph", sources, results)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    return aionn.Model.from_onnx(helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString())


def ml(op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, outputs, domain="ai.onnx.ml", **attributes)


def passing(kind: TypeProto) -> aionn.Model:
    """y = x."""
    return model_of([helper.make_node("Identity", ["x"], ["y"])], {"x": kind}, {"y": kind})


def linear_classifier(labels: Sequence[str] | Sequence[int]) -> aionn.Model:
    """What skl2onnx makes of a LogisticRegression with two classes: labels, and a list of dicts of probabilities."""
    texts = isinstance(labels[0], str)
    named: dict[str, Any] = {"classlabels_strings" if texts else "classlabels_ints": list(labels)}
    mapped: dict[str, Any] = {"classlabels_strings" if texts else "classlabels_int64s": list(labels)}
    kind = TensorProto.STRING if texts else TensorProto.INT64
    return model_of(
        [
            ml("LinearClassifier", ["x"], ["label", "raw"], coefficients=[1.0, -2.0, -1.0, 2.0], intercepts=[0.0, 0.5], **named),
            ml("Normalizer", ["raw"], ["probability"], norm="L1"),
            ml("ZipMap", ["probability"], ["probabilities"], **mapped),
        ],
        {"x": (TensorProto.FLOAT, [None, 2])},
        {"label": (kind, [None]), "probabilities": rows_of(kind)},
    )


def tree_classifier() -> aionn.Model:
    """A tree of one question over two string classes, with ZipMap."""
    nodes = [
        ml(
            "TreeEnsembleClassifier",
            ["x"],
            ["label", "raw"],
            nodes_treeids=[0, 0, 0],
            nodes_nodeids=[0, 1, 2],
            nodes_featureids=[0, 0, 0],
            nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_values=[0.5, 0.0, 0.0],
            nodes_truenodeids=[1, 0, 0],
            nodes_falsenodeids=[2, 0, 0],
            nodes_missing_value_tracks_true=[0, 0, 0],
            nodes_hitrates=[1.0, 1.0, 1.0],
            class_treeids=[0, 0, 0, 0],
            class_nodeids=[1, 1, 2, 2],
            class_ids=[0, 1, 0, 1],
            class_weights=[0.75, 0.25, 0.125, 0.875],
            classlabels_strings=["no", "yes"],
            post_transform="NONE",
        ),
        ml("ZipMap", ["raw"], ["probabilities"], classlabels_strings=["no", "yes"]),
    ]
    ends = {"label": (TensorProto.STRING, [None]), "probabilities": rows_of(TensorProto.STRING)}
    return model_of(nodes, {"x": (TensorProto.FLOAT, [None, 1])}, ends)
