"""A small decoder with a KV cache, as exporters of language models write it: one layer of attention over past and present tokens."""

from __future__ import annotations

import functools

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, HEADS = 32, 16, 2
HEAD = WIDTH // HEADS
PAST = ("past_key_values.0.key", "past_key_values.0.value")
PRESENT = ("present.0.key", "present.0.value")


@functools.cache
def decoder() -> bytes:
    """Return a model of `input_ids` [batch, sequence] and the past of each head [batch, HEADS, past, HEAD]. The past may be empty."""
    random = np.random.default_rng(0)
    constants = {
        "embedding": random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32),
        "head": random.standard_normal((WIDTH, VOCABULARY)).astype(np.float32),
        "scale": np.float32(1 / np.sqrt(HEAD)),
        "split": np.array([0, 0, HEADS, HEAD]),
        "join": np.array([0, 0, WIDTH]),
    }
    nodes = [helper.make_node("Gather", ["embedding", "input_ids"], ["x"])]
    for name in ("query", "key", "value"):
        constants[f"w_{name}"] = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        nodes += [
            helper.make_node("MatMul", ["x", f"w_{name}"], [f"{name}_flat"]),
            helper.make_node("Reshape", [f"{name}_flat", "split"], [f"{name}_split"]),
            helper.make_node("Transpose", [f"{name}_split"], [name], perm=[0, 2, 1, 3]),
        ]
    for past, new, present in zip(PAST, ("key", "value"), PRESENT, strict=True):
        nodes.append(helper.make_node("Concat", [past, new], [present], axis=2))
    nodes += [
        helper.make_node("Transpose", [PRESENT[0]], ["keys"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "keys"], ["likeness"]),
        helper.make_node("Mul", ["likeness", "scale"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", PRESENT[1]], ["seen"]),
        helper.make_node("Transpose", ["seen"], ["seen_split"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["seen_split", "join"], ["joined"]),
        helper.make_node("MatMul", ["joined", "head"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", HEADS, "past", HEAD]) for name in PAST),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY]),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", HEADS, "total", HEAD]) for name in PRESENT),
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString()
    return content


def no_past() -> dict[str, NDArray[np.float32]]:
    """Return the past of a decoder's first step: no token."""
    return {name: np.zeros((1, HEADS, 0, HEAD), np.float32) for name in PAST}


def as_past(outputs: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Return copies of what one step leaves for the next."""
    return {past: outputs[present].copy() for past, present in zip(PAST, PRESENT, strict=True)}
