"""ResNet-50 with random weights, as ONNX: 25.6 million parameters, 102 MB. For benchmarks: its shape is real, its answers are not."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

BLOCKS = (3, 4, 6, 3)


class _Builder:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def node(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        output = f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def weight(self, *shape: int, spread: float, around: float = 0.0) -> str:
        name = f"w{len(self.weights)}"
        values = (self.random.standard_normal(shape) * spread + around).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def convolution(self, x: str, inward: int, outward: int, size: int, stride: int = 1, relu: bool = True) -> str:
        """Convolution, batch normalisation as its own node (engines fold it while they compile), ReLU."""
        kernel = self.weight(outward, inward, size, size, spread=(2 / (inward * size * size)) ** 0.5)
        x = self.node("Conv", [x, kernel], kernel_shape=[size, size], strides=[stride, stride], pads=[size // 2] * 4)
        normal = [self.weight(outward, spread=0.02, around=around) for around in (1.0, 0.0, 0.0)]
        variance = self.weight(outward, spread=0.0, around=1.0)
        x = self.node("BatchNormalization", [x, *normal, variance])
        return self.node("Relu", [x]) if relu else x


def resnet50(seed: int = 0) -> bytes:
    """input f32[1,3,224,224] -> output f32[1,1000]."""
    build = _Builder(seed)
    x = build.convolution("input", 3, 64, 7, 2)
    x = build.node("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    inward = 64
    for stage, blocks in enumerate(BLOCKS):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = build.convolution(x, inward, width, 1)
            y = build.convolution(y, width, width, 3, stride)
            y = build.convolution(y, width, width * 4, 1, relu=False)
            if not block:
                x = build.convolution(x, inward, width * 4, 1, stride, relu=False)
            x = build.node("Relu", [build.node("Add", [x, y])])
            inward = width * 4
    x = build.node("Flatten", [build.node("GlobalAveragePool", [x])])
    dense, bias = build.weight(1000, inward, spread=0.02), build.weight(1000, spread=0.01)
    build.nodes.append(helper.make_node("Gemm", [x, dense, bias], ["output"], name="dense", transB=1))
    graph = helper.make_graph(
        build.nodes,
        "resnet50",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, (1, 3, 224, 224))],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, (1, 1000))],
        build.weights,
    )
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content
