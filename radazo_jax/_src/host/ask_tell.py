"""Ask and tell: a method, or an optimizer, whose values come from elsewhere."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import optax

from radazo_jax._src.base import checks, shown, trees
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates.contracts import GradientEstimator
from radazo_jax._src.estimates.external import narrow, unmasked
from radazo_jax._src.host.method_run import MethodRun, Question
from radazo_jax._src.host.problem import Problem
from radazo_jax._src.host.table import Evaluations, EvaluationTable, Row
from radazo_jax._src.host.vectors import Vectors
from radazo_jax._src.methods.contract import Method
from radazo_jax._src.methods.policy import untuned
from radazo_jax._src.runs.results import Best, Stage
from radazo_jax._src.steps import states
from radazo_jax._src.steps.box import BoundsLike, as_bounds
from radazo_jax._src.steps.states import Run, SolverState
from radazo_jax._src.train import stepper
from radazo_jax._src.train.stepper import AskTellOptimizer, Stepper


class AskTell:
    """A run of a method that asks for points and is told their values.

    It can be pickled between an `ask` and the values, if its method can be.
    """

    def __init__(self, problem: Problem, table: EvaluationTable):
        """Begins the run, or continues it from a table.

        Args:
          problem: The problem.
          table: The evaluations so far.
        """
        self._run = MethodRun(problem, table, limited=False)
        self._advance()

    def __reduce__(self) -> tuple[object, ...]:
        method, vectors, *others = self._run.problem
        step = vectors.tree_of(vectors.step)
        return _restored, (self.evaluations, vectors.tree, step, method, *others)

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            step=str(self._run.questions.step),
            evaluations=str(self._run.statistics.count),
            best=repr(self.best),
        )

    @property
    def best(self) -> Best:
        """The best point so far, its value, and the number of its evaluation."""
        return self._run.best_of(self._run.statistics.best)

    @property
    def params(self) -> optax.Params:
        """The best point so far, a tree of NumPy arrays."""
        return self.best.params

    @property
    def ended(self) -> str:
        """The reason for which the method has ended, or an empty string."""
        return self._run.questions.reason

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the method, and why each of them followed."""
        return tuple(self._run.questions.stages)

    @property
    def evaluations(self) -> Evaluations:
        """The table of all evaluations."""
        return self._run.table.shown()

    @property
    def fit(self) -> object:
        """The fit of a method of least squares; otherwise `None`."""
        return self._run.questions.fit

    def ask(self) -> optax.Params:
        """Returns the points of the step whose values are not known yet.

        Another call returns the same points. They are the caller's.

        Returns:
          A tree like the parameters of NumPy arrays with one additional axis, the
          first, of size n.

        Raises:
          ValueError: If the method has ended.
          RunError: If the method raised, or yielded something other than points.
        """
        if self.ended:
            raise ValueError(
                "ask must be called before the method ends; got a run that has ended: "
                f"{self.ended}. Read its params."
            )
        self._run.questions.check()
        points = np.array([question.point for question in self._missing])
        return self._run.problem.vectors.tree_of(points)

    def tell(self, values: npt.ArrayLike) -> None:
        """Takes values, and asks the method for the next points if it has all of them.

        Args:
          values: The values at the first points of `ask`, [m], NaN for points that
            failed. If they are not all, `ask` returns the others. A method of least
            squares takes residuals, [m, r].

        Raises:
          TypeError, ValueError: If the values are no numbers, are too many or have
            another shape.
          RunError: As `ask`.
        """
        self._run.questions.check()
        residuals = self._run.problem.residuals
        given = checks.as_values(unmasked(values), np.float64)
        n, ndim = len(self._missing), 2 if residuals else 1
        if given.ndim != ndim or not 0 < len(given) <= n:
            shape = f"({n}, r), residuals" if residuals else f"({n},)"
            raise ValueError(
                f"values must have one value per point, shape {shape}; got shape "
                f"{given.shape}. Call ask first: it returns the points."
            )
        dtype = narrow(np.asarray(values))
        for question, value in zip(self._missing, given, strict=False):
            number: Any = value if residuals else float(value)
            failure = "" if np.isfinite(value).all() else "failed"
            row = Row(question.name, number, failure, 0.0, question.repeat, dtype)
            self._run.table.add(row)
        self._advance()

    def _advance(self) -> None:
        """Answers the method as far as the table does."""
        run, questions = self._run, self._run.questions
        self._missing: list[Question] = []
        while questions.end is None and len(questions.asked.points):
            asked = run.step_questions()
            self._missing = run.missing(asked)
            # What is told of a step is known at once.
            answers = run.answered(asked)
            if self._missing:
                return
            run.send(answers)


def _restored(
    evaluations: Evaluations,
    tree: optax.Params,
    step: optax.Params,
    method: Method,
    *others: Any,
) -> AskTell:
    """Returns a run that was pickled."""
    problem = Problem(method, Vectors(tree, step), *others)
    return AskTell(problem, EvaluationTable(None, evaluations, evaluates_again=False))


@checks_names
def ask_tell(
    params: optax.Params,
    optimizer: optax.GradientTransformation | Method | None = None,
    estimator: GradientEstimator | None = None,
    *,
    key: jax.typing.ArrayLike = 0,
    bounds: BoundsLike | None = None,
    step: optax.Params | None = None,
    evaluations: Evaluations | None = None,
    state: SolverState | None = None,
    best: Best | None = None,
) -> AskTell | AskTellOptimizer:
    """Minimizes a function that is evaluated by hand, or by anything else.

    `ask_tell(params, method)` takes the steps of `minimize`, and `ask_tell(params,
    optimizer, estimator)` the steps of `train`. Use it if evaluations are replies of a
    cluster, measurements, or ratings of people.

    Args:
      params: The starting point, a tree of floating-point arrays. Not modified. NumPy's
        float64 is kept.
      optimizer: A method such as `methods.untuned()`, the default; or an Optax
        transformation such as `radazo(1e-3)`. The latter gets `value`, `grad` and
        `slope` as extra arguments, as in `train`, and no `value_fn`.
      estimator: An estimator, such as `forward_difference()`, if an Optax
        transformation is given.
      key: The key of the whole run; it is consumed.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which the parameters and all points stay.
        A list of pairs, one for each element of an array of parameters, is read as
        SciPy reads it. `None` is no bound. A point that is moved into the box is no
        longer along its direction, which biases estimates at the border.
      step: As in `minimize`, for a method.
      evaluations: As in `minimize`, for a method.
      state: A state to continue from, the `state` of such a run or of a result, for an
        optimizer. Its parameters and key replace `params` and `key`.
      best: The `best` of the run whose state is given.

    Returns:
      The run. Call `ask` for the points of a step, and `tell` their values. With an
      optimizer, both compile at their first call. Values that are not finite are
      treated as by `minimize` and `train` with `on_failure="drop"`.

    Raises:
      TypeError, ValueError: If an argument has the wrong type, or `params` do not lie
        within the bounds.
      RunError: If a method raises or yields something other than points, in `ask`.

    Examples:
      >>> import numpy as np
      >>> import radazo_jax as zo
      >>> run = zo.ask_tell(np.zeros(3))
      >>> while not run.ended:
      ...     points = run.ask()
      ...     run.tell([np.sum((x - 1.0) ** 2) for x in points])
      >>> bool(run.best.value < 1e-9)
      True

      An optimizer and an estimator:

      >>> start = np.zeros(3, np.float32)
      >>> run = zo.ask_tell(start, zo.radazo(3e-2), zo.forward_difference())
      >>> for _ in range(100):
      ...     points = run.ask()
      ...     run.tell([np.sum((x - 1.0) ** 2) for x in points])
      >>> points.shape, bool(np.abs(run.params - 1).max() < 0.1)
      ((11, 3), True)
    """
    checks.check_called(optimizer)
    if estimator is not None and callable(optimizer):
        raise ValueError(
            "estimator must be None with a method, which chooses its points; got "
            f"{shown.part(estimator)}. Leave it out, or name an optimizer."
        )
    is_optimizer = estimator is not None or hasattr(optimizer, "update")
    only = {"step": step, "evaluations": evaluations}
    if not is_optimizer:
        only = {"state": state, "best": best}
    for name, value in only.items():
        if value is not None:
            kinds = ("a method", "an optimizer")[:: 1 if is_optimizer else -1]
            raise ValueError(
                f"{name} must be None unless {kinds[0]} takes the steps; got "
                f"{shown.tree(value)} with {kinds[1]}."
            )
    if not is_optimizer:
        method: Any = untuned() if optimizer is None else optimizer
        table = EvaluationTable(None, evaluations)
        problem = Problem.of(method, params, bounds, step, key)
        table.begin(problem)
        return AskTell(problem, table)
    states.check_run(optimizer, estimator)
    initial = trees.with_float64(params)
    assert estimator is not None
    run = Run(None, None, optimizer, estimator, bounds=as_bounds(bounds))
    with trees.precision_of(initial if state is None else state.params):
        begun = stepper.begin(run, initial, key, state)
        # Copies are made later than calls return; the caller may write to `params`.
        jax.block_until_ready(begun)
        return AskTellOptimizer(Stepper(run, begun), best)
