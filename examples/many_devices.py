"""Spreads the evaluations of a step over devices, which send each other the losses.

    python examples/many_devices.py

The mesh has all accelerators of the machine, or eight devices that a CPU simulates. The
points of a step are spread over its first axis, the minibatch over its second. Every
device makes the same directions from the key, so no gradient is sent.
"""

import argparse
import re

import jax
import jax.numpy as jnp

import radazo_jax as zo

jax.config.update("jax_num_cpu_devices", 8)  # Before the first use of a device.

WIDTH = 64
# Fifteen directions and θ itself are sixteen points: four for each of four devices.
ESTIMATOR = zo.forward_difference(num_directions=15, smoothing=5e-3)


def loss(params, x, y):
    w1, b1, w2 = params
    return jnp.mean((jnp.tanh(x @ w1 + b1) @ w2 - y) ** 2)


def init(key):
    first, last = jax.random.split(key)
    draw = jax.nn.initializers.lecun_normal()
    return draw(first, (8, WIDTH)), jnp.zeros(WIDTH), draw(last, (WIDTH, 1))[:, 0]


def minibatch(step, sharding):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (256, 8))
    return jax.device_put((x, jnp.sin(x[:, 0]) * x[:, 1]), sharding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()

    # The minibatch is cut in two if the number of devices is even.
    data = 2 - jax.device_count() % 2
    mesh = jax.make_mesh((jax.device_count() // data, data), ("points", "data"))
    whole, rows = (
        jax.NamedSharding(mesh, jax.P()),
        jax.NamedSharding(mesh, jax.P("data")),
    )
    # Constant, so half of the rate at which `zo.find_learning_rate` begins.
    solver = zo.solver(loss, zo.radazo(1e-3), ESTIMATOR, evaluator=zo.sharded("points"))
    with jax.set_mesh(mesh):
        params = jax.device_put(init(jax.random.key(0)), whole)
        state = solver.init(params, jax.random.key(0))
        step = jax.jit(solver.step, donate_argnums=0)
        program = step.lower(state, *minibatch(0, rows)).compile().as_text()
        print(f"{jax.device_count()} devices: {dict(mesh.shape)}")
        print("Sent in a step, whatever the size of the model:")
        for sent in re.findall(r"= (\S+) ((?:all|collective)-\w+)\(", program):
            print(" ", *sent)
        for i in range(1, args.steps + 1):
            state, info = step(state, *minibatch(i, rows))
            if i % 100 == 0:
                print(f"step {i}: loss {info.value:.4f}", flush=True)


if __name__ == "__main__":
    main()
