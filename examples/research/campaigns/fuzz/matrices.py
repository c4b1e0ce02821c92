"""Primitives of linear algebra."""

from .build import Builder, maker
from .program import Value

SQUARE = (3, 3)
# LAPACK's iterations need not end if an element is infinite.
_FINITE = "jnp.nan_to_num({x}, posinf=1.0, neginf=-1.0)"


def _square(b: Builder) -> Value:
    dtype = b.dtype(("float32", "float64", "complex64"))
    found = [v for v in b.values if v.shape == SQUARE and v.dtype.name == dtype]
    return b.rng.choice(found) if found else b.make(SQUARE, dtype)


def _of_square(text: str):
    def make(b: Builder):
        return b.emit(text.format(x=_square(b)))

    return make


def _of_two(text: str, first=SQUARE, second=(3,), dtype="float32"):
    def make(b: Builder):
        x, y = b.make(first, dtype), b.make(second, dtype)
        return b.emit(text.format(x=x, y=y))

    return make


for _name, _text in {
    "cholesky": "lax.linalg.cholesky({x})",
    "eig": f"tuple(lax.linalg.eig({_FINITE}))",
    "eigh": f"lax.linalg.eigh({_FINITE})",
    "geqrf": "jax._src.lax.linalg.geqrf({x})",
    "geqp3": "jax._src.lax.linalg.geqp3({x}, jnp.zeros((3,), jnp.int32))",
    "hessenberg": "lax.linalg.hessenberg({x})",
    "lu": "lax.linalg.lu({x})",
    "lu_pivots_to_permutation": (
        "lax.linalg.lu_pivots_to_permutation(lax.linalg.lu({x})[1], 4)"
    ),
    "qr": "lax.linalg.qr({x})",
    "schur": f"lax.linalg.schur({_FINITE})",
    "svd": f"lax.linalg.svd({_FINITE})",
    "tridiagonal": "lax.linalg.tridiagonal({x})",
}.items():
    maker("matrices", _name)(_of_square(_text))

for _name, _text in {
    "cholesky_update": "lax.linalg.cholesky_update({x}, {y})",
    "householder_product": "lax.linalg.householder_product({x}, {y})",
}.items():
    maker("matrices", _name)(_of_two(_text))

for _name, _text in {
    "ormqr": "lax.linalg.ormqr({x}, {x}[0], {y})",
    "symmetric_product": "lax.linalg.symmetric_product({x}, {y}, alpha=0.5, beta=2.0)",
    "triangular_solve": "lax.linalg.triangular_solve({x}, {y}, lower=True)",
    "tridiagonal_solve": "lax.linalg.tridiagonal_solve({x}[0], {x}[1], {x}[2], {y})",
}.items():
    maker("matrices", _name)(_of_two(_text, second=SQUARE))
