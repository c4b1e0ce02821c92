"""Throughput of a population that writes, as a share of plain decoding.

    python examples/research/benchmarks/decoding.py --output decoding.json

Both write as many rows of as many tokens, the likeliest ones. The rows of a member have
its parameters, which differ by a matrix of rank 1 each. Rounds are interleaved, and the
time is the processor's, so that other work on the machine counts for little.

With `--platform tpu` or `gpu` nothing runs: decoding by OPT-1.3b in bfloat16 is
compiled for a TPU v5e or an H100, which need not be there, and the programs are
compared by the bytes they read and write, by their operations and by the memory they
hold. `memory.py` says what the compilers need.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import radazo_jax as zo
from examples.apps.llm.decode import AXIS_NAMES, generate_tokens, of_members
from examples.apps.llm.opt import CONFIGS, Config
from examples.common.cli import add_record, at_least_one, parser
from examples.common.record import record, write
from examples.research.benchmarks import hlo, memory
from examples.research.benchmarks.programs import compiled_on, held, num_bytes, placed

SMALL = Config(
    vocab_size=4096,
    hidden_size=256,
    ffn_dim=1024,
    num_hidden_layers=6,
    num_attention_heads=4,
    max_position_embeddings=256,
)
LARGE = CONFIGS["facebook/opt-1.3b"]
TARGETS = {"tpu": "tpu", "gpu": "h100"}
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
    mesh = Mesh(np.array([memory.device(target)]), ("one",))
    args = placed((params,), mesh, lambda x: PartitionSpec())

    def facts(fun: Callable[[Any], Any]) -> np.ndarray:
        compiled = compiled_on(mesh, fun, args, options=memory.options(target))
        program = hlo.Program(compiled.as_text(), trips=sizes["num_tokens"] - 1)
        operations = program.product_flops() + program.elementwise_operations()
        accessed = program.accessed_bytes()
        return np.array([accessed, operations, held(compiled.memory_analysis())])

    plain, perturbed = facts(of.plain), facts(of.population)
    shares = dict(zip(("by_bytes", "by_operations"), plain / perturbed, strict=False))
    factors = num_bytes(jax.eval_shape(of.points, params).directions.cached)
    peak = (perturbed[-1] - factors) / plain[-1]
    sizes_of = {"plain_GiB": plain[-1] / 2**30, "factors_GiB": factors / 2**30}
    return shares | sizes_of | {"memory_without_factors": peak}


def main() -> None:
    command = parser(__doc__)
    add_record(command)
    command.add_argument("--platform", choices=["cpu", *TARGETS], default="cpu")
    command.add_argument("--rounds", type=at_least_one, default=5)
    command.add_argument("--members", type=at_least_one, nargs="+", default=[64])
    command.add_argument("--tokens", type=at_least_one, default=32)
    options = command.parse_args()
    target = TARGETS.get(options.platform)
    run = functools.partial(measured, options.rounds)
    if target is not None:
        run = functools.partial(compared, target, LARGE, jnp.bfloat16)
    rows = []
    for members in options.members:
        for prompts in (1, 4):
            sizes = {"members": members, "prompts": prompts}
            sizes |= {"num_tokens": options.tokens}
            found = {name: round(x, 3) for name, x in run(**sizes).items()}
            rows.append(sizes | found)
            print(rows[-1], flush=True)
            if options.output is not None:
                content = record(rows)
                if target is not None:
                    kind = memory.device(target).device_kind
                    content["device"] = f"compiled for {kind}"
                write(options.output, content)


if __name__ == "__main__":
    main()
