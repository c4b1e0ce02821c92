"""Adapts an int8 classifier of ONNX Runtime to another camera, by its errors alone.

    python examples/black_boxes/onnx_int8.py

A classifier of handwritten digits is quantized to int8 by ONNX Runtime. Then the camera
changes: its pictures are darker, shaded and noisy. Only the int8 file is at hand, and
integers have no derivative. Its biases and scales are tuned by what it answers.
"""

import functools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

import radazo_jax as zo
from examples.black_boxes import compare
from examples.black_boxes.results import Table, finish

HIDDEN = 32
# Logarithms of factors for the scales, and terms for the biases.
START = {
    "scales": {
        "w0_scale": np.zeros(HIDDEN, np.float32),
        "w1_scale": np.zeros(10, np.float32),
        **{f"{name}_scale": np.float32(0) for name in ("x", "a", "logits")},
    },
    "biases": {"b0": np.zeros(HIDDEN, np.float32), "b1": np.zeros(10, np.float32)},
}
ESTIMATOR = zo.central_difference(zo.rademacher(), num_directions=5, smoothing=0.1)


def split(images: np.ndarray) -> list[np.ndarray]:
    """1000 images to train or tune on, and 797 to test; and the labels of both."""
    labels = load_digits().target
    return train_test_split(images, labels, train_size=1000, random_state=0)


IMAGES = np.float32(load_digits().data / 16)
SHADE = np.tile(np.linspace(0.1, 0.7, 8), 8)
NOISE = np.random.default_rng(0).normal(0, 0.05, IMAGES.shape)
CLEAN, DARK = split(IMAGES), split(np.float32(IMAGES * SHADE + NOISE))
CAMERAS = {"old_camera": CLEAN, "new_camera": DARK}


def trained() -> onnx.ModelProto:
    """A network of two layers, in float32."""
    images, _, labels, _ = CLEAN
    network = MLPClassifier(HIDDEN, max_iter=1000, tol=1e-3, random_state=0)
    network.fit(images, labels)
    nodes = [
        helper.make_node("Gemm", ["x", "w0", "b0"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Gemm", ["a", "w1", "b1"], ["logits"]),
    ]
    arrays = {f"w{i}": w for i, w in enumerate(network.coefs_)}
    arrays |= {f"b{i}": b for i, b in enumerate(network.intercepts_)}
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(np.float32(x), name) for name, x in arrays.items()],
    )
    opset = helper.make_opsetid("", 21)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


class Calibration(quantization.CalibrationDataReader):
    """Images that show how large activations are."""

    def __init__(self) -> None:
        self.images: Iterator[np.ndarray] = iter(CLEAN[0][:100])

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self.images, None)
        return None if image is None else {"x": image[None]}


def quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with int8 weights and activations, as ONNX Runtime makes it."""
    logging.disable(logging.WARNING)  # It advises to do what such a model needs not.
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("float.onnx", "int8.onnx")]
        onnx.save(model, files[0])
        quantization.quantize_static(*files, Calibration(), per_channel=True)
        return onnx.load(files[1])


def tuned(arrays: dict[str, np.ndarray], params: dict[str, Any]) -> dict[str, Any]:
    """The arrays of the model with other scales and biases."""
    scales = {name: arrays[name] * np.exp(x) for name, x in params["scales"].items()}
    inputs = {"w0": scales["x_scale"], "w1": scales["a_scale"]}
    result = dict(scales)
    for bias, offset in params["biases"].items():
        # The int32 of a bias count in units of the two scales of the product.
        before = arrays[f"{bias}_quantized"] * arrays[f"{bias}_quantized_scale"]
        weight = bias.replace("b", "w")
        scale = inputs[weight] * scales[f"{weight}_scale"]
        result[f"{bias}_quantized_scale"] = scale
        result[f"{bias}_quantized"] = np.round((before + offset) / scale)
    return {name: np.asarray(x, arrays[name].dtype) for name, x in result.items()}


def logits(model: bytes, images: np.ndarray, params: Any = None) -> np.ndarray:
    """Returns the outputs of ONNX Runtime with the scales and biases of `params`."""
    changed = onnx.ModelProto.FromString(model)
    if params is not None:
        arrays = {x.name: numpy_helper.to_array(x) for x in changed.graph.initializer}
        replaced = tuned(arrays, params)
        for held in changed.graph.initializer:
            if held.name in replaced:
                held.CopyFrom(numpy_helper.from_array(replaced[held.name], held.name))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(changed.SerializeToString(), options)
    return session.run(None, {"x": images})[0]


def accuracy(model: bytes, data: list[np.ndarray], params: Any = None) -> float:
    """Returns the accuracy on the test images, which no run uses."""
    _, images, _, labels = data
    return float(np.mean(logits(model, images, params).argmax(axis=1) == labels))


def loss(model: bytes, params: Any) -> float:
    """The share of errors on the images to tune on, of the new camera."""
    images, _, labels, _ = DARK
    return float(np.mean(logits(model, images, params).argmax(axis=1) != labels))


def tables(content: dict[str, Any]) -> list[Table]:
    names = {"loss": "tuning_errors", "test": "test_accuracy"}
    shown = [
        (name, *(f"{value:.1%}" for value in found.values()))
        for name, found in content["accuracies"].items()
    ]
    return [
        Table("Accuracy on 797 held-out digits", ("model", *CAMERAS), shown),
        compare.table(content, "Scales and biases of an int8 classifier", names),
    ]


@compare.options(evaluations=1000, seeds=3)
def main(args: Any) -> None:
    network = trained()
    before, model = (x.SerializeToString() for x in (network, quantized(network)))
    problem = compare.Problem(
        functools.partial(loss, model),
        START,
        ESTIMATOR,
        rates=(0.02, 0.05),
        sigmas=(0.1, 0.3),
    )
    with compare.processes() as pool:
        content, best = compare.compare(
            problem, lambda params: {"test": accuracy(model, DARK, params)}, args, pool
        )
    if "R-AdaZO" in best:
        models = {
            "float32": (before, None),
            "int8": (model, None),
            "int8, tuned by R-AdaZO": (model, best["R-AdaZO"]),
        }
        content["accuracies"] = {
            name: {camera: accuracy(m, data, p) for camera, data in CAMERAS.items()}
            for name, (m, p) in models.items()
        }
    finish(args.output / "onnx_int8", content, tables)


if __name__ == "__main__":
    main()
