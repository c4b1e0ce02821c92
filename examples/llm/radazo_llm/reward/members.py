"""Members of a population as LoRA adapters, in the files that `peft` reads.

A direction of `zo.low_rank` adds matrices of low rank to the kernels of a model, and so
is an adapter of it:

    graphdef, params, rest = nnx.split(model, members.matrices, ...)
    points, _ = estimator.points(draw, params, estimator.init(params))
    folders = members.export_members(model, points, Path("members"), base=FOLDER)

An inference server that has loaded the same model evaluates them (`served.py`).
"""

from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import radazo_jax as zo
from radazo_llm.formats import adapters, names, tensor_files
from radazo_llm.models.model import LanguageModel


def matrices(path: Any, variable: Any) -> bool:
    """A filter of nnx: the kernels of the layers' projections."""
    del variable
    return path[0] == "layers" and path[-1] == "kernel"


def export_members(
    model: LanguageModel, points: zo.estimators.Points, folder: Path, *, base: str
) -> list[Path]:
    """Writes each point as an adapter of the model.

    Args:
      model: The model, which has the parameters that the points are relative to.
      points: Points along `low_rank` directions of parameters that `matrices` chose.
      folder: The folder to write; each member gets a folder in it.
      base: The name or folder of the model, which the configurations name.

    Returns:
      The folders of the members, in the order of the points.

    Raises:
      TypeError, ValueError: If the points are no adapters of projections.
    """
    a, b = map(nnx.to_flat_state, zo.estimators.candidate_factors(points))
    tensors: list[dict[str, np.ndarray]] = [{} for _ in range(points.num_points)]
    targets = []
    for (path, left), (_, right) in zip(a, b, strict=True):
        if not (path[0] == "layers" and len(path) == 3 and path[-1] == "kernel"):
            raise ValueError(
                "points must move kernels of the layers' projections alone; got "
                f"{'.'.join(map(str, path))}. Split the model by members.matrices."
            )
        targets.append(path[1])
        # [members, layers, in, r], and [members, layers, r, out].
        factors = {
            "A": np.asarray(left[...]),
            "B": np.asarray(right[...]).swapaxes(2, 3),
        }
        for matrix, found in factors.items():
            for member, of_member in zip(tensors, found, strict=True):
                layers = range(len(of_member))
                member |= names.of_adapter(model, path[1], matrix, layers, of_member)
    rank = points.directions.distribution.rank
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,  # The scale is in B.
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    folders = [folder / str(i) for i in range(points.num_points)]
    for to, member in zip(folders, tensors, strict=True):
        tensor_files.write(to, adapters.CONFIG, config, adapters.FILE, member)
    return folders
