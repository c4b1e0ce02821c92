"""Throughput of a population that writes, as a share of plain decoding.

    python examples/research/benchmarks/decoding.py --output decoding.json

Both write as many rows of as many tokens. The rows of a member have its parameters,
which differ by a matrix of rank 1 each. Rounds are interleaved, and the time is the
processor's, so that other work on the machine counts for little.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import radazo_jax as zo
from examples.apps.llm.decode import AXIS_NAMES, generate_tokens, of_members
from examples.apps.llm.opt import Config
from examples.common.cli import add_record, at_least_one, parser
from examples.common.record import record, write

CONFIG = Config(
    vocab_size=4096,
    hidden_size=256,
    ffn_dim=1024,
    num_hidden_layers=6,
    num_attention_heads=4,
    max_position_embeddings=256,
)


def programs(
    config: Config, members: int, prompts: int, length: int, num_tokens: int
) -> tuple[Any, dict[str, Callable[[Any], Any]]]:
    """The parameters of a model, and decoding of equally many rows, by name."""
    model = config.build(dtype=jnp.float32, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    rng = np.random.default_rng(0)
    tokens = rng.integers(config.vocab_size, size=(prompts, length)).astype(np.int32)
    lengths = np.full(prompts, length, np.int32)
    key = jax.random.key(0)
    estimator = zo.evolution_strategy(zo.low_rank(), members, 1e-3)

    def replies(params: Any, repeats: int, axis_names: tuple[str, ...]) -> Any:
        return generate_tokens(
            nnx.merge(graphdef, params),
            np.tile(tokens, (repeats, 1)),
            np.tile(lengths, repeats),
            num_tokens,
            key,
            0.0,
            axis_names=axis_names,
        )

    def population(params: Any) -> Any:
        draw = zo.estimators.Draw.once(jax.random.key(1))
        points, _ = estimator.points(draw, params, ())
        points = zo.vectorized().cache(points)
        fun = functools.partial(replies, repeats=1, axis_names=AXIS_NAMES)
        return of_members(fun, params, points)

    plain = functools.partial(replies, repeats=members, axis_names=())
    return params, {"plain": jax.jit(plain), "population": jax.jit(population)}


def measure(rounds: int, **sizes: Any) -> dict[str, Any]:
    """Processor seconds of both, and the share of plain throughput."""
    params, by_name = programs(CONFIG, **sizes)
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
    found |= {"share": statistics.median(ratios), "least": min(ratios)}
    return sizes | {name: round(x, 3) for name, x in found.items()}


def main() -> None:
    command = parser(__doc__)
    add_record(command)
    command.add_argument("--rounds", type=at_least_one, default=5)
    command.add_argument("--members", type=at_least_one, default=64)
    command.add_argument("--tokens", type=at_least_one, default=32)
    options = command.parse_args()
    rows = []
    for prompts in (1, 4):
        sizes = {"members": options.members, "prompts": prompts, "length": 16}
        row = measure(options.rounds, **sizes, num_tokens=options.tokens)
        print(row, flush=True)
        rows.append(row)
        if options.output is not None:
            write(options.output, record(rows))


if __name__ == "__main__":
    main()
