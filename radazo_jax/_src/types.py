"""Types that Optax, which ships none, does not give to type checkers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import optax

if TYPE_CHECKING:

    class _Update(Protocol):
        def __call__(
            self,
            updates: Any,
            state: Any,
            params: optax.Params = None,
            **extra_args: Any,
        ) -> tuple[Any, Any]: ...

    class GradientTransformationExtraArgs(optax.GradientTransformationExtraArgs):
        """`optax.GradientTransformationExtraArgs` with the types of its functions."""

        init: Callable[[Any], Any]
        update: _Update

else:
    GradientTransformationExtraArgs = optax.GradientTransformationExtraArgs
