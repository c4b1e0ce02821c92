"""A journal is resumed by the function that wrote it, and by no other."""

import functools
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import radazo_jax as zo

START = np.ones(3, np.float32)
# The same objects, so that they compile once.
METHOD = zo.zo_sgd(1e-2), zo.forward_difference(zo.rademacher(), num_directions=1)
LEVEL = 3.25


def run(path, fun, steps, call=zo.minimize_black_box):
    return call(
        *(fun, START, *METHOD),
        num_steps=steps,
        key=0,
        journal=path,
        progress=False,
    )


def scaled(x, width, *, height=1.0):
    return float(np.sum(x**2) * np.sum(np.asarray(width, float)) * height)


def partial(width):
    return functools.partial(scaled, width=width)


def partial_by_position(width):
    return functools.partial(lambda width, x: scaled(x, width), width)


def partial_of_a_partial(width):
    return functools.partial(partial(width), height=2.0)


def default(width):
    def fun(x, width=width):
        return scaled(x, width)

    return fun


def keyword_default(width):
    def fun(x, *, width=width):
        return scaled(x, width)

    return fun


def closure(width):
    return lambda x: scaled(x, width)


def code(width):
    """The number is a constant of the code."""
    return eval(f"lambda x: {width} * float(x @ x)")


MAKERS = [
    *(partial, partial_by_position, partial_of_a_partial),
    *(default, keyword_default, closure),
]
CASES = [(make, 1.0, 3.0) for make in MAKERS] + [
    (partial, "1.5", "2.5"),
    (closure, "1.5", "2.5"),
    (partial, np.ones(4), np.array([1.0, 1.0, 1.0, 2.0])),
    (closure, np.ones(4), np.array([1.0, 1.0, 1.0, 2.0])),
]
IDS = [f"{make.__name__}-{type(before).__name__}" for make, before, _ in CASES]


@pytest.mark.xfail(
    strict=True,
    raises=pytest.fail.Exception,
    reason="the identity of a function is its name and its code",
)
@pytest.mark.parametrize(("make", "before", "after"), CASES, ids=IDS)
def test_another_captured_value_is_refused_by_name(make, before, after, tmp_path):
    path = tmp_path / "run.jsonl"
    run(path, make(before), 1)
    with pytest.raises(ValueError, match=r"(?s)journal.*width"):
        run(path, make(after), 2)


@pytest.mark.parametrize(("make", "before", "_"), CASES, ids=IDS)
def test_an_equal_captured_value_resumes(make, before, _, tmp_path):
    path = tmp_path / "run.jsonl"
    run(path, make(before), 1)
    assert len(run(path, make(before), 2).values) == 2


def test_other_code_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    run(path, code(1.0), 1)
    with pytest.raises(ValueError, match=r"journal.*its fun is"):
        run(path, code(3.0), 2)


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True,
    raises=pytest.fail.Exception,
    reason="the identity of a function is its name and its code",
)
def test_another_captured_value_of_a_traced_function_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"

    def make(width):
        return lambda p: jnp.sum(width * p**2)

    run(path, make(1.0), 1, zo.minimize)
    with pytest.raises(ValueError, match=r"(?s)journal.*width"):
        run(path, make(3.0), 2, zo.minimize)


class Level:
    """A function of one value, so that any of its points shows whether it changed."""

    def __init__(self, level=3.25):
        self.level = level

    def value(self, x):
        return self.level

    def __call__(self, x):
        return self.value(x)


def attribute(monkeypatch):
    return Level(), lambda: Level(12.5)


def method(monkeypatch):
    return Level().value, lambda: Level(12.5).value


def attribute_of_a_captured_object(monkeypatch):
    def make(problem):
        return lambda x: problem.value(x)

    return make(Level()), lambda: make(Level(12.5))


def captured_function(monkeypatch):
    """Its closure, and not that of the function that captures it, has the number."""

    def make(level):
        def value():
            return level

        return lambda x: value()

    return make(3.25), lambda: make(12.5)


def captured_list(monkeypatch):
    def make(levels):
        return lambda x: levels[0]

    return make([3.25]), lambda: make([12.5])


def of_module(x):
    return LEVEL


def changed_global(monkeypatch):
    def change():
        monkeypatch.setitem(globals(), "LEVEL", 12.5)
        return of_module

    return of_module, change


@pytest.mark.xfail(
    strict=True,
    raises=pytest.fail.Exception,
    reason="no point of a journal is evaluated again",
)
@pytest.mark.parametrize(
    "kind",
    [
        *(attribute, method, attribute_of_a_captured_object),
        *(captured_function, captured_list, changed_global),
    ],
)
def test_another_value_of_a_journaled_point_is_a_warning(kind, tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    before, change = kind(monkeypatch)
    run(path, before, 1)
    after = change()
    with pytest.warns(UserWarning, match=r"(?s)3\.25.*12\.5|12\.5.*3\.25"):
        run(path, after, 2)


class Simulator:
    """A function with what changes between calls, and changes no value."""

    def __init__(self):
        self.calls, self.known, self.lock = 0, {}, threading.Lock()

    def __call__(self, x):
        with self.lock:
            self.calls += 1
            return self.known.setdefault(x.tobytes(), float(np.sum(x**2)))


def cached():
    found = functools.lru_cache(lambda x: float(np.sum(np.frombuffer(x, np.float32))))
    return lambda x: found(x.tobytes())


@pytest.mark.parametrize("make", [Simulator, cached])
@pytest.mark.parametrize("again", [True, False], ids=["same object", "another"])
def test_counters_caches_and_locks_do_not_prevent_resuming(make, again, tmp_path):
    whole = run(tmp_path / "whole.jsonl", make(), 4)
    path, fun = tmp_path / "parts.jsonl", make()
    run(path, fun, 2)
    parts = run(path, fun if again else make(), 4)
    np.testing.assert_array_equal(parts.params, whole.params)
