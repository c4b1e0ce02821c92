"""The images of the attack, and the network that is attacked."""

from pathlib import Path
from typing import NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

SIZE = 28
_LARGEST = 1 << 30  # Bytes of a data set.
MEAN, STD = 0.1307, 0.3081  # Of MNIST's pixels; inputs are normalized by them.
BATCH_SIZE = 64
_SHAPES = {
    "conv1": (3, 3, 1, 32),
    "conv2": (3, 3, 32, 64),
    "hidden": (9216, 128),
    "output": (128, 10),
}
Params = dict[str, dict[str, jax.Array]]


class Data(NamedTuple):
    name: str
    train_images: np.ndarray  # float32 [n, 28, 28, 1], from 0 to 1.
    train_labels: np.ndarray  # int32 [n].
    test_images: np.ndarray
    test_labels: np.ndarray


def load(path: Path | None) -> Data:
    """MNIST in one file, as Keras has it, or the digits of scikit-learn."""
    if path is None:
        return digits()
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            if sum(part.file_size for part in file.zip.infolist()) > _LARGEST:
                raise ValueError(f"it holds more than {_LARGEST} bytes")
            parts = [file[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    except Exception as error:  # Any error means that the file cannot be read.
        raise click.ClickException(
            "--data must be mnist.npz, with x_train, y_train, x_test and y_test; got "
            f"{path}: {' '.join(str(error).split()):.200}"
        ) from error
    train, train_labels, test, test_labels = parts
    for images, labels in ((train, train_labels), (test, test_labels)):
        if images.dtype.kind not in "uif" or images.shape[1:] != (SIZE, SIZE):
            raise click.ClickException(
                f"--data must have 28×28 pixels; got {images.shape[1:]} of "
                f"{images.dtype}"
            )
        if labels.shape != (len(images),) or not np.isin(labels, range(10)).all():
            raise click.ClickException(
                "--data must have a label from 0 to 9 for each image; got labels of "
                f"shape {labels.shape} for {len(images)} images"
            )
    train, test = (x[..., None].astype(np.float32) / 255 for x in (train, test))
    labels = train_labels.astype(np.int32), test_labels.astype(np.int32)
    return Data(path.name, train, labels[0], test, labels[1])


def digits() -> Data:
    """Scikit-learn's 1797 digits of 8×8 pixels, enlarged to 28×28."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype(np.float32) / 16
    images = jax.image.resize(images, (len(images), SIZE, SIZE), "linear")
    images, labels = np.asarray(images)[..., None], labels.astype(np.int32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return Data("digits", train_images, train_labels, test_images, test_labels)


def log_probabilities(params: Params, images: jax.Array) -> jax.Array:
    """Log-probabilities of ten digits, [n, 10], of images [n, 28, 28, 1] in [0, 1]."""

    def convolve(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        axes = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, layer["kernel"], (1, 1), "VALID", dimension_numbers=axes
        )
        return jax.nn.relu(x + layer["bias"])

    x = (images - MEAN) / STD
    x = convolve(convolve(x, params["conv1"]), params["conv2"])
    window = (1, 2, 2, 1)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    x = x.reshape(x.shape[0], -1)
    hidden, output = params["hidden"], params["output"]
    x = jax.nn.relu(x @ hidden["kernel"] + hidden["bias"])
    return jax.nn.log_softmax(x @ output["kernel"] + output["bias"])


def train(data: Data, epochs: int) -> Params:
    """Trains the network by backpropagation."""
    key = jax.random.key(0)
    initialize = jax.nn.initializers.he_normal()
    params: Params = {}
    for i, (name, shape) in enumerate(_SHAPES.items()):
        kernel = initialize(jax.random.fold_in(key, i), shape, jnp.float32)
        params[name] = {"kernel": kernel, "bias": jnp.zeros(shape[-1])}
    optimizer = optax.adam(1e-3)

    def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        rows = log_probabilities(params, images)
        return -jnp.take_along_axis(rows, labels[:, None], axis=1).mean()

    @jax.jit
    def step(
        params: Params, state: optax.OptState, images: jax.Array, labels: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, images, labels)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, order = optimizer.init(params), np.random.default_rng(0)
    count, size = len(data.train_images), min(BATCH_SIZE, len(data.train_images))
    used = count - count % size
    rows = [order.permutation(count)[:used].reshape(-1, size) for _ in range(epochs)]
    for batch in (bar := tqdm(np.concatenate(rows), desc="network", unit="step")):
        pair = data.train_images[batch], data.train_labels[batch]
        params, state, value = step(params, state, *pair)
        bar.set_postfix(loss=f"{value:.3f}", refresh=False)
    return params


def predict(params: Params, images: np.ndarray) -> np.ndarray:
    """The digits that the network sees, [n]."""
    classify = jax.jit(lambda x: log_probabilities(params, x).argmax(axis=-1))
    parts = [images[i : i + 256] for i in range(0, len(images), 256)]
    return np.concatenate([np.asarray(classify(part)) for part in parts])
