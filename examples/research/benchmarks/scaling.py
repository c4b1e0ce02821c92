"""Counts what a step sends and computes on 1 to 256 chips, in compiled programs.

Compiles, without running anything, whole R-AdaZO steps of a decoder for meshes of TPU
chips, of H100 GPUs and of simulated CPU devices. The evaluations are spread over the
axis ``k``, the minibatch over ``data`` and ``model``, and the parameters over
``model``. The gradient that backpropagation makes on the same mesh is compiled too. The
compilers need neither TPU nor GPU, but the extra ``tpu-aot`` or ``gpu-aot``, each in an
environment of its own.

    python -m benchmarks.scaling --platform tpu --output tpu.json

``--output`` is written after every program, and ``--resume`` continues a stopped run.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import radazo_jax as zo
from benchmarks import gpus, models
from benchmarks.hlo import facts
from benchmarks.programs import (
    compiled_on,
    placed,
    step_of,
    tpu_topology,
    without_tpu,
)
from common.campaign import Campaign, campaign
from common.distributions import DISTRIBUTIONS

AXES = ("k", "data", "model")
SMOOTHING = 1e-3
LEARNING_RATE = 1e-6
MEASURED = ("sphere", "gaussian", "rademacher", "low_rank")
TOPOLOGIES = {
    1: ("v5e:1x1", (1, 1, 1)),
    8: ("v5e:2x4", (2, 4, 1)),
    16: ("v5e:4x4", None),
    64: ("v5e:8x8", None),
    256: ("v5e:16x16", None),
}
GPU = "h100"
# Slices, hosts per slice, and GPUs per host.
GPU_TOPOLOGIES = {1: "1x1x1", 8: "1x1x8", 16: "1x2x8"}
# What may be sent beyond the losses, whatever the size of the model.
ALLOWED_BYTES = 64


class Spread(NamedTuple):
    """Sizes of the mesh axes over which a step is spread."""

    k: int = 1
    data: int = 1
    model: int = 1

    @property
    def num_devices(self) -> int:
        return math.prod(self)

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Case(NamedTuple):
    """A program to compile.

    Attributes:
      kind: ``strong`` (the same total work), ``weak`` (the same work per chip),
        ``indivisible`` (one more evaluation), ``forward`` (one loss) or ``gradient``
        (by backpropagation).
      spread: The sizes of the mesh's axes.
      distribution: The name of a distribution, or an empty string.
      num_evaluations: K + 1, or None without directions.
    """

    kind: str
    spread: Spread
    distribution: str = ""
    num_evaluations: int | None = None

    @property
    def num_sequences(self) -> int:
        """The size of the minibatch: one per chip if it is spread, otherwise four."""
        size = self.spread.data * self.spread.model
        return 4 if size == 1 else size

    def described(self, platform: str) -> dict[str, Any]:
        """Returns the columns that identify a row."""
        names = ("kind", "mesh", "distribution", "K+1")
        values = (self.kind, str(self.spread), *self[2:])
        return {"platform": platform, **dict(zip(names, values, strict=True))}


def mesh_for(platform: str, spread: Spread) -> Mesh:
    if platform == "cpu":
        devices = jax.devices()[: spread.num_devices]
        return Mesh(np.array(devices).reshape(spread), AXES)
    if platform == "gpu":
        devices = gpus.devices(GPU, GPU_TOPOLOGIES[spread.num_devices])
        return Mesh(np.array(devices).reshape(spread), AXES)
    name, bounds = TOPOLOGIES[spread.num_devices]
    devices = mesh_utils.create_device_mesh(
        spread, tpu_topology(name, bounds), allow_split_physical_axes=True
    )
    return Mesh(devices, AXES)


def decoder(platform: str, case: Case) -> models.Model:
    """1.3B parameters for TPUs and GPUs, 0.5M for the CPU, spread as is customary.

    The weights of a layer are gathered for its products. Activations stay on the
    devices of their sequences.
    """
    spread = case.spread
    apart = spread.data * spread.model > 1
    options: dict[str, Any] = {"one_by_one": not apart}
    options["batch_size"] = case.num_sequences
    if platform == "cpu":
        options |= {"num_layers": 2, "width": 128, "num_heads": 4, "vocabulary": 1024}
        options |= {"length": 64, "dtype": jnp.float32}
    if spread.model > 1:
        options["weights"] = lambda tree: lax.with_sharding_constraint(tree, P())
    if apart:
        options["activations"] = lambda x: lax.with_sharding_constraint(x, BATCH)
    return models.decoder(**options)


BATCH = P(("data", "model"))


def parameter_spec(leaf: Any) -> P:
    """The last axis of all but vectors is sharded over ``model``."""
    return P() if leaf.ndim < 2 else P(*[None] * (leaf.ndim - 1), "model")


def compiled_case(platform: str, case: Case) -> Any:
    """The program of a case, compiled for its mesh."""
    mesh = mesh_for(platform, case.spread)
    options = gpus.OPTIONS if platform == "gpu" else None
    model = decoder(platform, case)
    params = placed(model.params, mesh, parameter_spec)
    batch = placed(model.batch, mesh, lambda x: BATCH)
    if case.kind == "forward":
        return compiled_on(mesh, model.loss, (params, batch), (), options)
    if case.kind == "gradient":
        gradient = jax.value_and_grad(model.loss)
        return compiled_on(mesh, gradient, (params, batch), (), options)
    estimator = zo.forward_difference(
        DISTRIBUTIONS[case.distribution], case.num_evaluations - 1, SMOOTHING
    )
    optimizer = zo.radazo(LEARNING_RATE)
    key = placed(jax.eval_shape(lambda: jax.random.key(0)), mesh, lambda x: P())
    state = placed(jax.eval_shape(optimizer.init, model.params), mesh, parameter_spec)
    step = step_of(model.loss, estimator, optimizer, zo.sharded("k", batch_size=1))
    return compiled_on(mesh, step, (params, state, key, batch), (0, 1), options)


def measured(platform: str, case: Case) -> dict[str, Any]:
    """Returns the measured columns of a row."""
    found = facts(compiled_case(platform, case))
    update = update_flops(platform, case)
    return {
        "sequences": case.num_sequences,
        "chips": case.spread.num_devices,
        "evaluation_flops": found["product_flops"] - update,
        "update_flops": update,
        **found,
    }


def update_flops(platform: str, case: Case) -> int:
    """The products of an update by many factors; every chip makes its shard of it."""
    if case.distribution != "low_rank" or case.num_evaluations <= 17:
        return 0
    matrices = [
        x for x in jax.tree.leaves(decoder(platform, case).params) if x.ndim > 1
    ]
    # Stacked vectors are drawn dense.
    size = sum(x.size for x in matrices if min(x.shape[-2:]) > 24)
    return 2 * (case.num_evaluations - 1) * size // case.spread.model


def cases(platform: str) -> Iterator[Case]:
    """For chips that divide the evaluations, but for one case."""
    tpu = platform == "tpu"
    some = (1, 2, 4, 8) if platform == "cpu" else (1, 8, 16)
    many = (64, 256) if tpu else ()
    side, most = 16 if tpu else 2, max(*some, *many)
    # The last axis is that over which the parameters are sharded.
    sharded = [Spread(2, 2, 2), *([Spread(4, 8, 8)] if tpu else [])]
    minibatch = [Spread(data=n) for n in (8, *many)]
    for distribution in MEASURED[2:] if platform == "gpu" else MEASURED:
        for n in some:
            # The same evaluations whatever the number of chips; then one a chip.
            yield Case("strong", Spread(k=n), distribution, max(some))
        for n in many:
            yield Case("weak", Spread(k=n), distribution, n)
        for spread in minibatch:
            yield Case("weak", spread, distribution, 8)
        for spread in (Spread(k=side, data=most // side), *sharded):
            yield Case("weak", spread, distribution, spread.k)
        yield Case("indivisible", Spread(k=8), distribution, max(some) + 1)
    for spread in minibatch:
        yield Case("gradient", spread)
    for spread in sharded:
        yield Case("forward", spread)
        yield Case("gradient", spread)


def derived(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with their ratios to other rows, if these are present."""

    def find(**wanted: Any) -> dict[str, Any] | None:
        return next((row for row in rows if wanted.items() <= row.items()), None)

    made = []
    for row in rows:
        step = row["distribution"] != ""
        row = row | {
            "table": "steps" if step else "other",
            "replicated": row["mesh"].endswith("x1"),
            "evaluations_spread": step and row["mesh"].endswith("x1x1"),
            "Tflop": row["evaluation_flops"] / 1e12,
            "Gop": row["elementwise"] / 1e9,
            "sent_MB": row["sent_bytes"] / 1e6,
            "largest_MB": row["largest_bytes"] / 1e6,
            "peak_GB": row["peak_bytes"] / 1e9,
        }
        made.append(row)
        if not step:
            continue
        if row["replicated"]:
            row["allowed_bytes"] = 4 * row["K+1"] + ALLOWED_BYTES
            row["scalars_alone"] = row["sent_bytes"] <= row["allowed_bytes"]
        alone = find(kind="strong", chips=1, distribution=row["distribution"])
        if row["evaluations_spread"] and alone is not None:
            one = alone["evaluation_flops"] / alone["K+1"]
            row["evaluations"] = row["evaluation_flops"] / one
            row["flops/ideal"] = row["evaluations"] * row["chips"] / row["K+1"]
            row["elementwise/alone"] = row["elementwise"] / alone["elementwise"]
        if first_order := find(kind="gradient", mesh=row["mesh"]):
            row["backprop_MB"] = first_order["sent_bytes"] / 1e6
        if forward := find(kind="forward", mesh=row["mesh"]):
            row["forward_MB"] = forward["sent_bytes"] / 1e6
            row["forward_largest_MB"] = forward["largest_bytes"] / 1e6
            row["none_larger"] = row["largest_bytes"] <= forward["largest_bytes"]
    return made


@campaign(__doc__)
@click.option("--platform", type=click.Choice(["cpu", "gpu", "tpu"]), default="cpu")
def main(platform: str) -> Campaign:
    without_tpu()
    jax.config.update("jax_num_cpu_devices", 8)
    programs = [
        (case.described(platform), functools.partial(measured, platform, case))
        for case in cases(platform)
    ]
    kind = mesh_for(platform, Spread()).devices.flat[0].device_kind
    return Campaign(programs, derived, {"device": f"compiled for {kind}"})


if __name__ == "__main__":
    main()
