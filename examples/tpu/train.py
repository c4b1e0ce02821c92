"""Trains a language model by forward passes only, on any number of devices.

    python examples/tpu/train.py --mesh perturbation=2,data=2,model=2

The K + 1 evaluations of a step are spread over the mesh axis `perturbation`, the
sequences of the batch over `data`, and the parameters, if asked for, over
`model`. What the evaluations send one another are K + 1 numbers: each device makes
the same directions from the same key, and so the same gradient.

All randomness is a function of the seed and the step, and a run one of its settings.
"""

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

import radazo_jax as zo
from examples.tpu import checkpoint, cluster, decoder

DISTRIBUTIONS = ("sphere", "gaussian", "rademacher", "coordinate", "low_rank")
# Settings that define a run, and must be the same if it resumes from a checkpoint.
SETTINGS = (
    *("seed", "learning_rate", "distribution", "num_directions", "smoothing"),
    *("batch_size", *decoder.Sizes._fields),
)
# What may differ between its processes.
OWN = ("coordinator", "num_processes", "process_id", "pod", "seed")


class State(NamedTuple):
    params: Any
    optimizer: Any
    step: jax.Array


def positive(text: str | float) -> float:
    """The type of an option that is a number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise click.BadParameter(f"must be a number above 0; got {text}")
    return value


_COUNT = click.IntRange(1)


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--mesh", type=cluster.mesh_shape, help="devices, as data=2,model=4")
@click.option("--axis-types", type=click.Choice(["auto", "explicit"]), default="auto")
@click.option(
    "--shard-params", type=click.Choice(["no", "tensor", "fsdp"]), default="no"
)
@click.option("--steps", type=_COUNT, default=100)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0)
@click.option("--learning-rate", type=positive, default=1e-3)
@click.option("--distribution", type=click.Choice(DISTRIBUTIONS), default="rademacher")
@click.option("--num-directions", type=_COUNT, default=15, help="K")
@click.option("--smoothing", type=positive, default=1e-3, help="μ")
@click.option("--at-once", type=_COUNT, default=1, help="evaluations of a device")
@click.option("--batch-size", type=_COUNT, default=32, help="sequences per step")
@click.option("--layers", type=_COUNT, default=2)
@click.option("--width", type=_COUNT, default=32)
@click.option("--heads", type=_COUNT, default=4)
@click.option("--vocabulary", type=click.IntRange(2), default=32)
@click.option("--length", type=click.IntRange(2), default=16, help="of a sequence")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--log-every", type=_COUNT, default=10)
@click.option("--checkpoint", help="folder that all processes see, or gs://...")
@click.option("--checkpoint-every", type=_COUNT, default=50)
@click.option("--pod", is_flag=True, help="processes that find each other")
@click.option("--coordinator", type=cluster.address, help="address:port of process 0")
@click.option("--num-processes", type=_COUNT)
@click.option("--process-id", type=click.IntRange(0))
def command(**options: Any) -> None:
    """Describes the command line, which `parse` reads."""


def parse(argv: Sequence[str] | None) -> SimpleNamespace:
    """Returns the options as attributes.

    Raises:
      click.ClickException: If they cannot be used, or not together.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = SimpleNamespace(**command.make_context("train.py", list(argv)).params)
    process = (args.coordinator, args.num_processes, args.process_id)
    if any(x is not None for x in process) and (None in process or args.pod):
        raise click.UsageError(
            "--coordinator, --num-processes and --process-id go together, without --pod"
        )
    if None not in process and args.process_id >= args.num_processes:
        last = args.num_processes - 1
        raise click.UsageError(
            f"--process-id must be from 0 to {last}; got {args.process_id}"
        )
    if args.width % args.heads:
        raise click.UsageError(
            f"--heads must divide --width {args.width}; got {args.heads}"
        )
    return args


def train(args: SimpleNamespace) -> None:
    cluster.start(args)
    check_processes(args)
    mesh = cluster.make_mesh(args.mesh, args.axis_types == "explicit")
    folder = args.checkpoint
    with jax.set_mesh(mesh), checkpoint.locked(folder) if folder else nullcontext():
        run(args, mesh)


def check_processes(args: SimpleNamespace) -> None:
    """Raises in every process if one was started otherwise than the first."""
    cluster.check_same_in_all_processes("the version of JAX", jax.__version__)
    try:
        zo.random.check_same_key(args.seed, "--seed")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    for name, value in vars(args).items():
        if name not in OWN:
            option = f"--{name.replace('_', '-')}"
            cluster.check_same_in_all_processes(option, value)


def run(args: SimpleNamespace, mesh: jax.sharding.Mesh) -> None:
    sizes = decoder.Sizes(**{name: vars(args)[name] for name in decoder.Sizes._fields})
    sharding = NamedSharding(mesh, rows(args, mesh))
    init, step, layout = program(args, sizes, mesh)
    say = print if jax.process_index() == 0 else lambda *args, **kwargs: None
    say(describe(args, sizes, mesh, layout))

    # A number of NumPy's is the same argument in all processes, and no constant of
    # the program.
    seed = np.uint32(args.seed)
    settings = {name: vars(args)[name] for name in SETTINGS}
    manager = checkpoint.manager(args.checkpoint) if args.checkpoint else None
    state = checkpoint.restore(manager, layout, settings) if manager else None
    state = init(seed) if state is None else state
    first = int(state.step)
    say(f"from step {first} to {args.steps}", flush=True)

    start = time.perf_counter()
    for i in range(first, args.steps):
        tokens = decoder.batch(args.seed, i, args.batch_size, sizes)
        batch = jax.make_array_from_callback(tokens.shape, sharding, tokens.__getitem__)
        state, value = step(state, seed, batch)
        done = i + 1
        if done == args.steps or done % args.log_every == 0:
            # Nine digits tell any two losses apart.
            say(f"step {done:6} loss {float(value):#.9g}", flush=True)
        if manager and (done == args.steps or done % args.checkpoint_every == 0):
            checkpoint.save(manager, done, state, settings)
    if manager:
        with checkpoint.writing(manager):
            manager.close()
    say(f"took {time.perf_counter() - start:.1f} seconds, compilation included")


def program(
    args: SimpleNamespace, sizes: decoder.Sizes, mesh: jax.sharding.Mesh
) -> tuple[Callable[..., State], Callable[..., tuple[State, jax.Array]], State]:
    """Returns `init`, `step`, and the shapes and shardings of a state."""
    optimizer = zo.radazo(args.learning_rate, bias_correction=True)
    estimator = zo.forward_difference(
        getattr(zo, args.distribution)(), args.num_directions, args.smoothing
    )
    loss = functools.partial(decoder.loss_fn, heads=args.heads)
    evaluator = zo.sharded("perturbation", args.at_once)
    value_and_grad = zo.value_and_grad(loss, estimator, evaluator=evaluator)

    def keys(seed: jax.Array) -> jax.Array:
        return jax.random.split(jax.random.key(seed))

    def init(seed: jax.Array) -> State:
        params = decoder.init(keys(seed)[0], sizes)
        return State(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def step(
        state: State, seed: jax.Array, tokens: jax.Array
    ) -> tuple[State, jax.Array]:
        key = jax.random.fold_in(keys(seed)[1], state.step)
        value, gradient = value_and_grad(key, state.params, tokens)
        updates, moments = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, moments, state.step + 1), value

    shapes = jax.eval_shape(init, np.uint32(0))
    specs = decoder.specs(shapes.params, args.shard_params, mesh.shape["model"])
    moments = optax.tree.map_params(
        optimizer,
        lambda _, spec: spec,
        shapes.optimizer,
        specs,
        transform_non_params=lambda _: jax.P(),
    )
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), State(specs, moments, jax.P())
    )
    return (
        jax.jit(init, out_shardings=shardings),
        jax.jit(step, out_shardings=(shardings, None), donate_argnums=0),
        jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            shardings,
        ),
    )


def rows(args: SimpleNamespace, mesh: jax.sharding.Mesh) -> jax.P:
    """The sharding of the sequences of a batch."""
    axes = ("data", "model") if args.shard_params == "fsdp" else ("data",)
    size = math.prod(mesh.shape[axis] for axis in axes)
    if args.batch_size % size:
        raise click.ClickException(
            f"--batch-size must be a multiple of {size}, the devices along "
            f"{' and '.join(axes)}; got {args.batch_size}"
        )
    return jax.P(axes)


def describe(
    args: SimpleNamespace,
    sizes: decoder.Sizes,
    mesh: jax.sharding.Mesh,
    layout: State,
) -> str:
    leaves = jax.tree.leaves(layout.params)
    total = sum(leaf.size for leaf in leaves)
    own = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return (
        f"{jax.device_count()} devices of {jax.process_count()} process(es): {axes}\n"
        f"{total:,} parameters, {own:,} of them on a device; K={args.num_directions}\n"
        f"the loss of guessing is {math.log(sizes.vocabulary):.3f}, and the least "
        f"{decoder.entropy(sizes.vocabulary):.3f}"
    )


def resume(args: SimpleNamespace) -> str:
    """Instructions to resume after an error."""
    again = "start all processes again with the same commands"
    if args.checkpoint:
        return f"{again} to resume from the latest checkpoint in {args.checkpoint}"
    return f"{again} (from step 0, as there is no --checkpoint)"


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse(argv)
        if (args.pod or args.coordinator) and not cluster.is_supervised():
            arguments = sys.argv[1:] if argv is None else argv
            again = [sys.executable, __file__, *arguments]
            return cluster.supervise(again, resume(args))
        train(args)
    except click.exceptions.Exit as done:  # After --help.
        return done.exit_code
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        print(f"train.py: error: {message}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        print(
            f"train.py: error: process {jax.process_index()}: "
            f"{str(error).splitlines()[0]}; {resume(args)}",
            file=sys.stderr,
            flush=True,
        )
        cluster.wait_for_health_check()
        # A normal exit would wait for the other processes, which may be dead.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
