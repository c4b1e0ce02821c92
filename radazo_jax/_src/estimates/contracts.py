"""The contracts: points, values, estimates, and what makes each of them.

An estimator never evaluates. Its `points` chooses the points, an evaluator turns them
into values, and the estimator's `reduce` turns the values into an estimate:

    draw ──▶ points ──▶ evaluate ──▶ reduce ──▶ move
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from radazo_jax._src.base import checks, keys, shown
from radazo_jax._src.base.configuration import Configuration, check_fields
from radazo_jax._src.base.trees import STATIC, Tree
from radazo_jax._src.directions.distribution import Direction
from radazo_jax._src.directions.layout import Layout
from radazo_jax._src.directions.sums import LinearCombination

if TYPE_CHECKING:

    class _Update(Protocol):
        def __call__(
            self,
            updates: Tree,
            state: Tree,
            params: optax.Params = None,
            **extra_args: Tree,
        ) -> tuple[Tree, Tree]: ...

    class GradientTransformationExtraArgs(optax.GradientTransformationExtraArgs):
        """`optax.GradientTransformationExtraArgs` with the types of its functions."""

        init: Callable[[Any], Any]
        update: _Update

else:
    GradientTransformationExtraArgs = optax.GradientTransformationExtraArgs


# A number or an array of any library, or several numbers.
_Value = SupportsFloat | Sequence[SupportsFloat]


# A function of parameters, and of a batch if there is one: it returns a value, or a
# pair of a value and anything else.
Objective = Callable[..., _Value | tuple[_Value, object]]


class Draw(NamedTuple):
    """The keys from which a step draws its directions.

    Independent directions use `key`. Directions without replacement depend on one
    another through a whole run: they use `run_key`, and are numbered `step · K + k`.

    Attributes:
      key: The typed key of the step, shape ().
      run_key: The typed key of the run, shape (), the same in every step.
      step: Number of the step in the run, from 0: int32, shape ().
      fun: The function of the parameters that will be evaluated, if JAX can trace it.
        `low_rank` learns from it which axes of a leaf form a matrix.
    """

    key: jax.Array
    run_key: jax.Array
    step: jax.typing.ArrayLike = 0
    fun: Callable[[optax.Params], Any] | None = None

    @classmethod
    def once(cls, key: jax.typing.ArrayLike) -> "Draw":
        """Returns the draw of a single estimate, which is a run of one step."""
        typed = keys.as_key(key)
        return cls(typed, typed)


class Values(NamedTuple):
    """The values of a function at some points.

    A function that returns several values, such as one for each prompt, adds an axis
    of G values to both, the last.

    Attributes:
      base: The value at θ, NaN if θ is not a point: at least float32, shape () or [G].
      along: The values at the other points: at least float32, [K, m] or [K, m, G].
    """

    base: jax.Array
    along: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Points:
    """The points at which a function is evaluated: θ itself, and θ + sₖᵢ uₖ.

    A pytree of a few numbers per point, whatever the size of the parameters. An
    estimator that remembers a tree w, as an earlier point or a gradient, can ask for
    θ + tₖᵢ w + sₖᵢ uₖ; all points share w.

    Attributes:
      directions: The directions uₖ, stacked: [K].
      scales: The scales sₖᵢ, [K, m], float32, or float64 if the parameters are: each
        direction is evaluated at m points.
      includes_params: Whether θ is a point as well, the first; static.
      layout: The layout of the parameters; static.
      shift: w, a tree like the parameters, or `None`.
      shifts: The scales tₖᵢ of w, float32, [K, m], or `None`.
      vector_valued: Whether the function may return several values at each point, [G],
        instead of one; static.
    """

    directions: Direction
    scales: jax.Array
    includes_params: bool = dataclasses.field(metadata=STATIC)
    layout: Layout = dataclasses.field(metadata=STATIC)
    shift: Any = None
    shifts: jax.Array | None = None
    vector_valued: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def num_points(self) -> int:
        """n, the number of points: K m, and one more if θ is one."""
        return self.scales.size + self.includes_params

    @property
    def factor(self) -> float:
        """The c of E[u uᵀ] = I / c of the directions."""
        return self.directions.distribution.factor(self.layout.dimension)

    def split(self, values: jax.Array) -> Values:
        """Arranges the values at all points, θ first.

        Args:
          values: A value per point, [n], or several, [n, G], if the points are
            `vector_valued`.

        Raises:
          ValueError: If there are not n values.
        """
        if values.shape[:1] != (self.num_points,) or (
            values.ndim > 1 + self.vector_valued
        ):
            several = f", or ({self.num_points}, G)" if self.vector_valued else ""
            raise ValueError(
                "values must have one value per point, shape "
                f"({self.num_points},){several}; got shape {values.shape}."
            )
        of_one = values.shape[1:]
        along = values[self.includes_params :].reshape(*self.scales.shape, *of_one)
        nan = jnp.full(of_one, jnp.nan, values.dtype)
        return Values(values[0] if self.includes_params else nan, along)

    def join(self, values: Values) -> jax.Array:
        """Reverts `split`: returns the values at all points, [n] or [n, G]."""
        along = lax.collapse(values.along, 0, 2)
        if not self.includes_params:
            return along
        return jnp.concatenate([values.base[None], along])

    def with_shift(
        self, shift: Tree, shifts: jax.Array, scales: jax.Array | None = None
    ) -> "Points":
        """Returns the points along the same directions, moved by multiples of one tree.

        Args:
          shift: w, a tree like the parameters.
          shifts: The scales tₖᵢ of w, float32, [K, m].
          scales: The scales sₖᵢ, [K, m]; by default the present ones.
        """
        scales = self.scales if scales is None else scales
        return dataclasses.replace(self, shift=shift, shifts=shifts, scales=scales)

    def select(self, which: slice | np.ndarray) -> "Points":
        """Returns the points along some of the directions, by their index."""
        return dataclasses.replace(
            self,
            directions=jax.tree.map(lambda x: x[which], self.directions),
            scales=self.scales[which],
            shifts=None if self.shifts is None else self.shifts[which],
        )

    def combine(self, coefficients: jax.Array) -> LinearCombination:
        """Returns Σₖ coefficientsₖ uₖ over the directions of the points: a gradient.

        Args:
          coefficients: Real, [K].
        """
        return LinearCombination(coefficients, self.directions, self.layout)

    def direction(self, k: jax.typing.ArrayLike) -> Tree:
        """Returns uₖ as a tree like the parameters, float32."""
        return jax.tree.map(lambda x: x[k], self.directions).tree(self.layout)

    def of_tree(self, tree: Tree) -> LinearCombination:
        """Returns a tree like the parameters as a gradient."""
        return LinearCombination.of_tree(tree, self.layout)

    def of_flat(self, flat: jax.Array, params: optax.Params) -> LinearCombination:
        """Returns a vector of all coordinates, [d], as a gradient.

        Args:
          flat: The vector.
          params: θ, whose dtypes and shardings the gradient has.
        """
        return LinearCombination.of_flat(flat, self.layout, params)

    def inner_products(self, tree: Tree) -> jax.Array:
        """Computes ⟨uₖ, w⟩ with a tree w like the parameters: float32, [K]."""
        return self.directions.inner_products(tree, self.layout)


class Estimate(NamedTuple):
    """An estimate of a gradient.

    Attributes:
      value: The value at θ, or a substitute for it: at least float32, shape ().
      slope: The derivative along the gradient, according to the values: shape ().
      num_values: Number of values used: int32, shape (). If it is 0, the step is
        skipped.
      gradient: The estimate of the gradient, as a `LinearCombination`.
    """

    value: jax.Array
    slope: jax.Array
    num_values: jax.Array
    gradient: LinearCombination


@dataclasses.dataclass(frozen=True, repr=False)
class GradientEstimator(Configuration, abc.ABC):
    """An estimator of gradients from function values.

    A custom estimator is a subclass with two methods, `points` and `reduce`, and with
    `init` if it has state. Methods are pure. Make it a frozen dataclass with hashable
    fields: estimators with equal fields are then equal, and share a compiled program.

    Examples:
      Simultaneous perturbation with one direction and two points along it:

      >>> import dataclasses
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> from radazo_jax.estimators import Estimate, sample_points
      >>> @dataclasses.dataclass(frozen=True)
      ... class TwoPoints(zo.GradientEstimator):
      ...     distribution: zo.Distribution = zo.rademacher()
      ...     smoothing: float = 1e-3
      ...
      ...     def points(self, draw, params, state):
      ...         scales = [self.smoothing, -self.smoothing]
      ...         return sample_points(
      ...             self.distribution, draw, 1, scales, params
      ...         ), state
      ...
      ...     def reduce(self, points, values, params, state):
      ...         above, below = values.along[0]
      ...         slope = (above - below) / (2 * self.smoothing)
      ...         gradient = points.combine(slope[None])
      ...         value = (above + below) / 2
      ...         return Estimate(value, slope**2, jnp.int32(2), gradient), state
      >>> value_and_grad = zo.value_and_grad(lambda x: jnp.sum(x**2), TwoPoints())
      >>> value, gradient = value_and_grad(jax.random.key(0), jnp.ones(3))
      >>> round(float(value), 3)
      3.0
    """

    def init(self, params: optax.Params) -> Tree:
        """Returns the state before the first step; `()` by default.

        Args:
          params: θ, a tree of arrays.
        """
        del params
        return ()

    @abc.abstractmethod
    def points(
        self, draw: Draw, params: optax.Params, state: Tree
    ) -> tuple[Points, Tree]:
        """Returns the points at which a step evaluates the function, and the state.

        Args:
          draw: The draw of the step; its keys are consumed.
          params: θ.
          state: The state of the estimator.
        """

    @abc.abstractmethod
    def reduce(
        self, points: Points, values: Values, params: optax.Params, state: Tree
    ) -> tuple[Estimate, Tree]:
        """Returns the estimate according to the values, and the state after it.

        Args:
          points: The points of the step, as `points` returned them.
          values: The values at the points; values that failed are not finite.
          params: θ.
          state: The state that `points` returned.
        """


def check_estimator(estimator: object) -> None:
    """Raises unless `estimator` is one, with hashable fields."""
    if isinstance(estimator, optax.GradientTransformation):
        raise TypeError(
            "estimator must be a GradientEstimator such as forward_difference(); got "
            "an Optax transformation. Are estimator and optimizer swapped?"
        )
    if not isinstance(estimator, GradientEstimator):
        raise TypeError(
            "estimator must be a GradientEstimator such as forward_difference(); got "
            f"{shown.given(estimator)}.{checks.refer_to('estimators')}"
        )
    check_fields(estimator)


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluator(Configuration, abc.ABC):
    """An evaluator, which turns points into values within a compiled program.

    A custom evaluator is a subclass with two pure methods, a frozen dataclass with
    hashable fields, as a custom estimator is.
    """

    compiled: ClassVar[bool] = True  # Whether it evaluates functions that JAX traces.

    @abc.abstractmethod
    def cache(self, points: Points) -> Points:
        """Returns the points, with directions stored if that saves more than it costs.

        The evaluation and the estimate both need the elements of the directions.

        Args:
          points: The points.
        """

    @abc.abstractmethod
    def evaluate(
        self,
        fun: Callable[[optax.Params], Tree],
        params: optax.Params,
        points: Points,
        has_aux: bool,
    ) -> tuple[Values, Tree]:
        """Returns the values, and the auxiliary output at the first point.

        Args:
          fun: `fun(params)` returns a scalar, or a pair of it and the auxiliary output
            with `has_aux`.
          params: θ.
          points: The points.
          has_aux: Whether `fun` returns a pair.
        """


def check_evaluator(evaluator: object, traces: bool = True) -> None:
    """Raises unless `evaluator` is one, with hashable fields.

    Args:
      evaluator: The argument of a caller.
      traces: Whether it must be one of functions that JAX traces.
    """
    if not isinstance(evaluator, Evaluator):
        raise TypeError(
            "evaluator must be an Evaluator such as vectorized(batch_size=1); got "
            f"{shown.given(evaluator)}."
        )
    if traces and not evaluator.compiled:
        raise TypeError(
            "evaluator must be one for functions that JAX traces, such as "
            f"vectorized(batch_size=1); got {evaluator!r}, which calls Python "
            "functions. Pass fun and the evaluator to train."
        )
    check_fields(evaluator)


# The loss of a step as a function of the parameters.
Loss = Callable[[optax.Params], jax.Array]
