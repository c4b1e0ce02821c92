"""Reads and writes OPT checkpoints in Hugging Face's format: safetensors, no PyTorch.

model = load("opt-125m")
save(model, "tuned")
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from examples.llm.model import OPT, Config

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"

ParamPath = tuple[str, ...]

_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")


class Stored(NamedTuple):
    """A tensor of an open file, under the name that it has there."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)


class Tensor(NamedTuple):
    """A tensor of a checkpoint, as a part of a parameter of the model."""

    name: str
    path: ParamPath
    layer: int | None  # Its place in a stack.
    shape: tuple[int, ...]

    @property
    def transposed(self) -> bool:
        return self.path[-1] == "kernel"


def load(folder: str | os.PathLike[str], *, dtype: Any = jnp.bfloat16) -> OPT:
    """The model of a folder with `config.json` and safetensors, whole or in shards.

    Tensors are read one by one: beside the model there is one parameter (of all
    layers) in memory.

    Args:
      folder: Where the files are.
      dtype: Of the parameters and of what is computed with them.

    Raises:
      FileNotFoundError: If a file, or a shard that the index lists, is not there.
      ValueError: If the files do not hold an OPT model, exactly.
    """
    folder = pathlib.Path(folder)
    config = _read_config(folder / CONFIG)
    abstract = nnx.eval_shape(lambda: OPT(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    with contextlib.ExitStack() as files:
        stored = _open(folder, files)
        head = stored.pop("lm_head.weight", None)
        _check(folder, list(_tensors(abstract)), stored)
        flat = {
            path: variable.replace(_read(path, variable, stored))
            for path, variable in nnx.to_flat_state(state)
        }
        _check_tied(folder, head, stored)
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def save(
    model: OPT,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a checkpoint that `load` reads, and Hugging Face's `from_pretrained`.

    Files get their names when all have been written; until then what the folder
    already holds stays as it is. Then a checkpoint that was there is replaced.

    Args:
      model: The model, without adapters or a soft prompt.
      folder: Where to write; it is made if it is not there.
      max_shard_bytes: The size from which the tensors are divided into several files.

    Raises:
      ValueError: If the model has parameters that the format has no place for.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}.")
    parameters = dict(nnx.to_flat_state(nnx.state(model)))
    for path, variable in parameters.items():
        if type(variable) is not nnx.Param:
            raise ValueError(
                "model must have no adapters and no soft prompt to be saved, got "
                f"{'.'.join(map(str, path))}."
            )
    folder = pathlib.Path(folder)
    shards = _shards(model, max_shard_bytes)
    with replacing(folder) as temporary:
        for name, tensors in shards.items():
            arrays = {t.name: _written(t, parameters[t.path]) for t in tensors}
            write_tensors(arrays, temporary(name))
        if SINGLE not in shards:
            total = sum(p[...].nbytes for p in parameters.values())
            places = {t.name: name for name, ts in shards.items() for t in ts}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            write_json(temporary(INDEX), index)
        kind = {"torch_dtype": str(jnp.dtype(model.dtype))}
        write_json(temporary(CONFIG), model.config.to_dict() | kind)
    new = {*shards, *([] if SINGLE in shards else [INDEX])}
    for path in (folder / SINGLE, folder / INDEX, *folder.glob(SHARDS)):
        if path.name not in new:  # Of the checkpoint that was there.
            path.unlink(missing_ok=True)


# --- Names ------------------------------------------------------------------------


def _name(path: ParamPath) -> str:
    """The name of a parameter in a checkpoint; `{}` stands for the layer."""
    *modules, leaf = path
    if modules[0] == "layers":
        attention = ["self_attn"] if modules[1] in _ATTENTION else []
        modules = ["layers", "{}", *attention, modules[1]]
    return ".".join(["model.decoder", *modules, _LEAVES[leaf]])


def _tensors(model: OPT) -> Iterator[Tensor]:
    """The tensors of the model's checkpoint; those of a layer stand together."""
    stacks = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        shape = variable.shape
        if path[0] == "layers":
            stacks.append((path, shape[1:]))
        else:
            yield _tensor(path, None, shape)
    for layer in range(model.config.num_hidden_layers):
        for path, shape in stacks:
            yield _tensor(path, layer, shape)


def _tensor(path: ParamPath, layer: int | None, shape: tuple[int, ...]) -> Tensor:
    # Checkpoints have the axes of a linear layer's matrix the other way round.
    shape = shape[::-1] if path[-1] == "kernel" else shape
    return Tensor(_name(path).format(layer), path, layer, shape)


# --- Reading ----------------------------------------------------------------------


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a JSON object, got {values!r:.40}.")
    return values


def _read_config(path: pathlib.Path) -> Config:
    try:
        return Config.from_dict(_read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _open(folder: pathlib.Path, files: contextlib.ExitStack) -> dict[str, Stored]:
    """The tensors of a folder, by name with the prefix ``model.``, as yet unread."""
    stored: dict[str, Stored] = {}
    for path in _checkpoint_files(folder):
        try:
            file = files.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(
                f"{path} must be a complete safetensors file: {error}."
            ) from None
        for original in sorted(file.keys()):
            bare = original.startswith("decoder.")
            name = f"model.{original}" if bare else original
            if name in stored:
                raise ValueError(f"{folder} must have {name} once, got it twice.")
            stored[name] = Stored(file, original)
    return stored


def _checkpoint_files(folder: pathlib.Path) -> list[pathlib.Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} must have {SINGLE} or {INDEX}, got neither; transformers "
            "makes one of a PyTorch checkpoint by from_pretrained and save_pretrained."
        )
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{folder / INDEX} must have a weight_map, got {weight_map!r}."
        )
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name}, listed in {INDEX}, is not there."
            )
    return [folder / name for name in names]


def _check(
    folder: pathlib.Path, wanted: list[Tensor], stored: dict[str, Stored]
) -> None:
    """Raises unless the files hold the tensors of the model and no others."""
    names = {tensor.name for tensor in wanted}
    for fault, found in (
        ("lacks", names - stored.keys()),
        ("has the unexpected", stored.keys() - names),
    ):
        if found:
            others = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ValueError(f"{folder} {fault} tensor {min(found)}{others}.")
    for tensor in wanted:
        there = stored[tensor.name]
        if there.shape != tensor.shape:
            raise ValueError(
                f"{folder}: tensor {tensor.name} must have the shape {tensor.shape}, "
                f"got {there.shape}."
            )
        kind = there.file.get_slice(there.name).get_dtype()
        if kind not in ("F16", "BF16", "F32", "F64"):
            raise ValueError(
                f"{folder}: tensor {tensor.name} must be of type F16, BF16, F32 or "
                f"F64, got {kind}."
            )


def _read(path: ParamPath, variable: Any, stored: dict[str, Stored]) -> jax.Array:
    """A parameter, its layers read one after another."""
    stacked = path[0] == "layers"
    host = np.empty(variable.shape, variable.dtype)
    for layer, part in enumerate(host if stacked else [host]):
        tensor = stored[_name(path).format(layer)].read()
        part[...] = tensor.T if path[-1] == "kernel" else tensor
    # Waits, so that the next is not read before this one is let go.
    return jax.block_until_ready(jnp.array(host))


def _check_tied(
    folder: pathlib.Path, head: Stored | None, stored: dict[str, Stored]
) -> None:
    if head is None:
        return
    embedding = stored["model.decoder.embed_tokens.weight"].read()
    if not np.array_equal(head.read(), embedding):
        raise ValueError(
            f"{folder}: lm_head.weight must be that of embed_tokens, got another."
        )


# --- Writing ----------------------------------------------------------------------


def write_tensors(arrays: dict[str, np.ndarray], path: pathlib.Path) -> None:
    """Writes a safetensors file that PyTorch programs read, too."""
    path.touch()
    mode = path.stat().st_mode  # As the umask says; the library makes its files 0600.
    save_file(arrays, path, metadata={"format": "pt"})
    path.chmod(mode)


def _shards(model: OPT, max_bytes: int) -> dict[str, list[Tensor]]:
    """Which tensors go into which file."""
    itemsize = jnp.dtype(model.dtype).itemsize
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in _tensors(model):
        num_bytes = int(np.prod(tensor.shape)) * itemsize
        if groups[-1] and size + num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{i:05}-of-{len(groups):05}.safetensors": group
        for i, group in enumerate(groups, 1)
    }


def _written(tensor: Tensor, variable: Any) -> np.ndarray:
    part = variable[...] if tensor.layer is None else variable[...][tensor.layer]
    array = np.asarray(part)
    return np.ascontiguousarray(array.T if tensor.transposed else array)


@contextlib.contextmanager
def replacing(folder: pathlib.Path) -> Iterator[Any]:
    """Gives files temporary names until all are written, then their own."""
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, pathlib.Path] = {}

    def temporary(name: str) -> pathlib.Path:
        return written.setdefault(name, folder / f".{name}.tmp")

    try:
        yield temporary
        for name, path in written.items():
            path.replace(folder / name)
    finally:
        for path in written.values():
            path.unlink(missing_ok=True)


def write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
