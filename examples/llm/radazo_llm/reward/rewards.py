"""Rewards of texts: functions, and the processes that run them.

A reward function has the form that TRL and Tunix share:

    def reward(prompts, completions, **columns) -> list[float]

with a text and a reward for each completion; a column has a value for each too, such as
`answer`. `None` and NaN mean that a completion has no reward. A function comes from a
module, `package.module:function`, from a file, `file.py:function`, or is one of those
below.

Functions run in processes of their own: one that hangs is ended, and one that raises
takes its own completions with it.
"""

import ast
import importlib.util
import math
import multiprocessing
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import numpy as np

RewardFunction = Callable[..., Sequence[float | None]]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BEGIN, _END = "<answer>", "</answer>"
_LONGEST = 200  # Characters of an expression.
_MOST_DIGITS = 20  # Of a number in it.
_START = 300.0  # Seconds in which processes must start.
_NOT_STARTED = (
    f"The processes of reward functions must start within {_START:g} s; none did. A "
    "program that uses them must do its work under `if __name__ == '__main__':`."
)
_PATIENCE = 3  # Calls without a result, until a function is given up.
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


# --- Functions --------------------------------------------------------------------


def answer(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    answer: Sequence[str],
    **_: Any,
) -> list[float]:
    """1 if the answer is right. It is in `<answer>` tags, or the whole completion."""
    del prompts
    return [
        float(_same(answered(text), right))
        for text, right in zip(completions, answer, strict=True)
    ]


def countdown(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    target: Sequence[int],
    numbers: Sequence[Sequence[int]],
    **_: Any,
) -> list[float]:
    """1 for an expression of the target that uses the numbers once each."""
    del prompts
    rows = zip(completions, target, numbers, strict=True)
    return [float(_reaches(answered(text), *row)) for text, *row in rows]


def formatted(
    prompts: Sequence[str], completions: Sequence[str], **_: Any
) -> list[float]:
    """1 if there is one pair of `<answer>` tags, with text between and none after."""
    del prompts
    return [
        float(
            text.count(_BEGIN) == text.count(_END) == 1
            and bool((_tagged(text) or "").strip())
            and text.rstrip().endswith(_END)
        )
        for text in completions
    ]


def brevity(
    prompts: Sequence[str], completions: Sequence[str], **_: Any
) -> list[float]:
    """1 for an empty completion, 1/2 at 100 characters, 0 for an endless one."""
    del prompts
    return [100 / (100 + len(text)) for text in completions]


def gym(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    dataset: Sequence[str],
    entry: Sequence[Any],
    **_: Any,
) -> list[float]:
    """The score of the answer by a dataset of the package `reasoning-gym`."""
    import reasoning_gym  # An optional package, and only in these processes.

    del prompts
    rows = zip(completions, dataset, entry, strict=True)
    return [
        reasoning_gym.get_score_answer_fn(name)(answered(text), one)
        for text, name, one in rows
    ]


FUNCTIONS: dict[str, RewardFunction] = {
    "answer": answer,
    "countdown": countdown,
    "format": formatted,
    "length": brevity,
    "gym": gym,
}


def answered(text: str) -> str:
    """The text in the last pair of `<answer>` tags, or all of it."""
    found = _tagged(text)
    return (text if found is None else found).strip()


def _tagged(text: str) -> str | None:
    """The text in the last pair of tags, in a time linear in the text."""
    before, end, _ = text.rpartition(_END)
    _, begin, found = before.rpartition(_BEGIN)
    return found.partition(_END)[0] if begin and end else None


def _same(text: str, right: Any) -> bool:
    """Whether two answers are one text, or one number."""
    given, wanted = text.strip(), str(right).strip()
    if _NUMBER.fullmatch(given) and _NUMBER.fullmatch(wanted):
        return max(len(given), len(wanted)) <= _LONGEST and (
            Fraction(given) == Fraction(wanted)
        )
    return given == wanted


def _reaches(text: str, target: int, numbers: Sequence[int]) -> bool:
    try:
        value, used = arithmetic(text)
    except ValueError:
        return False
    return value == target and sorted(used) == sorted(map(Fraction, numbers))


def arithmetic(text: str) -> tuple[Fraction, list[Fraction]]:
    """The value of an expression of numbers, + − × / and parentheses, and its numbers.

    The text is parsed and never run as code.

    Raises:
      ValueError: If it is anything else, or longer than 200 characters.
    """
    problem = ValueError(f"text must be an arithmetic expression; got {text!r:.80}.")
    if len(text) > _LONGEST or not re.fullmatch(r"[0-9+\-*/(). ]+", text):
        raise problem
    if any(len(digits) > _MOST_DIGITS for digits in re.findall(r"\d+", text)):
        raise problem
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise problem from None
    used: list[Fraction] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            used.append(Fraction(str(node.value)))
            return used[-1]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left), value(node.right)
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise problem

    try:
        return value(tree), used
    except (ZeroDivisionError, OverflowError):
        raise problem from None


def load(name: str) -> RewardFunction:
    """A function by its name.

    Args:
      name: A name in `FUNCTIONS`, file.py:function, or package.module:function.

    Raises:
      ValueError: If there is none.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    module, _, function = name.rpartition(":")
    try:
        found = getattr(_module(module), function)
    except (Exception, SystemExit) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"reward must be one of {', '.join(FUNCTIONS)}, file.py:function, or "
            "package.module:function of a module that can be imported; got "
            f"{name!r} ({text:.100})."
        ) from None
    if not callable(found):
        raise ValueError(f"reward {name!r} must be a function; got {found!r:.80}.")
    return found


def _module(name: str) -> ModuleType:
    """The module of a name, or of a file, which is run once in a process."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    known = f"reward functions of {path}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[known] = module
    return sys.modules[known]


# --- Processes --------------------------------------------------------------------


class Scores(NamedTuple):
    """The rewards of some completions.

    Attributes:
      total: The weighted sum, NaN if one of the functions gave none: float64, [n].
      each: The rewards of each function by name: float64, [n].
      failures: Failures of functions, a line each.
    """

    total: np.ndarray
    each: dict[str, np.ndarray]
    failures: list[str]


class RewardPool:
    """Processes that run reward functions.

    Args:
      weights: The weight of each function, by a name that `load` takes.
      processes: Number of processes.
      timeout: Seconds that a function may take for the completions of one call.
    """

    def __init__(
        self, weights: Mapping[str, float], processes: int = 2, timeout: float = 30.0
    ) -> None:
        for name in weights:
            load(name)
        self.weights, self.processes, self.timeout = dict(weights), processes, timeout
        self._pool: Any = None

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        size: int,
    ) -> Scores:
        """Scores completions, `size` of them in a call.

        A call that raises is made again for each completion alone. Completions of a
        call that does not return in time have no reward.

        Raises:
          ValueError: If a function returns another number of values, or no numbers.
        """
        jobs = [
            (name, *_part(prompts, completions, columns, slice(i, i + size)))
            for name in self.weights
            for i in range(0, len(completions), size)
        ]
        results, failures = self._run(jobs), []
        for i, (job, result) in enumerate(zip(jobs, results, strict=True)):
            if isinstance(result, _Raised):
                name, *given = job
                alone = [
                    (name, *_part(*given, slice(j, j + 1)))
                    for j in range(len(given[1]))
                ]
                parts = self._run(alone) if len(alone) > 1 else [result]
                failures += [str(p.problem) for p in parts if isinstance(p, _Failed)]
                results[i] = [np.nan if isinstance(p, _Failed) else p[0] for p in parts]
            elif isinstance(result, _Failed):
                failures.append(result.problem)
                results[i] = [np.nan] * len(job[2])
        calls = len(jobs) // len(self.weights)
        each = {
            name: np.concatenate(results[i * calls : (i + 1) * calls])
            for i, name in enumerate(self.weights)
        }
        total = sum(weight * each[name] for name, weight in self.weights.items())
        return Scores(np.asarray(total, np.float64), each, failures)

    def _run(self, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The values of each call, or its failure."""
        found: dict[int, Any] = {}
        hung = 0
        while left := [i for i in range(len(jobs)) if i not in found]:
            if self._pool is None:
                # Not forked: JAX has threads.
                context = multiprocessing.get_context("spawn")
                self._pool = context.Pool(self.processes)
                # The time that a process takes to start is no function's.
                started = self._pool.map_async(len, [""] * self.processes, 1)
                try:
                    started.get(_START)
                except multiprocessing.TimeoutError:
                    self._end()
                    raise ValueError(_NOT_STARTED) from None
            waiting = {i: self._pool.apply_async(_call, jobs[i]) for i in left}
            for i, result in waiting.items():
                try:
                    found[i] = result.get(self.timeout)
                except multiprocessing.TimeoutError:
                    # A process hangs or died: others work on the rest.
                    name = jobs[i][0]
                    found[i] = _Failed(f"{name} gave no result in {self.timeout:g} s")
                    hung += 1
                    self._end()
                    break
                if isinstance(found[i], _Wrong):
                    self._end()
                    raise ValueError(found[i].problem)
            if hung == len(found) == min(_PATIENCE, len(jobs)):
                raise ValueError(
                    f"{found[0].problem} in {hung} calls of {hung}: it hangs, or its "
                    "process ended. Correct it, or give a longer --timeout."
                )
        return [found[i] for i in range(len(jobs))]


class _Failed(NamedTuple):
    problem: str


class _Raised(_Failed):
    """A function raised an error."""


class _Wrong(_Failed):
    """A function returned something else than a number for each completion."""


def _part(
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    which: slice,
) -> tuple[Any, ...]:
    some = {name: column[which] for name, column in columns.items()}
    return prompts[which], completions[which], some


def _call(
    name: str,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> Any:
    """The rewards of a function, in a process of the pool."""
    try:
        found = load(name)(prompts, completions, **columns)
    except (Exception, SystemExit) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return _Raised(f"{name}: {text:.200}")
    return checked(name, found, len(completions))


def checked(name: str, found: Any, number: int) -> Any:
    """The values that a function returned, or what is wrong with them."""
    try:
        values = list(found)
    except TypeError:
        values = None
    if isinstance(found, str | bytes) or values is None or len(values) != number:
        got = "no list" if values is None else f"{len(values)} values"
        return _Wrong(
            f"{name} must return a list of {number} numbers, one for each completion; "
            f"got {got}: {found!r:.80}."
        )
    numbers = []
    for value in values:
        if value is None:
            numbers.append(math.nan)
        elif isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            return _Wrong(f"{name} must return numbers; got {value!r:.80}.")
        else:
            numbers.append(float(value))
    return numbers
