"""Steps of a run whose function is evaluated elsewhere."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from radazo_jax._src import programs, shown, trees
from radazo_jax._src.base import GradientEstimator, Search, candidates
from radazo_jax._src.search.whole import whole
from radazo_jax._src.steps import box, history, states, step, units
from radazo_jax._src.steps.box import BoundsLike
from radazo_jax._src.steps.states import Run, SolverState


class AskTellState(NamedTuple):
    """The state of `ask_tell`, a checkpoint at any moment.

    Attributes:
      run: The state of the run.
      asked: Whether the candidates of this step have been asked for: a NumPy bool
        on the host, shape ().
    """

    run: SolverState
    asked: np.ndarray

    def __repr__(self) -> str:
        return shown.on_a_line(self, run=repr(self.run), asked=shown.number(self.asked))

    @property
    def params(self) -> Any:
        """The parameters."""
        return self.run.params


class AskTell(NamedTuple):
    """Pure functions that take steps on values from elsewhere.

    Attributes:
      init: `init(params, key) -> state`, with the key of the whole run.
      ask: `ask(state) -> (candidates, state)`: a tree like the parameters of NumPy
        arrays with one additional axis, the first, of size n. Until the values are
        told, another call returns the same candidates.
      tell: `tell(state, values) -> state`; the values at the candidates, [n], NaN for
        candidates that failed. The first alone, [1], is enough if the search rejects
        the latest step by it, as `search.backtracking` does unless it is below
        `float(state.run.search_state.limit)`. An estimator such as `evolution_strategy`
        also takes several values for each candidate, [n, G].
    """

    init: Callable[..., AskTellState]
    ask: Callable[[AskTellState], tuple[Any, AskTellState]]
    tell: Callable[[AskTellState, Any], AskTellState]


def ask_tell(
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    search: Search = whole(),
    *,
    bounds: BoundsLike | None = None,
    scale: Any = None,
) -> AskTell:
    """Minimizes a function that is evaluated by hand, or by anything else.

    Args:
      optimizer: An Optax transformation, such as `radazo(1e-3)`. It gets `value`,
        `grad`, `slope` and `measured` as extra arguments, as in `minimize`, and no
        `value_fn`.
      estimator: An estimator, such as `forward_difference()`.
      search: As in `minimize`.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which the parameters and all candidates
        stay. A candidate that is moved into it is no longer along its direction, which
        biases estimates at the border.
      scale: As in `minimize`.

    Returns:
      `(init, ask, tell)`, as described in `AskTell`. `ask` and `tell` are compiled at
      their first call. Values that are not finite are treated as by `minimize` with
      `on_failure="drop"`; `state.run.failures` counts them.

    Raises:
      TypeError, ValueError: If an argument has the wrong type, or `scale` is not
        positive.
      ValueError: From `init`, if `params` do not lie within the bounds, or `scale` is
        not of their structure; from `tell`, if
        there are not n values, the candidates were not asked for or have been told
        already, or the search has further evaluations.

    Examples:
      >>> import jax, numpy as np
      >>> import radazo_jax as zo
      >>> init, ask, tell = zo.ask_tell(zo.radazo(3e-2), zo.forward_difference())
      >>> state = init(np.zeros(3, np.float32), jax.random.key(0))
      >>> for _ in range(100):
      ...     candidates, state = ask(state)
      ...     values = [np.sum((x - 1.0) ** 2) for x in candidates]
      ...     state = tell(state, values)
      >>> candidates.shape, bool(np.abs(state.params - 1).max() < 0.1)
      ((11, 3), True)
    """
    states.check_run(optimizer, estimator, search)
    run = Run(None, None, optimizer, estimator, search, bounds=box.as_bounds(bounds))
    run = run._replace(units=units.as_units(scale))

    def init(params: optax.Params, key: jax.typing.ArrayLike) -> AskTellState:
        with trees.precision_of(params):
            # Copies are made later than calls return; the caller may write to `params`.
            begun = jax.block_until_ready(step.start(run, params, key))
            return AskTellState(begun, np.zeros((), bool))

    def ask(state: AskTellState) -> tuple[Any, AskTellState]:
        _check_state(state)
        with trees.precision_of(state.run.params):
            asked = programs.of(candidates_of, run, state.run)(state.run)
        return trees.as_numpy(asked), state._replace(asked=np.ones((), bool))

    def tell(state: AskTellState, values: Any) -> AskTellState:
        _check_state(state)
        if not bool(state.asked):
            raise ValueError(
                "values must follow an ask, and be told once; got a state whose "
                "candidates were not asked for, or were told already."
            )
        states.check_room(state.run.step)
        values = as_values(values, state.run.params)
        with trees.precision_of(state.run.params):
            if np.shape(values) == (1,) and step.is_rejected(run, state.run, values[0]):
                values = padded(values, step.num_points(run, state.run))
            told, *_ = programs.of(take, run, state.run, values)(state.run, values)
        return AskTellState(told, np.zeros((), bool))

    return AskTell(init, ask, tell)


def candidates_of(run: Run, state: SolverState) -> Any:
    """The candidates of a step, a tree like the parameters: [n, …]."""
    states.check_state(run, state)
    points, _ = step.points_at(run, state, _traced_loss(run, state))
    asked = candidates(units.around(run.units, state.params, points), state.params)
    return jax.vmap(lambda params: box.project(run.bounds, params))(asked)


def take(
    run: Run, state: SolverState, values: jax.Array
) -> tuple[SolverState, jax.Array, jax.Array]:
    """Takes a step, given its values.

    Args:
      run: The run.
      state: The state before.
      values: The values, [n] or [n, G].

    Returns:
      The state after, the numbers of the step, and the checksum of the parameters.
    """
    states.check_state(run, state)
    asked = step.points_at(run, state, _traced_loss(run, state))
    state, info = step.advance(run, state, asked, asked[0].split(values))
    return state, history.numbers(info, state), checksum(state.params)


def _traced_loss(run: Run, state: SolverState) -> Callable[[Any], Any] | None:
    """The loss if JAX evaluates it: `low_rank` needs it in both kinds of programs."""
    return None if run.fun is None else step.loss_at(run, state)


def teller(
    run: Run, state: SolverState
) -> Callable[[SolverState, Any], tuple[SolverState, jax.Array, jax.Array]]:
    """The program that takes a step in place, also given the first values alone.

    Args:
      run: The run.
      state: A state of the run.
    """
    size = step.num_points(run, state)
    compiled: list[Callable[..., Any]] = []

    def tell(
        state: SolverState, values: Any
    ) -> tuple[SolverState, jax.Array, jax.Array]:
        values = padded(values, size)
        if not compiled:
            compiled.append(programs.of(take, run, state, values, donate=[0]))
        found: tuple[SolverState, jax.Array, jax.Array]
        found = compiled[0](state, values)
        return found

    return tell


def padded(values: np.ndarray, size: int) -> np.ndarray:
    """The values, followed by NaN for the points that were not evaluated."""
    missing = max(size - len(values), 0)
    widths = [(0, missing)] + [(0, 0)] * (np.ndim(values) - 1)
    return np.pad(values, widths, constant_values=np.nan)


def num_moved(candidates: Any) -> int:
    """The number of candidates up to the last that differs from the first, θ."""
    n = len(jax.tree.leaves(candidates)[0])
    differs = np.zeros(n, bool)
    for leaf in jax.tree.leaves(candidates):
        differs |= np.any((leaf != leaf[:1]).reshape(n, -1), axis=1)
    return int(np.max(np.flatnonzero(differs), initial=0)) + 1


def checksum(params: optax.Params) -> jax.Array:
    """A number that tells whether parameters are equal to the last bit: uint32.

    A sum of integers, which does not depend on its order.
    """
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(params):
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{jnp.finfo(leaf.dtype).bits}")
        if leaf.dtype.itemsize == 8:
            bits = bits ^ (bits >> 32)
        bits = bits.astype(jnp.uint32)
        # Odd multipliers, so that no change of a single element is lost.
        weights = jnp.ones((), jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            weights = weights * np.uint32(max(size, 1)) + place
        hashed = jnp.sum(bits * (2 * weights + 1), dtype=jnp.uint32)
        total = total * np.uint32(31) + hashed
    return total


checksum_of = jax.jit(checksum)


def as_values(values: Any, params: optax.Params) -> np.ndarray:
    """Values as an array of the dtype in which they are used."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise TypeError(
            f"values must be real numbers, NaN for what failed; got {values!r}."
        )
    # Values beyond float32 are infinite: they failed.
    with np.errstate(all="ignore"):
        return array.astype(trees.widest(params))


def _check_state(state: Any) -> None:
    if not isinstance(state, AskTellState):
        raise TypeError(f"state must be an AskTellState, of init; got {state!r}.")
