"""Rebuilds a run from its journal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src import trees
from radazo_jax._src.base import Evaluator, GradientEstimator, Search
from radazo_jax._src.evaluators.vectorized import vectorized
from radazo_jax._src.runs import ask_tell, loop, states, step
from radazo_jax._src.runs.box import BoundsLike, as_bounds
from radazo_jax._src.runs.journal import Journal, check_same_run, read
from radazo_jax._src.runs.loop import Path
from radazo_jax._src.runs.states import Run, SolverState
from radazo_jax._src.search.whole import whole


def replay(
    journal: Path,
    params: optax.Params,
    optimizer: optax.GradientTransformation,
    estimator: GradientEstimator,
    search: Search = whole(),
    *,
    evaluator: Evaluator = vectorized(),
    fun: Callable[..., Any] | None = None,
    sample: Callable[[jax.Array], Any] | None = None,
    bounds: BoundsLike | None = None,
    exact: bool = True,
) -> SolverState:
    """Rebuilds a run from the values in its journal, without an evaluation.

    Args:
      journal: The file that `minimize` or `minimize_black_box` wrote.
      params: The starting point of the run.
      optimizer: The optimizer of the run.
      estimator: The estimator of the run.
      search: The search of the run.
      evaluator: The evaluator of the run. It evaluates nothing here, but determines how
        directions are stored, and so how their sums are rounded.
      fun: The function, if `minimize` wrote the journal. It is traced and not
        evaluated: `low_rank` perturbs the matrices that it multiplies.
      sample: As in `minimize`, with `fun`.
      bounds: As in `minimize_black_box`.
      exact: Whether parameters must be bitwise equal to the run's before each step.
        They are equal with the same versions on the same kind of machine. Otherwise
        sums may be rounded in other ways, and an adaptive run amplifies it.

    Returns:
      The state after the last complete step of the journal.

    Raises:
      ValueError: If there is no journal, it is damaged, or it belongs to a run with
        other arguments.

    Examples:
      >>> import os, tempfile
      >>> import jax, jax.numpy as jnp
      >>> import radazo_jax as zo
      >>> run = dict(optimizer=zo.radazo(1e-2), estimator=zo.forward_difference())
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = os.path.join(folder, "run.jsonl")
      ...     result = zo.minimize(
      ...         lambda x: jnp.sum(x**2),
      ...         jnp.ones(3),
      ...         **run,
      ...         num_steps=20,
      ...         key=0,
      ...         progress=False,
      ...         journal=path,
      ...     )
      ...     state = zo.replay(path, jnp.ones(3), **run)
      >>> bool(jnp.all(state.params == result.params))
      True
    """
    found = read(journal)
    if found is None:
        raise ValueError(f"journal must be a file with a run; got {journal!r}.")
    states.check_run(optimizer, estimator, search, evaluator)
    run = Run(fun, sample, optimizer, estimator, search, evaluator, as_bounds(bounds))
    with jax.enable_x64(trees.has_x64() or found.run["dtype"] == "float64"):
        return _replay(journal, found, params, run, exact)


def _replay(
    journal: Path, found: Journal, params: Any, run: Run, exact: bool
) -> SolverState:
    key = jax.random.wrap_key_data(jnp.array(found.run["key"], jnp.uint32))
    state = step.start(run, params, key)
    if exact:
        line = loop.line_of_run(run.fun, state, run.estimator)
        if run.fun is None:
            line["fun"] = found.run["fun"]
        check_same_run(journal, found.run, line)
    state = jax.tree.map(jnp.copy, state)
    tell = ask_tell.teller(step.traced(run, state), state)
    state, _ = loop.rebuild(state, found.records, tell, exact=exact)
    return state
