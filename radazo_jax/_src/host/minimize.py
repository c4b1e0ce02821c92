"""`minimize`: any Python function, from its values alone."""

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager

import jax
import numpy as np
import optax

from radazo_jax._src.base import checks, trees
from radazo_jax._src.base.names import checks_names
from radazo_jax._src.estimates.external import Calls, External, Mistake
from radazo_jax._src.estimates.pools import Output
from radazo_jax._src.host.method_run import Answer, MethodRun, Question
from radazo_jax._src.host.problem import Problem
from radazo_jax._src.host.table import Evaluations, EvaluationTable, Row, TableFile
from radazo_jax._src.methods import ends
from radazo_jax._src.methods.contract import Method
from radazo_jax._src.methods.policy import untuned
from radazo_jax._src.runs import history, lines, loop
from radazo_jax._src.runs.budget import Budget
from radazo_jax._src.runs.results import Best, Report, Result
from radazo_jax._src.steps.box import BoundsLike
from radazo_jax._src.steps.states import Failures, Policy, RunError

# The share of the evaluations of a noisy run that compares its best points, the least
# number of them, and the number of evaluations by which a target is met.
_SHARE, _FEWEST, _TARGET = 0.1, 10, 4

# So many mistakes in a row end a run, and so many errors if there is no value yet.
_MOST_MISTAKES = 10

# So many steps in a row without a new point end a run, which no budget would end.
_MOST_IDLE = 10_000

# Seconds between two updates of the progress bar within a step.
_SHOWN = 0.1


@checks_names
def minimize(
    fun: Callable[[optax.Params], object],
    params: optax.Params,
    method: Method = untuned(),
    *,
    bounds: BoundsLike | None = None,
    step: optax.Params | None = None,
    workers: int | None = None,
    executor: futures.Executor | Callable[[], futures.Executor] | None = None,
    batched: bool = False,
    timeout: float | None = None,
    retries: int = 0,
    max_evaluations: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    patience: int | None = None,
    key: jax.typing.ArrayLike = 0,
    evaluations: Evaluations | None = None,
    journal: lines.Path | None = None,
    on_failure: str = "drop",
    max_consecutive_failures: int = 10,
    callback: Callable[[Report], object] | None = None,
    progress: bool = True,
) -> Result:
    """Minimizes any Python function of up to 10,000 numbers from its values alone.

    A method on the host chooses points by the values so far. The default method needs
    no settings: it finds out from the first values whether the function is smooth,
    noisy, piecewise constant or badly scaled. Use `train` for a network or a language
    model, and for a loss on minibatches.

    A run is a table of evaluations. What the table knows is not evaluated again, so the
    same call with the same `journal` continues a run that was killed, that ended in an
    outage, or that had another budget. The result is the same as the result of a run
    with the last budget alone.

    Args:
      fun: `fun(params)` gets a tree of NumPy arrays and returns a number, or a pair of
        a number and anything else. An array of one element is a number. The arrays are
        its own. The dtype of the first values sets their resolution. For a function of
        JAX, pass `jax.jit(fun)`, or `jax.jit(jax.vmap(fun))` with `batched`.
      params: The starting point, a tree of floating-point arrays. Not modified. NumPy's
        float64 is kept, also if JAX has 64 bits disabled, and Python's floats are
        float64.
      method: The method: `methods.untuned()`, another one of `methods`, or a generator
        function of your design.
      bounds: A tuple `(lower, upper)` of numbers, or of trees like the parameters, or a
        `scipy.optimize.Bounds`: the box in which all points stay. A list of pairs, one
        for each element of an array of parameters, is read as SciPy reads it. `None` is
        no bound.
      step: Spacing of the values of parameters: a number of at least 0, or a tree like
        the parameters of numbers and arrays that broadcast to the leaves. 1 is for
        whole numbers, and 0 for continuous parameters. All points are multiples of it
        in the dtype of the parameters, and so are the bounds once they are rounded
        inward. A start that is no multiple is rounded, with a warning.
      workers: As in `external`: the number of processes that evaluate points. `None`
        evaluates them in turn, unless an executor is given.
      executor: As in `external`: an executor, or a function that makes one.
      batched: As in `external`: whether `fun` takes several points at once, a tree of
        arrays [n, …]. n differs between calls.
      timeout: As in `external`: seconds after which points that run have failed. Their
        later values are dropped.
      retries: As in `external`: the number of further evaluations of a failed point.
      max_evaluations: The most evaluations that the run uses, of this call or of
        earlier ones. If a run has seen noise, a tenth of them compares its best points
        at the end. Retries are not counted.
      max_seconds: The most seconds from the start of this call. The run ends after the
        first evaluation that ends later.
      target: A finite number. The run ends after the first evaluation whose value is
        not above it; if the run has seen noise, once the mean of four further values at
        the best point is not above it.
      patience: The run ends after so many steps in a row without a new lowest value. A
        step is what a method asks for at once.
      key: The key of the run: a key of JAX, or an integer.
      evaluations: The `evaluations` of an earlier result or report, from which this
        call continues.
      journal: The path of a file to which each evaluation is added when its value
        arrives; the same call continues from it. Failures after its last finite value
        are evaluated again, once. One known point is evaluated again, and another value
        is a warning. `pandas.read_json(path, lines=True,
        precise_float=True)` reads the file, whose first line describes the run.
      on_failure: The treatment of points at which `fun` raises an error, or returns
        anything but a finite number. "drop": the method goes around them. "raise": the
        run ends.
      max_consecutive_failures: The number of steps in a row without a value that ends
        the run; d + 1 failures in a row count as a step. Before the first value, so
        many errors in a row end it.
      callback: `callback(report)`, called after each step with new evaluations. A true
        return value, or StopIteration, ends the run.
      progress: Whether to show progress: a `tqdm` bar if that is installed, else lines
        on stderr.

    Returns:
      The result, of NumPy arrays. The first Ctrl-C ends the run after the evaluation
      that runs. A second one raises `KeyboardInterrupt`.

    Raises:
      TypeError, ValueError: If an argument is not valid; if the journal is damaged, or
        of a run with another start, key, dtype, box or grid.
      RunError: If `fun` fails by a mistake in it, or too often; if a method breaks its
        contract; if a point could not be evaluated or written. As with any error of
        `callback` and with `KeyboardInterrupt`, `error.result` is the result so far.

    Examples:
      >>> import numpy as np
      >>> import radazo_jax as zo
      >>> def fun(x):
      ...     return (x[0] - 1) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
      >>> result = zo.minimize(fun, np.zeros(2), max_evaluations=90, progress=False)
      >>> result.best.params.round(2)
      array([1., 1.])
    """
    budget = Budget(
        None, max_evaluations, max_seconds, target, patience, default_steps=None
    )
    policy = Policy.of(on_failure, max_consecutive_failures)
    evaluator = External(workers, executor, batched, timeout, retries)
    checks.check_fun(fun)
    checks.check_callback(callback)
    problem = Problem.of(method, params, bounds, step, key)
    with ExitStack() as stack:
        file = None
        if journal is not None:
            file = stack.enter_context(TableFile(journal).opened())
        table = EvaluationTable(file, evaluations)
        run = MethodRun(problem, table, limited=not budget.is_open)
        problem.vectors.warn_of_rounding(run.questions.start.params)
        budget.start(1, 0, np.float64)
        table.begin(problem)
        interrupted = stack.enter_context(loop.interruptible())
        opened = evaluator.open(
            fun, residuals=problem.residuals, interrupted=interrupted
        )
        steps = MethodSteps(run, budget, stack.enter_context(opened), policy)
        return loop.run(steps, policy, callback, progress)


class MethodSteps(loop.Steps):
    """The steps of a method.

    A step is what a method asks for at once. If the function is noisy, the best points
    are evaluated again at the end.
    """

    def __init__(self, run: MethodRun, budget: Budget, calls: Calls, policy: Policy):
        """Takes no step yet.

        Args:
          run: The run, whose table has begun.
          budget: The budgets, which have started.
          calls: Calls the function.
          policy: The rule by which failures end the run.
        """
        super().__init__(budget)
        self._run, self._calls, self._policy = run, calls, policy
        self._questions, self._statistics = run.questions, run.statistics
        self._vectors, self._table = run.problem.vectors, run.table
        self._further: dict[bytes, list[float]] = {}  # Further values of points.
        self._confirmed: Best | None = None
        self.best = self._best()
        self._used: list[Answer] = []  # The new ones of the latest step.
        self._idle = 0
        self._seconds, self._shown = 0.0, 0.0
        # The latest answer that was read from a file, until it is compared.
        self._known: Answer | None = None
        self._compares, self._scale = run.table.path is not None, 0.0
        self._num_new, self._tells_again = 0, True
        self._mistakes = self._errors = 0
        self._warned: set[bool] = set()  # The kinds of failures that were warned of.
        self._length: tuple[int, ...] = ()  # The number of residuals.
        self._error: BaseException | None = None
        self._target = -np.inf  # No point is evaluated after such a value.
        self._is_interrupted = False

    still = (
        "If fun is piecewise constant, pass methods.untuned(scale=...), with the size "
        "of a change of the parameters that crosses several pieces."
    )

    # What is known of the run.

    @property
    def state(self) -> None:
        return None

    @property
    def number(self) -> int:
        return self._questions.step

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float64)

    @property
    def failures(self) -> Failures:
        return self._statistics.failures()

    def has_used(self, count: int) -> bool:
        del count
        return bool(np.isfinite(self._statistics.best.value))

    def ended(self) -> str:
        return ends.stopped(self._questions.reason)

    def _best(self) -> Best:
        return self._run.best_of(self._confirmed or self._statistics.best)

    def completed(self, result: Result) -> Result:
        questions = self._questions
        unused = None if questions.end is None else questions.end.unused
        places = () if unused is None else np.flatnonzero(unused)
        return result._replace(
            reason=questions.reason,
            stages=tuple(questions.stages),
            evaluations=self._table.shown(),
            fit=questions.fit,
            unused=tuple(self._vectors.name(int(i)) for i in places),
        )

    def params(self, stopped: str) -> optax.Params:
        """Returns the best point; warns of what the run has not used of the table."""
        table = self._table
        rows = [row for row in table.rows[: table.num_read] if not row.failure]
        unused = sum(not row.is_used for row in rows)
        if stopped != "failure" and self._num_new and unused:
            checks.warn(
                f"{table.name} has {len(rows)} values, of which the run used "
                f"{len(rows) - unused}: the method asked for other points."
            )
        return self._best().params

    # Steps.

    def resume(self) -> None:
        """Takes the steps whose values are all in the table.

        Raises:
          RunError: If a point could not be evaluated again.
        """
        questions, run = self._questions, self._run
        while not self.budget.reason() and questions.end is None:
            asked = run.step_questions()
            if not asked or run.missing(asked):
                break
            self._take()
        if self._known is not None:
            self._compare()

    def take(self) -> bool:
        before, questions = len(self.rows), self._questions
        while len(self.rows) == before and questions.end is None:
            if not self._take():
                return False
            if self.budget.reason():
                break
        return True

    def _take(self) -> bool:
        """Takes a step, or a part of one; returns whether it was not interrupted."""
        self._questions.check()
        statistics, budget = self._statistics, self.budget
        begun, new, step = time.perf_counter(), self._num_new, self.number
        of_step = self._run.step_questions()
        target = float(budget.progress.target)
        answers = self._answered(of_step, budget.evaluations_left(), target)
        self._used = [x for x in answers if x.is_new]
        value, values = np.nan, np.array([x.value for x in answers])
        if len(self._used):
            value = float(np.fmin.reduce([x.value for x in self._used]))
        is_whole = len(answers) == len(of_step)
        if statistics.is_noisy:
            if is_whole:
                budget.reserve(_SHARE, _FEWEST)
            if value <= target:
                mean, count = self._mean_of(statistics.lowest[0], _TARGET)
                value = mean if count == _TARGET else np.nan
        if is_whole and answers:
            self._run.send(answers)
            end = self._questions.end
            if end is not None and end.unused is not None:
                statistics.move(end.params)
                self.best = self._best()
        self._idle = 0 if self._used else self._idle + 1
        if self._idle == _MOST_IDLE:
            self._error = RunError(
                f"the method must ask for new points; got {_MOST_IDLE:,} steps in a "
                "row without one. The error's result is the run up to there."
            )
        if self._used:
            is_live = self._num_new > new
            seconds = time.perf_counter() - begun if is_live else 0.0
            self._record(step, values, value, seconds)
        self._raise()
        return not self._is_interrupted

    def _record(
        self, step: int, values: np.ndarray, value: float, seconds: float
    ) -> None:
        """Counts a step, and adds its row to the history."""
        seconds = seconds or sum(x.row.seconds for x in self._used)
        finite = values[np.isfinite(values)]
        row = history.of_values(values) | {
            "step": step,
            "value": finite.min() if len(finite) else np.nan,
            "evaluations": len(self._used),
            "failed": sum(np.isnan(x.value) for x in self._used),
            "seconds": seconds,
        }
        self.rows.append(row)
        self._seconds, self.last_failure = seconds, self._statistics.last_failure
        self.budget.arrived = 0
        self.budget.count_step(value, 0)
        self.best = self._best()

    def _answered(
        self, questions: list[Question], most: int, target: float
    ) -> list[Answer]:
        """Answers questions, and counts the values that are used."""
        self._target = target
        answers = self._run.answered(questions, most, target, self._evaluate)
        new = [x for x in answers if x.is_new]
        self.budget.evaluations += len(new)
        finite = [x for x in new if np.isfinite(x.value)]
        if finite and not self._num_new and self._compares:
            self._known = finite[-1]
            self._scale = max(abs(x.value) for x in finite)
        return answers

    # Evaluations.

    def _evaluate(self, questions: list[Question]) -> None:
        """Adds rows of questions to the table."""
        if self._known is not None:
            self._compare()
        if np.isfinite(self._statistics.best.value):
            self._calls.works = True
        again = sum(self._table.is_evaluated_again(*x[1:]) for x in questions)
        if again and self._tells_again:
            self._tells_again = False
            checks.warn(
                f"{self._table.name} has failures after its last finite value. They "
                "are evaluated again, once, where the method asks for them."
            )
        points = np.array([question.point for question in questions])
        text = f"step {self.number} could not be taken: {{}} The error's result is the "
        # What has arrived is used before an error is raised.
        try:
            with _as_run_errors(text + "run up to this step."):
                self._is_interrupted = not self._calls.each(
                    len(points),
                    lambda i: self._vectors.tree_of(points[i]),
                    lambda i, output: self._write(questions[i], output),
                )
        except BaseException as error:
            self._error = error

    def _raise(self) -> None:
        """Raises the error that has ended the run, if there is one."""
        if self._error is not None:
            raise self._error

    def _write(self, question: Question, output: Output) -> bool:
        """Adds a row; returns whether the run ends here."""
        self._num_new += 1
        output = self._of_one_length(output)
        row = Row(question.name, output.value, output.problem, output.seconds)
        row.repeat, row.dtype, row.info = question.repeat, output.dtype, output.info
        row.is_mistake = output.mistake is not None
        self._table.add(row)
        self.budget.arrived += 1
        self._warn_of_failure(output)
        now = time.perf_counter()
        if now - self._shown > _SHOWN:
            self._shown = now
            self.show()
        fails = bool(output.problem) and self._policy.on_failure == "raise"
        if fails or self._error is not None or self.budget.seconds_left() <= 0:
            return True
        return self._statistics.value_of(row.value) <= self._target

    def _of_one_length(self, output: Output) -> Output:
        """Returns an output, a mistake if it has another number of residuals."""
        found = np.shape(output.value)
        if output.problem or not self._run.problem.residuals or not found:
            return output
        self._length = self._length or found
        if found == self._length:
            return output
        text = f"returned {found[0]} residuals, and {self._length[0]} at another point"
        return Output(np.nan, output.info, text, TypeError(f"fun {text}"))

    def _warn_of_failure(self, output: Output) -> None:
        """Warns of failures that are no property of a point, and ends the run."""
        if not output.problem:
            self._mistakes = self._errors = 0
            return
        self.num_failed += 1
        text = output.problem.rstrip(".")
        is_mistake = output.mistake is not None
        self._mistakes = self._mistakes + 1 if is_mistake else 0
        has_value = np.isfinite(self._statistics.best.value)
        is_early = output.raised and not has_value and not is_mistake
        self._errors = self._errors + 1 if is_early else 0
        if max(self._mistakes, self._errors) == 1 and is_mistake not in self._warned:
            self._warned.add(is_mistake)
            kind = "by a mistake in it" if is_mistake else "before it had a value"
            checks.warn(f"fun failed at a point {kind}: {text}. The run continues.")
        most = self._policy.max_consecutive_failures
        if self._mistakes == _MOST_MISTAKES or self._errors == most:
            what = f"by mistakes at {_MOST_MISTAKES} points in a row"
            if not is_mistake:
                what = f"at the first {most} points (max_consecutive_failures)"
            self._error = RunError(
                f"fun failed {what}. The last failure: {text}. The same call continues "
                "the run once fun is corrected, if it has a journal."
            )

    def _compare(self) -> None:
        """Evaluates a known point again, and warns of another value."""
        known, self._known, self._compares = self._known, None, False
        assert known is not None
        outputs: list[Output] = []
        points = known.point[None]
        text = "journal has a point that could not be evaluated again: {} The error's "
        with _as_run_errors(text + "result is the run in the journal."):
            self._calls.each(
                1,
                lambda i: self._vectors.tree_of(points[i]),
                lambda i, output: outputs.append(output),
            )
        for output in outputs:
            now = self._statistics.value_of(output.value)
            rounding = trees.rounding(np.zeros(0, known.row.dtype or float))
            if not abs(now - known.value) <= rounding * self._scale:
                path, step = self._table.path, self.number - 1
                lines.warn_of_another_function(path, step, known.value, now)

    # The end of a noisy run.

    def _mean_of(self, candidate: Best, count: int) -> tuple[float, int]:
        """Returns mean and number of further values at a point, at most so many.

        There are fewer if the budget does not allow them, or a call was interrupted.
        """
        known = self._further.setdefault(candidate.params.tobytes(), [])
        missing = min(count - len(known), self.budget.evaluations_left(compares=True))
        if missing > 0:
            points = np.repeat(candidate.params[None], missing, axis=0)
            questions = self._run.questions_at(points, again=True)
            found = self._answered(questions, missing, -np.inf)
            self._used += found
            self.budget.again += len(found)
            known.extend(x.value for x in found)
        finite = [value for value in known[:count] if np.isfinite(value)]
        return float(np.mean(finite)) if finite else np.inf, len(finite)

    def finish(self, stopped: str) -> Iterator[None]:
        """Evaluates the best points of a noisy run again, and keeps the best mean.

        After each round, half of the points are evaluated about twice as often.

        Args:
          stopped: The reason for which the run has ended.

        Yields:
          After each round.
        """
        if not self._statistics.is_noisy or stopped in (
            "interrupted",
            "callback",
            "failure",
        ):
            return
        candidates, center = list(self._statistics.lowest), self._questions.asked.center
        known = {candidate.params.tobytes() for candidate in candidates}
        if center is not None and center.tobytes() not in known:
            candidates.append(Best(center, np.nan))
        total = self.budget.reserved
        total = total or max(_FEWEST, int(_SHARE * self.budget.evaluations))
        rounds, count = max(1, (len(candidates) - 1).bit_length()), 0
        for _ in range(rounds):
            count += max(1, total // rounds // len(candidates))
            self._used = []
            means = [self._mean_of(candidate, count) for candidate in candidates]
            order = sorted(range(len(means)), key=lambda i: means[i])
            candidates = [candidates[i] for i in order[: -(-len(order) // 2)]]
            if self._used:
                (best, *_), (mean, number) = candidates, min(means)
                if number:
                    self._confirmed = best._replace(value=mean, num_values=number)
                values = np.array([x.value for x in self._used])
                self._record(self.number, values, np.nan, 0.0)
                self._raise()
                yield

    # What is shown.

    def report(self) -> Report:
        used = self._used
        points = np.array([x.point for x in used])
        return Report(
            self.rows[-1]["step"] + 1,
            np.array([x.value for x in used]),
            self._vectors.tree_of(points.reshape(-1, self._vectors.dimension)),
            self._best(),
            None,
            self._table.shown(),
        )

    def figures(self) -> dict[str, str]:
        rate = len(self._used) / max(self._seconds, 1e-9)
        best = (self._confirmed or self._statistics.best).value
        found = {"best": f"{best:.6g}", "evaluations/s": f"{rate:.3g}"}
        stages = self._questions.stages
        return found | ({"stage": stages[-1].method} if stages else {})


@contextmanager
def _as_run_errors(text: str) -> Iterator[None]:
    """Makes errors of calls the errors of a run, with this text about them."""
    try:
        yield
    except Mistake as mistake:
        raise RunError(str(mistake)) from mistake.__cause__
    except (RuntimeError, OSError) as error:
        raise RunError(text.format(error)) from error
