"""Reward functions, and what they return of completions.

A reward function has the form that TRL and Tunix share:

    def reward(prompts, completions, **columns) -> list[float]

with a text and a reward for each completion; a column has a value for each too, such as
`answer`. `None` and NaN mean that a completion has no reward. A function comes from a
module, `package.module:function`, from a file, `file.py:function`, or is one of those
below.
"""

import importlib.util
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

RewardFunction = Callable[..., Sequence[float | None]]
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_LONGEST = 200  # Characters of a number.
_BEGIN, _END = "<answer>", "</answer>"


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


FUNCTIONS: dict[str, RewardFunction] = {
    "answer": answer,
    "format": formatted,
    "length": brevity,
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


def load(name: str, what: str = "reward") -> RewardFunction:
    """A function by its name.

    Args:
      name: A name in `FUNCTIONS`, file.py:function, or package.module:function.
      what: A word for the function in messages.

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
            f"{what} must be one of {', '.join(FUNCTIONS)}, file.py:function, or "
            "package.module:function of a module that can be imported; got "
            f"{name!r} ({text:.100})."
        ) from None
    if not callable(found):
        raise ValueError(f"{what} {name!r} must be a function; got {found!r:.80}.")
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


class Raised(NamedTuple):
    """A function raised an error."""

    problem: str


class Wrong(NamedTuple):
    """A function returned something else than a number for each completion."""

    problem: str


class Job(NamedTuple):
    """A call of a reward function."""

    name: str
    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]

    def part(self, which: slice) -> "Job":
        """The call for some of the completions."""
        columns = {name: column[which] for name, column in self.columns.items()}
        return Job(self.name, self.prompts[which], self.completions[which], columns)


def call(job: Job) -> Any:
    """The rewards of a call, or what is wrong with it."""
    try:
        found = load(job.name)(job.prompts, job.completions, **job.columns)
    except (Exception, SystemExit) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Raised(f"{job.name}: {text:.200}")
    return checked(job.name, found, len(job.completions))


def begin() -> None:
    """Makes a process end with the one that started it, and no sooner by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def checked(name: str, found: Any, number: int) -> Any:
    """The values that a function returned, or what is wrong with them."""
    try:
        values = list(found)
    except TypeError:
        values = None
    if isinstance(found, str | bytes) or values is None or len(values) != number:
        got = "no list" if values is None else f"{len(values)} values"
        return Wrong(
            f"{name} must return a list of {number} numbers, one for each completion; "
            f"got {got}: {found!r:.80}."
        )
    numbers = []
    for value in values:
        if value is None:
            numbers.append(math.nan)
        elif isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            return Wrong(f"{name} must return numbers; got {value!r:.80}.")
        else:
            numbers.append(float(value))
    return numbers
