"""Networks, some of them of Flax."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from tests.perturb.zoo.program import normal, program, tokens


@program(selected=True)
def mlp():
    def fun(params, x):
        for w, b in params[:-1]:
            x = jnp.tanh(x @ w + b[None])
        w, b = params[-1]
        return jax.nn.log_softmax(x @ w + b[None])

    params = [(normal(5, 7), normal(7)), (normal(7, 6), normal(6))]
    return fun, params, normal(4, 5)


@program()
def convolutions():
    def fun(params, x):
        conv = functools.partial(lax.conv_general_dilated, x, padding="SAME")
        numbers = ("NHWC", "HWIO", "NHWC")
        return {
            "depthwise": conv(
                params["depthwise"],
                window_strides=(1, 1),
                dimension_numbers=numbers,
                feature_group_count=4,
            ),
            "grouped": conv(
                params["grouped"],
                window_strides=(2, 1),
                dimension_numbers=numbers,
                feature_group_count=2,
            ),
            "odd numbers": conv(
                params["odd"],
                window_strides=(1, 2),
                rhs_dilation=(1, 2),
                dimension_numbers=("NHWC", "IHOW", "HCNW"),
            ),
            # The image is the parameter too.
            "of itself": lax.conv(
                params["odd"],
                jnp.transpose(params["odd"], (0, 2, 1, 3)),
                (1, 1),
                "SAME",
            ),
        }

    params = {
        "depthwise": normal(3, 3, 1, 4),
        "grouped": normal(2, 2, 2, 6),
        "odd": normal(4, 3, 3, 2),
    }
    return fun, params, normal(2, 5, 4, 4)


@program()
def decoder():
    """Scanned layers, attention, and one table that embeds and unembeds."""

    def norm(x, scale):
        x = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        return x * scale[None, None]

    def fun(params, ids):
        table = params["embedding"]
        h = table[ids] + params["position"][None, : ids.shape[1]]

        def layer(h, p):
            x = norm(h, p["norm"])
            q = jnp.einsum("btd,dnh->btnh", x, p["q"])
            k = jnp.einsum("btd,dnh->btnh", x, p["k"])
            v = jnp.einsum("btd,dnh->btnh", x, p["v"])
            x = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            h = h + jnp.einsum("btnh,nhd->btd", x, p["o"])
            return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None

        h, _ = lax.scan(layer, h, params["layers"])
        return h @ table.T

    layers, width, heads, size = 2, 6, 2, 3
    params = {
        "embedding": normal(9, width),
        "position": normal(8, width),
        "layers": {
            "norm": 1 + normal(layers, width),
            "q": normal(layers, width, heads, size),
            "k": normal(layers, width, heads, size) + 0.1,
            "v": normal(layers, width, heads, size) - 0.1,
            "o": normal(layers, heads, size, width),
            "up": normal(layers, width, 8),
            "down": normal(layers, 8, width),
        },
    }
    return fun, params, tokens(2, 4, below=9)


@program()
def ensemble_under_vmap():
    def fun(params, x, members):
        def one(p, x):
            return jnp.tanh(x @ p["w"] + p["b"][None]) @ p["w"].T

        def look_up(p, i):
            return p["w"][i]

        return (
            jax.vmap(one, in_axes=(0, None))(params, x),
            jax.vmap(one, in_axes=({"w": 0, "b": 0}, 0), out_axes=1)(
                params, jnp.stack([x, x + 1, x - 1])
            ),
            jax.vmap(look_up)(params, members),
            jax.vmap(lambda w: w[:, 1], in_axes=2, out_axes=-1)(params["w"]),
        )

    params = {"w": normal(3, 4, 5), "b": normal(3, 5)}
    return fun, params, normal(2, 4), jnp.array([0, 3, -1])


@program(flax=True)
def flax_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(7, 6, rngs=rngs)
            self.conv = nnx.Conv(6, 6, kernel_size=(3,), rngs=rngs)
            self.norm = nnx.BatchNorm(6, use_running_average=False, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
            self.general = nnx.LinearGeneral((6,), (2, 4), rngs=rngs)
            self.linear = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, ids):
            x = self.norm(self.conv(self.embed(ids)))
            x = jnp.tanh(x + self.attention(x))
            return self.linear(self.general(x)), self.embed.attend(x)

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def fun(params, rest, ids):
        # Flax wants what it writes into to be of the trace that it writes in.
        net = nnx.merge(graph, params, jax.tree.map(lambda x: x, rest))
        out = net(ids)
        return out, nnx.state(net, nnx.BatchStat)

    return fun, params, rest, tokens(2, 5, below=7)
