"""Programs of a small network, compiled for devices that need not exist.

`python -m tests.helpers.compiled PLATFORM CASES` prints as JSON what the programs of a
list of cases hold and send. The compilers of TPUs and GPUs read their environment when
JAX is imported, so each platform has a process of its own.
"""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import radazo_jax as zo

ROOT = pathlib.Path(__file__).parents[2]
AXES = ("k", "data", "model")
TOPOLOGIES = {1: ("v5e:1x1", (1, 1, 1)), 8: ("v5e:2x4", (2, 4, 1))}
# The published properties of an H100, which decide how kernels are divided.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 85899345920 memory_bandwidth: 3350000000000
  l2_cache_size: 52428800 threads_per_warp: 32 threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
platform_name: "CUDA" dnn_version_info { major: 9 } device_description_str: "H100"
"""
_SENT = re.compile(
    r"= (.*?) (?:all-reduce|all-gather|all-to-all|collective-\w+|reduce-scatter)"
    r"(?:-start)?\("
)
_ARRAY = re.compile(r"[a-z]+(\d+)[a-z\d]*\[([\d,]*)\]")


def sent(compiled):
    """The bytes that each collective of a program makes, the largest last.

    A collective in a loop is listed once.
    """
    found = []
    for result in _SENT.findall(compiled.as_text()):
        found.append(
            sum(
                int(bits) // 8 * math.prod(map(int, filter(None, shape.split(","))))
                for bits, shape in _ARRAY.findall(result)
            )
        )
    return sorted(found)


def facts(compiled):
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "bytes": held - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "sent": sent(compiled),
        "host": re.findall(r"infeed|outfeed|is_host_transfer=true", compiled.as_text()),
    }


def devices(platform, count):
    if platform == "tpu":
        name, bounds = TOPOLOGIES[count]
        options = {"topology_name": name, "chips_per_host_bounds": bounds}
    else:
        options = {"target_config": H100, "topology": f"1x1x{count}"}
    return topologies.get_topology_desc(
        platform={"gpu": "cuda"}.get(platform, platform), **options
    ).devices


def network(weights, layers=4, width=2048, hidden=5504, vocabulary=32000, batch=4096):
    """Abstract parameters, the loss, and abstract tokens.

    The layers are scanned, and a tied embedding makes all logits at once, as in a
    decoder.
    """

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {
        "embedding": of(vocabulary, width),
        "up": of(layers, width, hidden),
        "gate": of(layers, width, hidden),
        "down": of(layers, hidden, width),
    }

    def normalize(x):
        wide = x.astype(jnp.float32)
        return jax.nn.standardize(wide, epsilon=1e-5).astype(jnp.bfloat16)

    def layer(x, p):
        p, y = weights(p), normalize(x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(params, tokens):
        params = dict(params)
        embedding = weights(params.pop("embedding"))
        x, _ = lax.scan(layer, embedding[tokens[0]], params)
        logits = jnp.matmul(
            normalize(x), embedding.T, preferred_element_type=jnp.float32
        )
        is_next = tokens[1][:, None] == jnp.arange(vocabulary)
        found = jnp.sum(logits, axis=1, where=is_next)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - found)

    return params, loss, jax.ShapeDtypeStruct((2, batch), jnp.int32)


def program(platform, run, distribution="", num_directions=1, mesh=(1, 1, 1), **sizes):
    """A forward pass, or a step of the optimizer named, compiled."""
    mesh = Mesh(np.array(devices(platform, math.prod(mesh))).reshape(mesh), AXES)
    gathered = mesh.size > mesh.shape["k"]
    params, loss, tokens = network(
        lambda w: lax.with_sharding_constraint(w, P()) if gathered else w, **sizes
    )

    def placed(tree):
        def place(x):
            spec = P(*(None,) * (x.ndim - 1), "model") if x.ndim > 1 else P()
            spec = P(None, ("data", "model")) if x is tokens else spec
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(place, tree)

    key = jax.eval_shape(lambda: jax.random.key(0))
    fun, args, donated = loss, (params, tokens), ()
    if run != "forward":
        optimizer = getattr(zo, run)(1e-6)
        estimator = zo.forward_difference(getattr(zo, distribution)(), num_directions)
        evaluator = zo.sharded("k", 1) if mesh.size > 1 else zo.vectorized(1)
        value_and_grad = zo.value_and_grad(loss, estimator, evaluator=evaluator)

        def fun(params, state, key, tokens):
            value, gradient = value_and_grad(key, params, tokens)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        state = jax.eval_shape(optimizer.init, params)
        args, donated = (params, state, key, tokens), (0, 1)
    with jax.set_mesh(mesh):
        args = placed(args)
        by_shape = {x.shape: x.sharding for x in jax.tree.leaves(args) if x.ndim > 1}
        replicated = NamedSharding(mesh, P())
        # Without every sharding given, JAX compiles for the CPU and does not say so.
        out = jax.tree.map(
            lambda x: by_shape.get(x.shape, replicated), jax.eval_shape(fun, *args)
        )
        jitted = jax.jit(fun, donate_argnums=donated, out_shardings=out)
        return jitted.lower(*args).compile()


def measured(platform, *cases):
    """The facts of the programs of some cases, compiled in another process."""
    command = (sys.executable, "-m", "tests.helpers.compiled", platform)
    alone = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, json.dumps(cases)],
        env=os.environ | alone | {"PYTHONPATH": path, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    found = [facts(program(sys.argv[1], **case)) for case in json.loads(sys.argv[2])]
    print(json.dumps(found))
