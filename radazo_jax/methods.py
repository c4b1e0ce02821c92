"""Methods: minimizers that run on the host."""

from radazo_jax._src.methods.contract import Ask, Box, End, Method, Start
from radazo_jax._src.methods.evolution import evolution
from radazo_jax._src.methods.least_squares import Fit, least_squares
from radazo_jax._src.methods.many import many
from radazo_jax._src.methods.policy import untuned
from radazo_jax._src.methods.quadratic import quadratic
from radazo_jax._src.methods.slopes import slopes

__all__ = [
    "Ask",
    "Box",
    "End",
    "Fit",
    "Method",
    "Start",
    "evolution",
    "least_squares",
    "many",
    "quadratic",
    "slopes",
    "untuned",
]
