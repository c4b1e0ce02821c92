"""The programs of runs, and what decides whether a call compiles one.

Each call traces its functions anew, so that it uses them as they are now. Functions
whose traces are equal share a program, however they were made; the arrays that they
close over are inputs of the program, and no part of it. A program is found by the
structure of these traces, the configuration, and the kinds of its arguments.

Traces are equal if their equations are, with all parameters: numbers and constants are
compared by their bits; Python functions, which callbacks call, and all objects of other
packages by identity.
The custom derivatives of a loss count once something differentiates it.

Unsafe keys. JAX remembers traces of its own, by the identity of functions, and so do
the programs here. A global, an attribute or a captured number that changes is not seen

- by a `jax.jit` that outlives a call, and by the body of a loop, a branch or a
  checkpoint that does, such as a function of a module;
- by a schedule, an optimizer or a custom estimator, unless it is a new object;
- by a derivative of a custom derivative.

Safe, but compiled at each call: a loss with a callback that is made during the call,
as all of `jax.debug.callback` are.
"""

import collections
import copy
import dataclasses
import functools
import numbers
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from radazo_jax._src.base import trees
from radazo_jax._src.base.trees import Tree

_T = TypeVar("_T")

# On CPUs a program holds 150 to 350 of the 65,530 mappings of a process.
_MOST = 12

_programs: collections.OrderedDict[Any, Callable[..., Any]] = collections.OrderedDict()
_lock = threading.RLock()

# Parameters of equations by which they are differentiated. JAX makes them anew at each
# trace, and tracing them takes longer than the loss itself.
_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees")

# Packages whose objects are equal if what they hold is.
_COMPARED = "builtins", "jax", "jaxlib", "ml_dtypes", "numpy"


def of(
    function: Callable[..., _T], run: Tree, *args: Tree, donate: Sequence[int] = ()
) -> Callable[..., _T]:
    """Returns the program of a function of a run, compiled unless it is a recent one.

    Args:
      function: `function(run, *args)`, of a module: it is compared by identity.
      run: A tree of arrays, traced functions, and anything else that is compared as
        Python does, or by identity if it has no hash.
      *args: Example arguments of the program.
      donate: The numbers of the arguments whose memory the program reuses.

    Returns:
      A function `(*args)`.
    """
    arrays, static = trees.partition(run)
    kinds = tuple(map(jax.typeof, jax.tree.leaves(args)))
    key = function, static, jax.tree.structure(args), kinds, tuple(donate)
    with _lock:
        if key not in _programs:
            _programs[key] = _compiled(function, static, donate)
        # The first key stays, because its trace notes whether it is differentiated.
        _programs.move_to_end(key)
        while len(_programs) > _MOST:
            _programs.popitem(last=False)
        return functools.partial(_programs[key], arrays)


def _compiled(
    function: Callable[..., _T], static: trees.Static, donate: Sequence[int]
) -> Callable[..., _T]:
    def program(arrays: list[jax.Array], *args: Tree) -> _T:
        return function(static.merge(arrays), *args)

    program.__name__ = function.__name__
    return jax.jit(program, donate_argnums=[1 + i for i in donate])


def are_disabled() -> bool:
    """Returns whether JAX compiles nothing; a debugger then finds arrays in them."""
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


@jax.tree_util.register_pytree_node_class
class TracedFunction:
    """A function as it was traced, a tree of the arrays that it closes over.

    Trees of functions with equal traces have equal structures.
    """

    def __init__(self, consts: Sequence[jax.Array], trace: "_Trace"):
        self._consts, self._trace = consts, trace

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], "_Trace"]:
        return tuple(self._consts), self._trace

    @classmethod
    def tree_unflatten(
        cls, trace: "_Trace", consts: Sequence[jax.Array]
    ) -> "TracedFunction":
        return cls(consts, trace)

    def __call__(self, *args: Tree) -> Tree:
        if self._trace.fun is not None:
            return self._trace.fun(*args)
        program = core.ClosedJaxpr(self._trace.watched, list(self._consts))
        arrays, _ = trees.partition(args, jax.Array)
        # A custom optimizer may evaluate the loss in another precision.
        avals: list[Any] = program.in_avals
        arrays = [
            x if x.dtype == aval.dtype else x.astype(aval.dtype)
            for x, aval in zip(arrays, avals, strict=True)
        ]
        # What does not depend on the arguments comes back as NumPy's.
        found = [
            x if isinstance(x, jax.Array) else jnp.asarray(x)
            for x in core.jaxpr_as_fun(program)(*arrays)
        ]
        return self._trace.output.merge(found)

    @property
    def uses_arguments(self) -> bool:
        """Whether its output depends on an argument, or on what a callback returns."""
        jaxpr = self._trace.jaxpr
        needed, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        return any(used) or bool(needed.effects)

    @property
    def output(self) -> Tree:
        """The output of the function, with shapes and dtypes instead of arrays."""
        shapes = [atom.aval for atom in self._trace.jaxpr.outvars]
        return self._trace.output.merge(shapes)


def trace(
    fun: Callable[..., Tree], *args: Tree, shares_numbers: bool = False
) -> TracedFunction:
    """Traces a function as it is now, for such arguments.

    Args:
      fun: A function that JAX can trace. What it returns may hold other things than
        arrays, which are compared by their bits or by identity.
      *args: Trees of arrays or of their shapes; all else is taken as it is.
      shares_numbers: Whether traces that differ in numbers alone are equal: the
        numbers in equations are then inputs as arrays are, and those in the output,
        but for its first leaf, are not compared.

    Raises:
      TypeError: If the function closes over a `jax.Ref`.
    """
    arrays, static = trees.partition(args, (jax.Array, jax.core.ShapedArray))
    output: list[trees.Static] = []

    # JAX remembers the trace of a function that it has seen.
    def of_arrays(*arrays: jax.Array) -> list[jax.Array]:
        found, rest = trees.partition(fun(*static.merge(list(arrays))), jax.Array)
        output[:] = [rest]
        return found

    closed = jax.make_jaxpr(of_arrays)(*arrays)
    check_no_refs(closed.consts)
    if shares_numbers:
        closed = _with_numbers_as_consts(closed)
    consts = list(map(_owned, closed.consts, closed.jaxpr.constvars))
    if jax.sharding.get_abstract_mesh().empty or trees.is_traced(consts):
        return TracedFunction(consts, _Trace(closed.jaxpr, output[0], shares_numbers))
    # Equations hold only under the mesh of their trace, and evaluators divide it. So
    # the program traces the function once more, and its arrays are a part of it.
    return TracedFunction((), _Trace(closed.jaxpr, output[0], fun=fun, consts=consts))


class RefError(TypeError):
    """A function that reads or writes a `jax.Ref`."""


def check_no_refs(consts: Iterable[object]) -> None:
    """Raises if a function that was traced closes over a `jax.Ref`."""
    for const in consts:
        if isinstance(const, jax.Ref):
            raise RefError(
                "fun must not read or write a jax.Ref, because points are evaluated "
                f"together; got one of {jax.typeof(const)}. Pass its value, ref[...], "
                "as an argument, and return what is new with has_aux=True."
            )


def _with_numbers_as_consts(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a program that closes over the numbers in its equations as constants.

    Those inside of a loop, a branch or a function of its own stay.
    """
    jaxpr = closed.jaxpr
    found = [
        atom
        for eqn in jaxpr.eqns
        for atom in eqn.invars
        if isinstance(atom, core.Literal)
    ]
    avals = [number.aval for number in found]
    # New variables of these types.
    added = jax.make_jaxpr(lambda *x: x)(*avals).jaxpr.invars
    left = iter(added)
    eqns = [
        eqn.replace(
            invars=[
                next(left) if isinstance(x, core.Literal) else x for x in eqn.invars
            ]
        )
        for eqn in jaxpr.eqns
    ]
    jaxpr = jaxpr.replace(constvars=[*added, *jaxpr.constvars], eqns=eqns)
    values = [number.val for number in found]
    return core.ClosedJaxpr(jaxpr, [*values, *closed.consts])


def is_number(x: object) -> bool:
    """Returns whether this is a number of Python or NumPy, or an array of NumPy's."""
    return isinstance(x, (numbers.Number, np.number, np.ndarray))


def _owned(const: object, var: Any) -> jax.Array:
    """Returns a constant that nobody else writes to."""
    if isinstance(const, jax.Array):
        return const
    with trees.precision_of(var.aval):
        return jax.device_put(np.array(const, var.aval.dtype))


class _Trace:
    """A traced function without its arrays."""

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        output: trees.Static,
        shares_numbers: bool = False,
        fun: Callable[..., Tree] | None = None,
        consts: Sequence[jax.Array] = (),
    ):
        self.jaxpr, self.output, self.fun = jaxpr, output, fun
        reader = _Reader()
        compared = output.others
        if shares_numbers:
            # But for the first, which is the value.
            rest = (type(x) if is_number(x) else x for x in compared[1:])
            compared = (*compared[:1], *rest)
        others = reader.value((*compared, *consts))
        self._key = reader.jaxpr(jaxpr), output.treedef, output.is_array, others
        self._hash = hash(self._key)
        self._rules = reader.rules
        # Without a copy of the equations, nothing notes that it is differentiated.
        self._differentiated = fun is not None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Trace) or self._key != other._key:
            return False
        if self is other or not (self._differentiated or other._differentiated):
            return True
        return self._derivatives == other._derivatives

    @functools.cached_property
    def watched(self) -> core.Jaxpr:
        """The program, which notes if one of its custom derivatives is used."""
        note = functools.partial(setattr, self, "_differentiated", True)
        return _watched(self.jaxpr, note) if self._rules else self.jaxpr

    @functools.cached_property
    def _derivatives(self) -> tuple[Hashable, ...]:
        return tuple(map(_derivative, self._rules))


def _derivative(eqn: core.JaxprEqn) -> Hashable:
    """Returns the structure of the derivative of an equation with a custom one."""
    inputs = list(dict.fromkeys(x for x in eqn.invars if isinstance(x, core.Var)))
    info = core.DebugInfo("derivative", "derivative", None, None)
    jaxpr = core.Jaxpr((), inputs, eqn.outvars, [eqn], eqn.effects, info)
    fun = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))

    def total(*inputs: jax.Array) -> jax.typing.ArrayLike:
        floats = (x for x in fun(*inputs) if jnp.issubdtype(x.dtype, jnp.inexact))
        return sum(jnp.sum(x).real for x in floats)

    derivative = jax.grad(total, range(len(inputs)), allow_int=True)
    try:
        avals = (var.aval for var in inputs)
        return _Reader().value(jax.make_jaxpr(derivative)(*avals))
    except Exception:
        # A rule that cannot be traced is equal to itself alone.
        return _Same(eqn)


def _watched(jaxpr: core.Jaxpr, note: Callable[[], None]) -> core.Jaxpr:
    """Returns a copy of a program whose rules call `note` when they are used."""

    @functools.cache
    def watched(jaxpr: core.Jaxpr) -> core.Jaxpr:
        eqns = [e.replace(params=jax.tree.map(new, e.params)) for e in jaxpr.eqns]
        return jaxpr.replace(eqns=eqns)

    def new(x: Any) -> Any:
        if isinstance(x, core.ClosedJaxpr):
            return x.replace(jaxpr=watched(x.jaxpr))
        if isinstance(x, core.Jaxpr):
            return watched(x)
        return _noted(x, note) if hasattr(x, "call_wrapped") else x

    return watched(jaxpr)


def _noted(rule: Any, note: Callable[[], None]) -> Any:
    """Returns a wrapped function of JAX that calls `note` first."""
    noted = copy.copy(rule)

    def call(*args: Tree, **kwargs: Tree) -> Tree:
        note()
        return rule.f_transformed(*args, **kwargs)

    noted.f_transformed = call
    return noted


class _Reader:
    """A reader of the structure of programs, which equal programs share.

    Attributes:
      rules: The equations with custom derivatives, in order.
    """

    def __init__(self) -> None:
        self.rules: list[core.JaxprEqn] = []
        self._known: dict[int, int] = {}

    def jaxpr(self, jaxpr: core.Jaxpr) -> Hashable:
        # One that was read before is named by its number.
        if id(jaxpr) in self._known:
            return self._known[id(jaxpr)]
        self._known[id(jaxpr)] = len(self._known)
        numbers: dict[Any, int] = {}

        def new(var: core.Var) -> Any:
            numbers[var] = len(numbers)
            return var.aval

        def atom(x: Any) -> Hashable:
            if isinstance(x, core.Literal):
                return x.aval, self.value(x.val)
            return numbers[x]

        parts: list[Any] = [tuple(map(new, (*jaxpr.constvars, *jaxpr.invars)))]
        for eqn in jaxpr.eqns:
            if any(name in eqn.params for name in _RULES):
                self.rules.append(eqn)
            inputs = tuple(map(atom, eqn.invars))
            params = tuple(
                (name, self.value(x))
                for name, x in eqn.params.items()
                if name not in _RULES
            )
            outputs = tuple(map(new, eqn.outvars))
            parts.append((eqn.primitive, params, inputs, outputs, eqn.ctx))
        parts.append(tuple(map(atom, jaxpr.outvars)))
        return tuple(parts)

    def value(self, x: Any) -> Hashable:
        """Returns the structure of a parameter of an equation.

        Only what Python, NumPy and JAX define is compared by what it holds. An object
        of another class may hold more than it is compared by.
        """
        if isinstance(x, core.Jaxpr):
            return self.jaxpr(x)
        if isinstance(x, core.ClosedJaxpr):
            return self.jaxpr(x.jaxpr), self.value(x.consts)
        if isinstance(x, jax.Array) and x.is_fully_addressable:
            return jax.typeof(x), np.asarray(trees.key_words(x)).tobytes()
        if isinstance(x, type):
            return type, x
        if type(x).__module__.partition(".")[0] not in _COMPARED:
            return _Same(x)
        if isinstance(x, (tuple, list)):
            return type(x), tuple(map(self.value, x))
        if isinstance(x, dict):
            return type(x), tuple((k, self.value(y)) for k, y in x.items())
        if isinstance(x, (float, complex, np.ndarray, np.generic)):
            # 0.0 and -0.0 differ, and NaN is equal to itself.
            array = np.asarray(x)
            if array.dtype.hasobject or isinstance(x, np.ma.MaskedArray):
                return _Same(x)
            return type(x), array.dtype, array.shape, array.tobytes()
        if dataclasses.is_dataclass(x):
            names = (field.name for field in dataclasses.fields(x))
            return type(x), tuple(self.value(getattr(x, name)) for name in names)
        if type(x).__name__ == "ClosedRule":  # Of `jax.custom_batching.custom_vmap`.
            return _Same(x.rule)
        if callable(x) or not trees.has_hash(x):
            return _Same(x)
        return type(x), x


class _Same:
    """An object that is equal to itself alone, and kept alive."""

    def __init__(self, x: Tree):
        self._x = x

    def __hash__(self) -> int:
        return id(self._x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._x is other._x
