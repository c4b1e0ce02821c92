"""The images of the attack, and the network that is attacked."""

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from examples.common.cli import UserError

SIZE = 28
MEAN, STD = 0.1307, 0.3081  # Of MNIST's pixels; inputs are normalized by them.
BATCH_SIZE = 64
_SHAPES = {
    "conv1": (3, 3, 1, 32),
    "conv2": (3, 3, 32, 64),
    "hidden": (9216, 128),
    "output": (128, 10),
}
_MAGIC = {3: b"\x00\x00\x08\x03", 1: b"\x00\x00\x08\x01"}  # Unsigned bytes, rank 3, 1.

Params = dict[str, dict[str, jax.Array]]


class Data(NamedTuple):
    name: str
    train_images: np.ndarray  # float32 [n, 28, 28, 1], from 0 to 1.
    train_labels: np.ndarray  # int32 [n].
    test_images: np.ndarray
    test_labels: np.ndarray


def load(folder: Path | None) -> Data:
    """The IDX files under a folder, or the digits that ship with scikit-learn."""
    return digits() if folder is None else idx(folder)


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


def idx(folder: Path) -> Data:
    """MNIST's four files, gzipped or not, anywhere under a folder."""
    if not folder.is_dir():
        raise UserError(f"--data must be a folder with IDX files; got {folder}")

    def pair(part: str) -> tuple[np.ndarray, np.ndarray]:
        images_path = _find(folder, f"{part}-images", 3)
        labels_path = _find(folder, f"{part}-labels", 1)
        images, labels = _read(images_path, 3), _read(labels_path, 1)
        if len(images) != len(labels) or not len(images):
            raise UserError(
                f"{images_path} holds {len(images)} images and {labels_path} "
                f"{len(labels)} labels: there must be as many, and some"
            )
        if labels.max() > 9:
            raise UserError(f"{labels_path} holds the label {labels.max()}, above 9")
        if images.shape[1:] != (SIZE, SIZE):
            raise UserError(
                f"{images_path} holds images of {images.shape[1]}×{images.shape[2]} "
                f"pixels, not {SIZE}×{SIZE}"
            )
        return images[..., None].astype(np.float32) / 255, labels.astype(np.int32)

    return Data(folder.name, *pair("train"), *pair("t10k"))


def _find(folder: Path, stem: str, rank: int) -> Path:
    names = [f"{stem}{dash}idx{rank}-ubyte" for dash in "-."]
    for name in (*names, *(f"{name}.gz" for name in names)):
        for path in sorted(folder.rglob(name)):
            return path
    raise UserError(f"no {names[0]} or {names[0]}.gz under {folder}")


def _read(path: Path, rank: int) -> np.ndarray:
    """The array in an IDX file of unsigned bytes."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    start = 4 + 4 * rank
    if content[:4] != _MAGIC[rank] or len(content) < start:
        raise UserError(f"{path} is not an IDX file of rank {rank}: its head is wrong")
    shape = tuple(np.frombuffer(content[4:start], ">u4").tolist())
    if len(content) - start != math.prod(shape):
        raise UserError(
            f"{path} is corrupt: {len(content) - start:,} bytes of pixels or labels, "
            f"where its head says {math.prod(shape):,}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def log_probabilities(params: Params, images: jax.Array) -> jax.Array:
    """Of the ten digits: images [n, 28, 28, 1] from 0 to 1 in, [n, 10] out."""

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
    initialize = jax.nn.initializers.he_normal(in_axis=(0, 1, 2), out_axis=3)
    params: Params = {}
    for i, (name, shape) in enumerate(_SHAPES.items()):
        init = initialize if len(shape) == 4 else jax.nn.initializers.he_normal()
        kernel = init(jax.random.fold_in(key, i), shape, jnp.float32)
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
