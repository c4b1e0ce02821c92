"""Programs on a mesh: `shard_map`, its collectives, and constraints."""

from .build import Builder, maker
from .program import Value

MESH = "jax.make_mesh(({n},), ('m',), axis_types=(jax.sharding.AxisType.{kind},))"


def mesh(n: int, kind: str = "Auto") -> str:
    return MESH.format(n=n, kind=kind)


def _stacked(b: Builder) -> tuple[Value, int]:
    x = b.pick(("float32",), lambda v: v.size > 0 and v.shape[:1] == (2,))
    return x, 2


def _collective(text: str, out: str = "'m'", check: bool = True):
    def make(b: Builder):
        x, n = _stacked(b)
        inner, (arg,) = b.block(Value("", (1, *x.shape[1:]), x.dtype, x.is_view))
        result = inner.make(arg.shape, "float32")
        # It has to depend on the argument, or nothing is communicated.
        [result] = inner.emit(f"lax.add({result}, {arg})")
        block = inner.close((arg,), [result])
        body = text.format(x=f"{block}(x)[0]")
        return b.emit(
            f"jax.shard_map(lambda x: {body}, mesh={mesh(n)}, in_specs=jax.P('m'), "
            f"out_specs=jax.P({out}), check_vma={check})({x})",
            block,
        )

    return make


for _name, _arguments in {
    "shard_map": ("{x}",),
    "psum": ("lax.psum({x}, 'm')", "", False),
    "psum_invariant": ("lax.psum({x}, 'm')", ""),
    "pmax": ("lax.pmax({x}, 'm')", ""),
    "pmin": ("lax.pmin({x}, 'm')", ""),
    "all_gather": ("lax.all_gather({x}, 'm')",),
    "all_gather_invariant": (
        "jax._src.lax.parallel.all_gather_invariant({x}, 'm')",
        "",
    ),
    "all_to_all": ("lax.all_to_all(jnp.concatenate([{x}, {x}]), 'm', 0, 0)",),
    "reduce_scatter": (
        "lax.psum_scatter(jnp.concatenate([{x}, {x}]), 'm', tiled=True)",
    ),
    "ppermute": ("lax.ppermute({x}, 'm', [(0, 1), (1, 0)])",),
    "axis_index": ("{x} * lax.axis_index('m').astype(jnp.float32)",),
    "pvary": ("{x} + lax.pcast(jnp.float32(1), 'm', to='varying')",),
}.items():
    maker("meshes", _name)(_collective(*_arguments))


@maker("meshes", "sharding_constraint")
def _(b: Builder):
    x, n = _stacked(b)
    where = f"jax.NamedSharding({mesh(n)}, jax.P('m'))"
    return b.emit(f"lax.with_sharding_constraint({x}, {where})")


@maker("meshes", "reshard")
def _(b: Builder):
    x, n = _stacked(b)
    where = f"jax.NamedSharding({mesh(n, 'Explicit')}, jax.P('m'))"
    return b.emit(f"jax.reshard({x}, {where})")
