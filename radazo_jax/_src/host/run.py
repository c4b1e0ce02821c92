"""The run of a method: it asks, the table answers, and the rest is evaluated."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from radazo_jax._src.base import checks, trees
from radazo_jax._src.estimates.external import Calls, Mistake, Reply
from radazo_jax._src.host import begin
from radazo_jax._src.host.answers import (
    Answer,
    Answers,
    Candidate,
    Question,
    Tally,
    values_of,
)
from radazo_jax._src.host.questions import Questions
from radazo_jax._src.host.table import Evaluations, Row, Table
from radazo_jax._src.host.vectors import Vectors
from radazo_jax._src.methods import ends
from radazo_jax._src.methods.contract import Method
from radazo_jax._src.runs import history
from radazo_jax._src.runs.budget import Budget
from radazo_jax._src.runs.loop import Steps
from radazo_jax._src.runs.results import Best, Report, Stage
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


class MethodRun(Steps):
    """The steps of a method.

    A step is what a method asks for at once. If the function is noisy, the best points
    are evaluated again at the end.
    """

    def __init__(
        self,
        method: Method,
        questions: Questions,
        vectors: Vectors,
        table: Table,
        budget: Budget,
        calls: Calls,
        policy: Policy,
        path: str | None,
    ):
        """Takes no step yet.

        Args:
          method: The method.
          questions: Its generator.
          vectors: Converts points.
          table: The table, which has begun.
          budget: The budgets, which have started.
          calls: Calls the function.
          policy: The rule by which failures end the run.
          path: The path of the journal; `None` without one.
        """
        super().__init__(budget)
        self._residuals = begin.has_residuals(method)
        self._questions, self._vectors, self._calls = questions, vectors, calls
        self._policy, self._path = policy, path
        self._where = "evaluations" if path is None else f"journal {path}"
        self._tally = Tally(questions.start.params, begin.value_of(method))
        self._answers = Answers(table, self._tally, self._evaluate)
        self._further: dict[bytes, list[float]] = {}  # Further values of points.
        self._confirmed: Candidate | None = None
        self.best = self.best_of()
        self._used: list[Answer] = []  # The new ones of the latest step.
        self._idle = 0
        self._seconds, self._shown = 0.0, 0.0
        # The latest answer that was read from a file, until it is compared.
        self._known: Answer | None = None
        self._compares, self._scale = path is not None, 0.0
        self._num_new, self._tells_again = 0, True
        self._mistakes = self._errors = 0
        self._told: set[bool] = set()  # The kinds of failures that were warned of.
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
    def dtype(self) -> Any:
        return np.dtype(np.float64)

    @property
    def failures(self) -> Failures:
        return self._tally.failures(self._vectors.dimension)

    def has_used(self, count: int) -> bool:
        del count
        return bool(np.isfinite(self._tally.best.value))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(self._questions.stages)

    @property
    def reason(self) -> str:
        return self._questions.reason

    def ended(self) -> str:
        return ends.stopped(self.reason)

    @property
    def evaluations(self) -> Evaluations:
        return self._answers.table.shown()

    @property
    def fit(self) -> Any:
        return self._questions.fit

    @property
    def unused(self) -> tuple[str, ...]:
        end = self._questions.end
        found = () if end is None or end.unused is None else np.flatnonzero(end.unused)
        return tuple(self._vectors.name(int(i)) for i in found)

    def best_of(self) -> Best:
        """The best point, in arrays that nobody else has."""
        return (self._confirmed or self._tally.best).as_best(self._vectors)

    def params(self, stopped: str) -> Any:
        del stopped
        return self.so_far()

    def so_far(self) -> Any:
        return self.best_of().params

    # Steps.

    def resume(self) -> None:
        """Takes the steps whose values are all in the table.

        Raises:
          RunError: If a point could not be evaluated again.
        """
        questions = self._questions
        while not self.budget.reason() and questions.end is None:
            found = self._answers.of_step(questions.asked)
            if not found or self._answers.missing(found):
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
        tally, budget = self._tally, self.budget
        begun, new, step = time.perf_counter(), self._num_new, self.number
        of_step = self._answers.of_step(self._questions.asked)
        answers = self._asked(of_step, budget.evaluations_left())
        self._used = [x for x in answers if x.is_new]
        value, values = np.nan, np.array([x.value for x in answers])
        if len(self._used):
            value = float(np.fmin.reduce([x.value for x in self._used]))
        is_whole = len(answers) == len(of_step)
        if tally.is_noisy:
            if is_whole:
                budget.reserve(_SHARE, _FEWEST)
            if value <= budget.progress.target:
                mean, count = self._mean_of(tally.lowest[0], _TARGET)
                value = mean if count == _TARGET else np.nan
        if is_whole and answers:
            values_read = values_of(answers, self._residuals)
            if self._questions.answer(values_read, tally.resolution):
                self._answers.restart()
            tally.skipped += not np.isfinite(values).any()
            end = self._questions.end
            if end is not None and end.unused is not None:
                tally.move(end.params)
                self.best = self.best_of()
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
        row = history.of_values(values) | {
            "step": step,
            "evaluations": len(self._used),
            "failed": sum(np.isnan(x.value) for x in self._used),
            "seconds": seconds or sum(x.row.seconds for x in self._used),
        }
        finite = values[np.isfinite(values)]
        row["value"] = finite.min() if len(finite) else np.nan
        self.rows.append(row)
        self._seconds, self.last_failure = row["seconds"], self._tally.last_failure
        self.budget.arrived = 0
        self.budget.count_step(value, 0)
        self.best = self.best_of()

    def _asked(
        self, questions: list[Question], most: int, target: float | None = None
    ) -> list[Answer]:
        """Answers questions, and counts the values that are used."""
        if target is None:
            target = float(self.budget.progress.target)
        self._target = target
        answers = self._answers.answered(questions, most, target)
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
        if np.isfinite(self._tally.best.value):
            self._calls.works = True
        again = sum(self._answers.table.is_evaluated_again(*x[1:]) for x in questions)
        if again and self._tells_again:
            self._tells_again = False
            checks.warn(
                f"{self._where} has failures after its last finite value. They are "
                "evaluated again, once, where the method asks for them."
            )
        points = [question.point for question in questions]
        vectors = self._vectors
        # What has arrived is used before an error is raised.
        try:
            self._is_interrupted = not self._calls.each(
                len(points),
                lambda i: vectors.one(points[i]),
                lambda: vectors.trees(np.array(points)),
                lambda i, reply: self._write(questions[i], reply),
            )
        except Mistake as mistake:
            self._error = _error(str(mistake), mistake.__cause__)
        except (RuntimeError, OSError) as error:
            text = (
                f"step {self.number} could not be taken: {error} The error's result is "
                "the run up to this step."
            )
            self._error = _error(text, error)
        except BaseException as error:
            self._error = error

    def _raise(self) -> None:
        """Raises the error that has ended the run, if there is one."""
        if self._error is not None:
            raise self._error

    def _write(self, question: Question, reply: Reply) -> bool:
        """Adds a row; returns whether the run ends here."""
        self._num_new += 1
        reply = self._of_one_length(reply)
        is_mistake = reply.mistake is not None
        row = Row(
            question.name,
            reply.value,
            reply.problem,
            reply.seconds,
            question.repeat,
            reply.dtype,
            is_mistake,
            reply.info,
        )
        self._answers.table.add(row)
        self.budget.arrived += 1
        self._look(reply)
        now = time.perf_counter()
        if now - self._shown > _SHOWN:
            self._shown = now
            self.show()
        fails = bool(reply.problem) and self._policy.on_failure == "raise"
        if fails or self._error is not None or self.budget.seconds_left() <= 0:
            return True
        return self._tally.value_of(row) <= self._target

    def _of_one_length(self, reply: Reply) -> Reply:
        """A reply, which is a mistake if it has another number of residuals."""
        found = np.shape(reply.value)
        if reply.problem or not self._residuals or not found:
            return reply
        self._length = self._length or found
        if found == self._length:
            return reply
        text = f"returned {found[0]} residuals, and {self._length[0]} at another point"
        return Reply(np.nan, reply.info, text, TypeError(f"fun {text}"))

    def _look(self, reply: Reply) -> None:
        """Tells of failures that are no property of a point, and ends the run."""
        if not reply.problem:
            self._mistakes = self._errors = 0
            return
        self.num_failed += 1
        text = reply.problem.rstrip(".")
        is_mistake = reply.mistake is not None
        self._mistakes = self._mistakes + 1 if is_mistake else 0
        has_value = np.isfinite(self._tally.best.value)
        is_early = reply.raised and not has_value and not is_mistake
        self._errors = self._errors + 1 if is_early else 0
        if max(self._mistakes, self._errors) == 1 and is_mistake not in self._told:
            self._told.add(is_mistake)
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
        replies: list[Reply] = []

        vectors, point = self._vectors, known.question.point
        try:
            self._calls.each(
                1,
                lambda i: vectors.one(point),
                lambda: vectors.trees(point[None]),
                lambda i, reply: replies.append(reply),
            )
        except Mistake as mistake:
            raise RunError(str(mistake)) from mistake.__cause__
        except (RuntimeError, OSError) as error:
            raise RunError(
                "journal has a point that could not be evaluated again: "
                f"{error} The error's result is the run in the journal."
            ) from error
        for reply in replies:
            row = Row(known.row.point, reply.value, dtype=known.row.dtype)
            now = self._tally.value_of(row)
            rounding = trees.rounding(np.zeros(0, known.row.dtype or float))
            if not abs(now - known.value) <= rounding * self._scale:
                checks.warn(
                    f"journal {self._path} has the value {known.value:.9g} at a point "
                    f"of step {self.number - 1}, at which fun now returns {now:.9g}. "
                    "Unless fun is noisy, it is another function: the run continues "
                    "with it from the values of the journal. To begin anew, give "
                    "another path."
                )

    # The end of a noisy run.

    def _mean_of(self, candidate: Candidate, count: int) -> tuple[float, int]:
        """The mean of further values at a point, and their number, at most so many.

        There are fewer if the budget does not allow them, or a call was interrupted.
        """
        known = self._further.setdefault(candidate.point.tobytes(), [])
        missing = min(count - len(known), self.budget.again_left())
        if missing > 0:
            points = np.repeat(candidate.point[None], missing, axis=0)
            questions = self._answers.questions(points, again=True)
            found = self._asked(questions, missing, -np.inf)
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
        tally = self._tally
        if not tally.is_noisy or stopped in ("interrupted", "callback", "failure"):
            return
        candidates, center = list(tally.lowest), self._questions.asked.center
        known = {candidate.point.tobytes() for candidate in candidates}
        if center is not None and center.tobytes() not in known:
            candidates.append(Candidate(-1, center, np.nan))
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
        points = np.array([x.question.point for x in used])
        return Report(
            self.rows[-1]["step"] + 1,
            np.array([x.value for x in used]),
            self._vectors.trees(points.reshape(-1, self._vectors.dimension)),
            self.best_of(),
            None,
            self.evaluations,
        )

    def figures(self) -> dict[str, str]:
        rate = len(self._used) / max(self._seconds, 1e-9)
        best = (self._confirmed or self._tally.best).value
        found = {"best": f"{best:.6g}", "evaluations/s": f"{rate:.3g}"}
        stages = self._questions.stages
        return found | ({"stage": stages[-1].method} if stages else {})

    def close(self) -> None:
        """Says how much of the table the run has not used."""
        table = self._answers.table
        rows = [row for row in table.rows[: table.num_read] if not row.failure]
        unused = sum(not row.is_used for row in rows)
        if self._num_new and unused:
            checks.warn(
                f"{self._where} has {len(rows)} values, of which the run used "
                f"{len(rows) - unused}: the method asked for other points."
            )


def _error(text: str, cause: BaseException | None) -> RunError:
    """The error of a run, with its cause."""
    error = RunError(text)
    error.__cause__ = cause
    return error
