"""Throughput of a population that writes, as a share of plain decoding.

    python -m research.decoding --output research/records/decoding.json

Both write as many rows of as many tokens, the likeliest ones. The rows of a member have
its parameters, which differ by a matrix of rank 1 each. Rounds are interleaved, and the
time is the processor's, so that other work on the machine counts for little.

With `--platform tpu` or `gpu` nothing runs: decoding by OPT-1.3b in bfloat16 is
compiled for a TPU v5e or an H100, which need not be there, and the programs are
compared by the bytes they read and write, by their operations and by the memory they
hold. `compilers.py` says what the compilers need.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import radazo_jax as zo
from radazo_llm.models.decode import AXIS_NAMES, generate_tokens, of_members
from radazo_llm.models.opt import CONFIGS, Config
from research import common, compilers, hlo

SMALL = Config(
    vocab_size=4096,
    hidden_size=256,
    ffn_dim=1024,
    num_hidden_layers=6,
    num_attention_heads=4,
    max_position_embeddings=256,
)
LARGE = CONFIGS["facebook/opt-1.3b"]
TARGETS = {"tpu": "v5e:1x1", "gpu": "h100"}
LENGTH = 16  # Of the prompts.


class Programs(NamedTuple):
    """Decoding of equally many rows, as functions of the parameters of a model."""

    plain: Callable[[Any], Any]
    population: Callable[[Any], Any]
    points: Callable[[Any], zo.estimators.Points]


def programs(
    model: Any, members: int, prompts: int, num_tokens: int
) -> tuple[Any, Programs]:
    """The parameters of a model, which may be abstract, and the programs."""
    graphdef, params = nnx.split(model)
    rng = np.random.default_rng(0)
    shape = prompts, LENGTH
    tokens = rng.integers(model.config.vocab_size, size=shape).astype(np.int32)
    lengths = np.full(prompts, LENGTH, np.int32)
    estimator = zo.evolution_strategy(zo.low_rank(), members, 1e-3)

    def replies(params: Any, repeats: int, axis_names: tuple[str, ...]) -> Any:
        return generate_tokens(
            nnx.merge(graphdef, params),
            np.tile(tokens, (repeats, 1)),
            np.tile(lengths, repeats),
            num_tokens,
            jax.random.key(0),
            0.0,
            axis_names=axis_names,
        )

    def points(params: Any) -> zo.estimators.Points:
        draw = zo.estimators.Draw.once(jax.random.key(1))
        return zo.vectorized().cache(estimator.points(draw, params, ())[0])

    def population(params: Any) -> Any:
        fun = functools.partial(replies, repeats=1, axis_names=AXIS_NAMES)
        return of_members(fun, params, points(params))

    plain = functools.partial(replies, repeats=members, axis_names=())
    return params, Programs(plain, population, points)


def measured(rounds: int, **sizes: int) -> dict[str, Any]:
    """Processor seconds of both, and the share of plain throughput."""
    model = SMALL.build(dtype=jnp.float32, rngs=nnx.Rngs(0))
    params, of = programs(model, **sizes)
    by_name = {"plain": jax.jit(of.plain), "population": jax.jit(of.population)}
    for program in by_name.values():
        jax.block_until_ready(program(params))
    seconds: dict[str, list[float]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, program in by_name.items():
            start = time.process_time()
            jax.block_until_ready(program(params))
            seconds[name].append(time.process_time() - start)
    plain, perturbed = (statistics.median(x) for x in seconds.values())
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    found = {"plain_s": plain, "population_s": perturbed}
    return found | {"share": statistics.median(ratios), "least": min(ratios)}


def compared(target: str, config: Config, dtype: Any, **sizes: int) -> dict[str, Any]:
    """Compares what both programs access, compute and hold on a device."""
    model = nnx.eval_shape(lambda: config.build(dtype=dtype, rngs=nnx.Rngs(0)))
    params, of = programs(model, **sizes)
    mesh = Mesh(np.array(compilers.devices(target)), ("one",))
    replicated = NamedSharding(mesh, PartitionSpec())

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)

    args = jax.tree.map(placed, (params,))

    def facts(fun: Callable[[Any], Any]) -> np.ndarray:
        compiled = compilers.compiled_on(mesh, fun, args)
        program = hlo.Program(compiled.as_text(), trips=sizes["num_tokens"] - 1)
        operations = program.product_flops() + program.elementwise_operations()
        accessed = program.accessed_bytes()
        return np.array(
            [accessed, operations, compilers.held(compiled.memory_analysis())]
        )

    plain, perturbed = facts(of.plain), facts(of.population)
    shares = dict(zip(("by_bytes", "by_operations"), plain / perturbed, strict=False))
    factors = compilers.num_bytes(jax.eval_shape(of.points, params).directions.cached)
    peak = (perturbed[-1] - factors) / plain[-1]
    sizes_of = {"plain_GiB": plain[-1] / 2**30, "factors_GiB": factors / 2**30}
    return shares | sizes_of | {"memory_without_factors": peak}


@click.command(help=__doc__)
@common.output
@click.option("--platform", type=click.Choice(["cpu", *TARGETS]), default="cpu")
@click.option("--rounds", type=common.POSITIVE, default=5)
@click.option("--members", type=common.POSITIVE, multiple=True, default=[64])
@click.option("--tokens", type=common.POSITIVE, default=32)
def main(
    output: Path | None,
    platform: str,
    rounds: int,
    members: tuple[int, ...],
    tokens: int,
) -> None:
    target = TARGETS.get(platform)
    run = functools.partial(measured, rounds)
    if target is not None:
        run = functools.partial(compared, target, LARGE, jnp.bfloat16)
    rows = []
    for number, prompts in itertools.product(members, (1, 4)):
        sizes = {"members": number, "prompts": prompts, "num_tokens": tokens}
        found = {name: round(x, 3) for name, x in run(**sizes).items()}
        rows.append(sizes | found)
        print(rows[-1], flush=True)
        if output is not None:
            content = common.record(rows)
            if target is not None:
                kind = compilers.devices(target)[0].device_kind
                content["device"] = f"compiled for {kind}"
            common.write(output, content)


if __name__ == "__main__":
    main()
