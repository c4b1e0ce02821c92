"""The images of the attack, and the network that is attacked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

SIZE = 28
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
    train_images: np.ndarray  # float32 [n, 28, 28, 1], from 0 to 1.
    train_labels: np.ndarray  # int32 [n].
    test_images: np.ndarray
    test_labels: np.ndarray


def load() -> Data:
    """Scikit-learn's 1797 digits of 8×8 pixels, enlarged to 28×28."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype(np.float32) / 16
    images = jax.image.resize(images, (len(images), SIZE, SIZE), "linear")
    images, labels = np.asarray(images)[..., None], labels.astype(np.int32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return Data(train_images, train_labels, test_images, test_labels)


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
