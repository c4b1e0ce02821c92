"""How much memory a step of fine-tuning takes on a TPU, as its compiler plans it.

Nothing is run and no weights are made: programs are compiled from shapes, for chips
that need not be there (``pip install "radazo-jax[tpu-aot]"``). A step is that of MeZO's
SST-2: 16 sequences of 128 tokens, the cross-entropy over two candidates of one token
each; zeroth-order steps take a central difference along one direction.

    python -m examples.llm.memory --output docs/evidence/llm_memory.json

The file is written after every program; ``--resume`` goes on where a run was stopped.
"""

import argparse
import functools
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.benchmarks.programs import tpu_topology, without_tpu
from examples.common.record import record, write
from examples.llm import train
from examples.llm.data import Batch
from examples.llm.lora import FILTERS, add_lora
from examples.llm.model import CONFIGS, OPT

BATCH_SIZE, LENGTH = 16, 128
GIB = 2**30
# What these steps may take, as a multiple of the forward pass.
BAR = 1.06
BARRED = (("1.3b", "zo_sgd", "full"), ("1.3b", "radazo", "lora"))

TOPOLOGIES = {
    "v5e:1x1": (1, 1, 1),
    "v5e:2x2": (2, 2, 1),
    "v6e:1x1": (1, 1, 1),
    "v5p:1x1x1": (1, 1, 1),
}
LAWS = ("gaussian", "rademacher", "low_rank")


class Case(NamedTuple):
    """What is compiled."""

    size: str
    device: str
    method: str  # "forward", "zo_sgd", "radazo", "adam" or "adam, remat".
    tuned: str  # "", "lora" or "full".
    law: str

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Case":
        return cls(*(row[name] for name in cls._fields))


FORWARD = [("forward", "", "")]
ZO_SGD = [("zo_sgd", "full", law) for law in LAWS]
LORA = [("radazo", "lora", law) for law in LAWS]
FULL = [("radazo", "full", law) for law in LAWS]
ADAM = [
    (method, tuned, "")
    for tuned in ("lora", "full")
    for method in ("adam, remat", "adam")
]
CASES = [
    Case(size, device, *rest)
    for size, device, rows in (
        ("1.3b", "v5e:1x1", FORWARD + LORA + ZO_SGD + FULL + ADAM),
        ("13b", "v5e:1x1", FORWARD),
        ("13b", "v6e:1x1", FORWARD + LORA + ZO_SGD + ADAM[:2]),
        ("13b", "v5e:2x2", FORWARD + LORA),
        ("13b", "v5p:1x1x1", FORWARD + FULL[:1] + ADAM),
    )
    for rest in rows
]


# --- What is compiled -------------------------------------------------------------


def abstract_batch() -> Batch:
    """Examples whose two candidates share a sequence, as those of SST-2."""

    def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((BATCH_SIZE, *shape), dtype)

    return Batch(of(1, LENGTH), of(2, 1), of(2, 1), of(2, 1, dtype=jnp.float32), of())


def abstract_model(case: Case) -> OPT:
    def make() -> OPT:
        config = CONFIGS[f"facebook/opt-{case.size}"]
        model = OPT(config, remat="remat" in case.method, rngs=nnx.Rngs(0))
        if case.tuned == "lora":
            add_lora(model, rngs=nnx.Rngs(1))
        return model

    return nnx.eval_shape(make)


def in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def adam(learning_rate: Any) -> optax.GradientTransformation:
    """Optax's, with moments in float32 whatever the parameters have, as R-AdaZO's."""
    inner = optax.adam(learning_rate)

    def update(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        del params  # The update does not depend on them.
        return inner.update(in_float32(gradient), state)

    return optax.GradientTransformation(
        lambda params: inner.init(in_float32(params)), update
    )


def program(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What to compile and its abstract arguments, the first of which a step donates."""
    wrt = FILTERS[case.tuned or "full"]
    graphdef, params, frozen = nnx.split(abstract_model(case), wrt, ...)
    batch = abstract_batch()

    def loss(params: Any, frozen: Any, batch: Batch) -> jax.Array:
        return train.loss_fn(nnx.merge(graphdef, params, frozen), batch)

    if case.method == "forward":
        return loss, (params, frozen, batch)
    scalar, key = jax.ShapeDtypeStruct((), jnp.float32), jax.random.key(0)
    rates = train.Rates(scalar, scalar)
    step = functools.partial(_adam_step, loss)
    init = adam(0.0).init
    if case.law:
        settings = train.Settings(case.method, case.tuned, law=case.law)
        recipe = train.Recipe.of(settings)
        step = functools.partial(train.train_step, graphdef, recipe)
        init = recipe.optimizer(train.Rates(0.0, 0.0)).init
    state = jax.eval_shape(
        lambda params: train.State(params, init(params), key, jnp.int32(0)), params
    )
    return step, (state, frozen, rates, batch)


def _adam_step(
    loss: Callable[..., Any],
    state: train.State,
    frozen: nnx.State,
    rates: train.Rates,
    batch: Batch,
) -> tuple[train.State, jax.Array]:
    """As `train.train_step`, by backpropagation."""
    value, gradient = jax.value_and_grad(loss)(state.params, frozen, batch)
    optimizer = adam(rates.learning_rate)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return train.State(params, opt_state, state.key, state.step + 1), value


# --- Where it goes ----------------------------------------------------------------


@functools.cache
def mesh(device: str) -> Mesh:
    """The chips to compile for, which need not be there, in a line."""
    return Mesh(np.array(tpu_topology(device, TOPOLOGIES[device])), ("model",))


def sharding(path: tuple[Any, ...], leaf: Any, chips: Mesh) -> NamedSharding:
    """Divides the frozen matrices among the chips as one does for tensor parallelism.

    Attention by heads, the feed-forward network by its inner features, the embeddings
    by rows of the vocabulary. All else is on every chip.
    """
    names = [str(getattr(k, "key", "")) for k in path]
    axis = None
    if "layers" in names and len(leaf.shape) == 3 and "lora" not in names:
        axis = 1 if {"out_proj", "fc2"} & set(names) else 2
    elif "embed_tokens" in names:
        axis = 0
    spec = [None] * len(leaf.shape)
    if axis is not None:
        spec[axis] = "model"
    return NamedSharding(chips, PartitionSpec(*spec))


def compiled(case: Case) -> Any:
    chips = mesh(case.device)
    fun, args = program(case)
    donated = () if case.method == "forward" else (0,)

    def placed(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
        to = sharding(path, leaf, chips)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)

    args = jax.tree_util.tree_map_with_path(placed, args)
    out = jax.tree_util.tree_map_with_path(
        lambda path, leaf: sharding(path, leaf, chips), jax.eval_shape(fun, *args)
    )
    lowered = jax.jit(fun, out_shardings=out, donate_argnums=donated).lower(*args)
    program_ = lowered.compile()
    for output in jax.tree.leaves(program_.output_shardings):
        # Without every sharding given, JAX compiles for the CPU and does not say so.
        assert output.device_set <= set(chips.devices.flat), output
    return program_


# --- What it takes ----------------------------------------------------------------

# What is called temporaries there are the arguments too.
_TOO_LARGE = re.compile(r"required for HLO temporaries \(([\d.]+)G\) exceeds available")


def measured(case: Case, dump: pathlib.Path | None) -> dict[str, Any]:
    """What a chip holds at most, and of what; all of it where it does not fit."""
    start = time.perf_counter()
    try:
        found = compiled(case)
    except jax.errors.JaxRuntimeError as error:
        needed = _TOO_LARGE.search(str(error))
        if needed is None:
            raise
        return {"fits": False, "total_GiB": float(needed[1])}
    seconds = time.perf_counter() - start
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        name = "-".join(part for part in case if part).replace(":", "_")
        (dump / f"{name}.hlo").write_text(found.as_text(), encoding="utf-8")
    memory = found.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held -= memory.alias_size_in_bytes
    return {
        "fits": True,
        "total_GiB": (held + memory.temp_size_in_bytes) / GIB,
        "arguments_GiB": memory.argument_size_in_bytes / GIB,
        "temporary_GiB": memory.temp_size_in_bytes / GIB,
        # The compiler's own peak counts what is fetched ahead into fast memory twice.
        "peak_GiB": memory.peak_memory_in_bytes / GIB,
        "compile_s": seconds,
    }


def rows(
    cases: list[Case], known: dict[Case, dict[str, Any]], dump: pathlib.Path | None
) -> Iterator[dict[str, Any]]:
    forward: dict[tuple[str, str], dict[str, Any]] = {}
    for case in cases:
        row = known.get(case) or case._asdict() | measured(case, dump)
        base = forward.setdefault((case.size, case.device), row)
        row["total/forward"] = row["total_GiB"] / base["total_GiB"]
        if row["fits"] and base["fits"]:
            row["peak/forward"] = row["peak_GiB"] / base["peak_GiB"]
        if (case.size, case.method, case.tuned) in BARRED:
            ratios = row["total/forward"], row.get("peak/forward", math.inf)
            row["bar_met"] = max(ratios) <= BAR
        print(*row.values(), flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", help="by default all")
    parser.add_argument("--devices", nargs="+", choices=TOPOLOGIES)
    parser.add_argument("--methods", nargs="+", help="the forward pass is always there")
    parser.add_argument("--laws", nargs="+", choices=LAWS)
    parser.add_argument("--dump", type=pathlib.Path, help="where to put the programs")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument(
        "--resume", action="store_true", help="take the rows that --output has"
    )
    arguments = parser.parse_args()
    without_tpu()
    cases = [
        case
        for case in CASES
        if case.size in (arguments.sizes or [case.size])
        and case.device in (arguments.devices or [case.device])
        and case.method in ("forward", *(arguments.methods or [case.method]))
        and case.law in ("", *(arguments.laws or LAWS))
    ]
    known: dict[Case, dict[str, Any]] = {}
    output = arguments.output
    if arguments.resume and output.exists():
        for row in json.loads(output.read_text(encoding="utf-8"))["rows"]:
            known[Case.of(row)] = row
    found: dict[Case, dict[str, Any]] = {}
    for row in rows(cases, known, arguments.dump):
        found[Case.of(row)] = row
        if output:
            later = [row for case, row in known.items() if case not in found]
            content = record([*found.values(), *later])
            content["command"] = " ".join(
                ["python", "-m", "examples.llm.memory", *sys.argv[1:]]
            )
            content["device"] = "compiled for TPUs"
            content["versions"]["flax"] = flax.__version__
            write(output, content)


if __name__ == "__main__":
    main()
