"""Nodes and constants of an ONNX graph: dense layers, norms, embeddings and activations, in float32 or int8.

Operators of the ONNX standard only, so that every runtime reads them. Constants have the paths of their parameters, and
layers that share parameters (ALBERT) share constants.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper


class FloatGraphBuilder:
    """Nodes and constants; every method that adds a node returns the name of its output."""

    def __init__(self, leaves: Mapping[str, np.ndarray]):
        self.leaves, self.nodes, self.constants = leaves, [], {}

    def constant(self, name: str, value: Any) -> str:
        """A constant, stored once under its name."""
        if name not in self.constants:
            array = np.asarray(value, order="C")  # ascontiguousarray gives a scalar an axis
            self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def integers(self, *values: int) -> str:
        """A constant of shapes, axes and indices."""
        return self.constant("shape_" + "_".join(map(str, values)), np.array(values, np.int64))

    def number(self, value: float) -> str:
        """A scalar constant."""
        return self.constant(f"number_{value!r}", np.array(value, np.float32))

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """A node with one output."""
        output = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=f"node_{output}", **attributes))
        return output

    def has(self, path: str) -> bool:
        """Whether the model has the parameter."""
        return path in self.leaves

    def parameter(self, path: str, group: int | None = None) -> np.ndarray:
        """A parameter; `group` is an index of the leading axis."""
        leaf = self.leaves[path]
        return np.asarray(leaf if group is None else leaf[group], np.float32)

    def dense(self, x: str, path: str, group: int | None = None, part: int | None = None, inputs: int = 1) -> str:
        """x @ kernel + bias over the last axis of x.

        Args:
          x: the input.
          path: of kernel and bias.
          group: index of the leading axis of the parameters.
          part: index of the first axis of the outputs: query, key or value.
          inputs: axes of the kernel that are inputs; x has them flat.
        """
        kernel, name = self.parameter(f"{path}/kernel", group), path if group is None else f"{path}/{group}"
        bias = self.parameter(f"{path}/bias", group) if self.has(f"{path}/bias") else None
        if part is not None:
            kernel, name = np.moveaxis(kernel, inputs, 0)[part], f"{name}/{part}"
            bias = None if bias is None else bias[part]
        product = self.multiply(x, f"{name}/kernel", kernel.reshape(math.prod(kernel.shape[:inputs]), -1))
        return product if bias is None else self.add("Add", product, self.constant(f"{name}/bias", bias.reshape(-1)))

    def multiply(self, x: str, name: str, kernel: np.ndarray) -> str:
        """x @ kernel, a constant with this name."""
        return self.add("MatMul", x, self.constant(name, kernel))

    def look_up(self, path: str, ids: str) -> str:
        """Rows of an embedding table by their ids."""
        return self.add("Gather", self.constant(path, self.parameter(path)), ids)

    def decode(self, x: str, path: str) -> str:
        """x @ table.T: logits of the vocabulary, tied to the embedding table that `look_up` reads."""
        table = self.constant(path, self.parameter(path))
        return self.add("MatMul", x, self.add("Transpose", table, perm=[1, 0]))

    def norm(self, x: str, path: str, epsilon: float, group: int | None = None) -> str:
        """LayerNorm of the last axis, with a bias if there is one."""
        names = [f"{path}/{part}" for part in ("scale", "bias") if self.has(f"{path}/{part}")]
        suffix = "" if group is None else f"/{group}"
        constants = [self.constant(f"{name}{suffix}", self.parameter(name, group)) for name in names]
        return self.add("LayerNormalization", x, *constants, axis=-1, epsilon=epsilon)

    def activate(self, x: str, activation: str) -> str:
        """An activation by its name in bert_jax."""
        if activation in ("gelu", "gelu_tanh"):
            return self.add("Gelu", x, approximate="tanh" if activation == "gelu_tanh" else "none")
        return self.add({"relu": "Relu", "tanh": "Tanh"}[activation], x)

    def first_position(self, x: str) -> str:
        """[B, H] of [B, S, H]: the vector of [CLS]."""
        return self.add("Gather", x, self.constant("position_0", np.array(0, np.int64)), axis=1)


class CompressedGraphBuilder(FloatGraphBuilder):
    """With the weights of dense layers and word embeddings in 8 bits, and float32 operators.

    Weights have a scale for every output (every token of the table), max |w| / 127, and no zero point. Position and
    token type tables, norms and biases stay float32. OpenVINO recognises the pattern of a product, keeps the integers,
    and quantises the inputs of the product when it runs (openvino.ai, "Dynamic Quantization").
    """

    def multiply(self, x: str, name: str, kernel: np.ndarray) -> str:  # noqa: D102 (of the base class)
        integers, scales = quantise(kernel, axis=0)
        return self.product(x, self.constant(name, integers), self.constant(f"{name}/scales", scales[0]))

    def look_up(self, path: str, ids: str) -> str:  # noqa: D102
        table, scales = self._table(path)
        rows = self.add("Cast", self.add("Gather", table, ids), to=TensorProto.FLOAT)
        return self.add("Mul", rows, self.add("Unsqueeze", self.add("Gather", scales, ids), self.integers(-1)))

    def decode(self, x: str, path: str) -> str:  # noqa: D102
        table, scales = self._table(path)
        return self.product(x, self.add("Transpose", table, perm=[1, 0]), scales)

    def _table(self, path: str) -> tuple[str, str]:
        integers, scales = quantise(self.parameter(path), axis=1)
        return self.constant(path, integers), self.constant(f"{path}/scales", scales[:, 0])

    def product(self, x: str, weights: str, scales: str) -> str:
        """x @ (weights * scales), float32 [..., outputs], of int8 weights [inputs, outputs] and scales [outputs]."""
        return self.add("MatMul", x, self.add("DequantizeLinear", weights, scales, axis=1))


class Int8GraphBuilder(CompressedGraphBuilder):
    """The same weights, and products of integers.

    The inputs of a product are quantised when the graph runs, to 0..255 between the smallest and the largest value of
    the whole batch (DynamicQuantizeLinear). These are the nodes that onnxruntime.quantization.quantize_dynamic writes,
    which ONNX Runtime fuses; query, key and value share the quantised input here.
    """

    def __init__(self, leaves: Mapping[str, np.ndarray]):
        super().__init__(leaves)
        self.quantised: dict[str, tuple[str, str, str]] = {}
        """By float value: its integers, scale and zero point."""

    def product(self, x: str, weights: str, scales: str) -> str:  # noqa: D102
        if x not in self.quantised:
            names = tuple(f"{x}/{part}" for part in ("integers", "scale", "zero"))
            self.nodes.append(helper.make_node("DynamicQuantizeLinear", [x], list(names), name=f"node_{names[0]}"))
            self.quantised[x] = names
        integers, scale, zero = self.quantised[x]
        sums = self.add("Cast", self.add("MatMulInteger", integers, weights, zero), to=TensorProto.FLOAT)
        return self.add("Mul", sums, self.add("Mul", scale, scales))


def quantise(weights: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """int8 values and float32 scales, one for all values along an axis, whose product is nearly `weights`.

    Symmetric: scale = max |w| / 127 (Zafrir et al. 2019, section 2.1), 1 where all weights are 0.
    """
    largest = np.abs(weights).max(axis, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    return np.rint(weights / scales).astype(np.int8), scales
