"""Random numbers whose keys or parameters are computed from leaves."""

from .build import Builder, maker


def _key(b: Builder) -> str:
    """A key whose data may be the bits of a leaf."""
    if b.rng.random() < 0.4:
        return f"jax.random.key({b.rng.randint(0, 9)})"
    seed = b.make((), "float32")
    word = f"lax.bitcast_convert_type({seed}, jnp.uint32)"
    return f"jax.random.key({word})"


def _of_key(text: str):
    def make(b: Builder):
        return b.emit(text.format(key=_key(b)))

    return make


_DATA = "jax.random.key_data({})"
for _name, _text in {
    "random_bits": "jax.random.bits({key}, (2, 3))",
    "random_seed": _DATA.format("{key}"),
    "random_split": _DATA.format("jax.random.split({key}, 2)"),
    "random_fold_in": _DATA.format("jax.random.fold_in({key}, 3)"),
    "random_clone": _DATA.format("jax.random.clone({key})"),
    "random_unwrap": _DATA.format("{key}"),
    "random_wrap": _DATA.format("jax.random.wrap_key_data(" + _DATA + ")").replace(
        "({})", "({key})"
    ),
    "random_normal": "jax.random.normal({key}, (2, 3))",
    "iota_2x32_shape": "tuple(jax._src.random.prng.iota_2x32_shape((2, 3)))",
}.items():
    maker("randomness", _name)(_of_key(_text))


@maker("randomness", "threefry2x32", "threefry4x32", "philox2x32", "philox4x32")
def _(b: Builder):
    """The generators themselves, of the bits of a leaf."""
    name, count = b.rng.choice(
        [("threefry2x32", 4), ("threefry4x32", 8), ("philox2x32", 3), ("philox4x32", 6)]
    )
    x = b.make((3,), "float32")
    word = f"lax.bitcast_convert_type({x}, jnp.uint32)"
    words = ", ".join([word] * count)
    return b.emit(f"tuple(jax._src.random.{name}.{name}_p.bind({words}))")


@maker("outside", "random_gamma")
def _(b: Builder):
    x = b.make((3,), "float32")
    return b.emit(f"jax.random.gamma({_key(b)}, lax.abs({x}))")


@maker("randomness", "rng_bit_generator")
def _(b: Builder):
    x = b.make((4,), "float32")
    word = f"lax.bitcast_convert_type({x}, jnp.uint32)"
    kind = "lax.RandomAlgorithm.RNG_PHILOX"
    return b.emit(f"tuple(lax.rng_bit_generator({word}, (3,), algorithm={kind}))")
