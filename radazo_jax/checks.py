"""Checks of arguments, for custom estimators, distributions and methods.

Each raises an error that names the argument, the value received and what is expected.
"""

from radazo_jax._src.base.checks import (
    check_fun,
    check_int_at_least,
    check_positive,
    check_unit_interval,
)
from radazo_jax._src.base.names import checks_names

__all__ = [
    "check_fun",
    "check_int_at_least",
    "check_positive",
    "check_unit_interval",
    "checks_names",
]
