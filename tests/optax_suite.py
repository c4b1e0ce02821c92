"""Runs Optax's own tests with the optimizers of this package in their tables.

Optax ships its tests in the wheel, and drives those of optimizers by tables that are
expanded while the classes are created. So the module's source is parsed, the tables
and the look-ups are replaced by ours in the syntax tree, tests of particular Optax
algorithms are dropped, and what remains is executed and run.

    python tests/optax_suite.py alias
    python tests/optax_suite.py alias --optimizers radazo --tests test_optimization
    python tests/optax_suite.py alias --fault flipped_sign

The last line of the output counts the tests, as JSON. The exit status is 0 if none
failed. One module a process: two of them need settings of JAX that cannot be undone.
"""

import argparse
import ast
import functools
import importlib.util
import json
import os
import pathlib
import sys
import types
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
# As sharding_test asks for, and before JAX is imported.
if "sharding" in sys.argv:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax

from radazo_jax._src.estimate import differences, wrapper
from radazo_jax._src.optimize import aliases, transforms

CHAIN = "estimate_gradient_radazo"


def estimate_gradient_radazo(
    learning_rate: optax.ScalarOrSchedule, key: int = 0
) -> optax.GradientTransformationExtraArgs:
    """A whole zeroth-order optimizer, which needs `value_fn` and no gradient."""
    # So many directions that its gradients in two dimensions are nearly those of a
    # first-order method, whose number of steps the tests give.
    estimator = differences.central_difference(num_directions=32, smoothing=1e-3)
    return optax.chain(
        wrapper.estimate_gradient(estimator, key), aliases.radazo(learning_rate)
    )


# --- Our tables ---

OURS = types.SimpleNamespace(
    radazo=aliases.radazo,
    zo_adamm=aliases.zo_adamm,
    zo_rmsprop=aliases.zo_rmsprop,
    zo_sgd=aliases.zo_sgd,
    zo_signsgd=aliases.zo_signsgd,
    estimate_gradient_radazo=estimate_gradient_radazo,
)

# Ours -> the optimizer of Optax that the tests treat alike. They look for its name
# where they skip a case or pass a further argument.
TREATED_AS = {
    # Skipped for complex parameters, like all of Optax that takes real signs, and for
    # Rosenbrock, where signs need a learning rate schedule.
    "zo_signsgd": "sign_sgd",
    # Skipped for complex parameters: its directions are real, like that one's noise.
    CHAIN: "noisy_sgd",
    # Not skipped. Passed the value of the objective, which `reduce_on_plateau` reads.
    "zo_sgd": "sgd",
}

# What `TREATED_AS` skips in `alias_test` but not in `_common_test`, which knows no
# optimizer of that kind.
EXEMPT = {
    ("zo_signsgd", "_setup_rosenbrock"): "signs need a learning rate schedule there",
}


def entry(name, **kwargs):
    return {"opt_name": name, "opt_kwargs": kwargs}


OPTIMIZERS = [
    entry("radazo", learning_rate=3e-3),
    entry("radazo", learning_rate=3e-3, bias_correction=True),
    entry("zo_adamm", learning_rate=1e-2, mu_dtype="float32", bias_correction=True),
    entry("zo_rmsprop", learning_rate=5e-3),
    entry("zo_sgd", learning_rate=1e-3, momentum=0.9),
    entry("zo_signsgd", learning_rate=1e-1),
    entry(CHAIN, learning_rate=2e-3),
]

# `_common_test` has more objectives, schedules, and the wrappers of `optax.contrib`:
# a few optimizers alone, then plain descent in each wrapper as Optax tests them, then
# all that has moments in `mechanize`, which tunes the learning rate.
OPTIMIZERS_ALONE = [
    entry("radazo", learning_rate=3e-3),
    entry("zo_signsgd", learning_rate=1e-1),
    entry(CHAIN, learning_rate=2e-3),
]
WRAPPED = [
    {**entry("zo_sgd", learning_rate=rate), "wrapper_name": name, "wrapper_kwargs": kw}
    for name, rate, kw in (
        ("mechanize", 1e-1, {"weight_decay": 0.0}),
        ("schedule_free", 1e-2, {"learning_rate": 1e-2}),
        ("reduce_on_plateau", 1e-3, {}),
    )
]
TO_MECHANIZE = [
    entry("radazo", learning_rate=1.0),
    entry("zo_adamm", learning_rate=1.0),
    entry("zo_rmsprop", learning_rate=1.0),
    entry("zo_sgd", learning_rate=1.0, momentum=0.9),
]


def sum_of_squares(params):
    """The objective where a test has none of its own."""
    return sum(
        jnp.sum(jnp.square(leaf.astype(jnp.float32)))
        for leaf in jax.tree.leaves(params)
    )


def closed_over(optimizer):
    """Closes the chain over an objective, for tests that know nothing of any."""
    update = functools.partial(optimizer.update, value_fn=sum_of_squares)
    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def chain_closed_over(**kwargs):
    return closed_over(estimate_gradient_radazo(**kwargs))


FLOAT64_MODULES = [
    ("scale_by_radazo", transforms.scale_by_radazo, {}),
    ("scale_by_radazo_debiased", transforms.scale_by_radazo, {"bias_correction": True}),
    ("scale_by_radazo_bf16", transforms.scale_by_radazo, {"mu_dtype": "bfloat16"}),
    ("scale_by_zo_adamm", transforms.scale_by_zo_adamm, {}),
    ("radazo", aliases.radazo, {"learning_rate": 0.1}),
    ("zo_adamm", aliases.zo_adamm, {"learning_rate": 0.1, "bias_correction": True}),
    ("zo_rmsprop", aliases.zo_rmsprop, {"learning_rate": 0.1}),
    ("zo_sgd", aliases.zo_sgd, {"learning_rate": 0.1}),
    ("zo_sgd_momentum", aliases.zo_sgd, {"learning_rate": 0.1, "momentum": 0.9}),
    ("zo_signsgd", aliases.zo_signsgd, {"learning_rate": 0.1}),
    (CHAIN, chain_closed_over, {"learning_rate": 0.1}),
]

SHARDING_OPTIMIZERS = {
    name: make(learning_rate=1.0)
    for name, make in {
        **vars(OURS),
        "radazo_debiased": functools.partial(aliases.radazo, bias_correction=True),
        "zo_sgd_momentum": functools.partial(aliases.zo_sgd, momentum=0.9),
        CHAIN: chain_closed_over,
    }.items()
}


# Module -> where it is, its tables with what replaces them, and the tests that the
# tables do not drive. An assignment to a table is replaced, an addition too.
MODULES = {
    "alias": (
        "optax._src.alias_test",
        {"_OPTIMIZERS_UNDER_TEST": OPTIMIZERS},
        {"test_explicit_dtype"},
    ),
    "common": (
        "optax.contrib._common_test",
        {
            "_MAIN_OPTIMIZERS_UNDER_TEST": OPTIMIZERS_ALONE,
            "_MAIN_OPTIMIZERS_UNDER_TEST +=": WRAPPED,
            "_BASE_OPTIMIZERS": TO_MECHANIZE,
        },
        # It ignores the wrappers, and without them it is that of `alias_test`.
        {"test_state_shape_dtype_shard_stability"},
    ),
    "sharding": (
        "optax._src.sharding_test",
        {"OPTIMIZERS": SHARDING_OPTIMIZERS},
        {"test_microbatch_with_explicit_sharding"},
    ),
    "float64": ("optax._src.float64_test", {"ALL_MODULES": FLOAT64_MODULES}, set()),
}


# --- Editing Optax's source ---


class PutOursInPlace(ast.NodeTransformer):
    """Replaces tables, look-ups, lists of names and updates in a test module."""

    def __init__(self, tables, dropped):
        self.tables, self.dropped, self.replaced = dict(tables), dropped, set()
        self.objective = None

    def table(self, name):
        self.replaced.add(name)
        return ast.parse(f"__ours__.tables[{name!r}]", mode="eval").body

    def visit_Module(self, node):
        self.generic_visit(node)
        imports = [
            i
            for i, statement in enumerate(node.body)
            if isinstance(statement, (ast.Import, ast.ImportFrom))
        ]
        look_up = ast.parse("alias = __ours__.factories").body
        node.body[imports[-1] + 1 : imports[-1] + 1] = look_up
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        name = getattr(node.targets[0], "id", None)
        # The second assignment to a table only freezes it.
        if name in self.tables and name not in self.replaced:
            node.value = self.table(name)
        return node

    def visit_AugAssign(self, node):
        name = f"{getattr(node.target, 'id', None)} +="
        if name in self.tables:
            node.value = self.table(name)
        return node

    def visit_ClassDef(self, node):
        """Drops the classes of tests that no table drives."""
        driving = {*self.tables, "_ALL_OPTIMIZERS_UNDER_TEST"}
        driven = any(
            getattr(inner, "id", None) in driving
            for item in node.body
            for decorator in getattr(item, "decorator_list", [])
            for inner in ast.walk(decorator)
        )
        return self.generic_visit(node) if driven else None

    def visit_FunctionDef(self, node):
        if node.name in self.dropped:
            return None
        if node.name.startswith("test"):
            known = names_assigned(node)
            self.objective = next(
                (n for n in ("objective", "obj_fn", "fun") if n in known),
                "__ours__.objective",
            )
        elif self.objective is None:
            return node  # Neither a test nor part of one.
        self.generic_visit(node)
        if node.name.startswith("test"):
            self.objective = None
            if {"opt_name", "target"} <= {argument.arg for argument in node.args.args}:
                node.body[:0] = ast.parse(
                    "__ours__.exempt(self, opt_name, target)"
                ).body
        return node

    def visit_Compare(self, node):
        """`opt_name in ('sgd', ...)`: also for those of ours that are alike."""
        self.generic_visit(node)
        if ast.unparse(node.left) == "jax.__version__":
            # Compared as strings, by which 0.10 comes before 0.7: tests would be
            # skipped. We require a later version of JAX than any they ask for.
            return ast.Constant(False)
        names = node.comparators[0]
        if getattr(node.left, "id", None) == "opt_name" and hasattr(names, "elts"):
            listed = {ast.literal_eval(element) for element in names.elts}
            names.elts += [
                ast.Constant(ours) for ours, as_ in TREATED_AS.items() if as_ in listed
            ]
        return node

    def visit_Call(self, node):
        """State compared with state: keys cannot be made NumPy arrays."""
        self.generic_visit(node)
        if getattr(node.func, "attr", None) == "assert_trees_all_close":
            node.args[:2] = [
                ast.Call(ast.parse("__ours__.numbers", mode="eval").body, [tree], [])
                for tree in node.args[:2]
            ]
        return node

    def visit_Attribute(self, node):
        """`opt.update`: closed over the objective where `opt` is the chain."""
        self.generic_visit(node)
        owner = getattr(node.value, "id", "")
        if node.attr != "update" or owner not in {"opt", "opt_inject"}:
            return node
        closed = f"__ours__.update({owner}, opt_name, {self.objective})"
        return ast.parse(closed, mode="eval").body


def names_assigned(function):
    """The names that the body of a function assigns in any case."""
    return {
        inner.id
        for statement in function.body
        if isinstance(statement, (ast.Assign, ast.With))
        for inner in ast.walk(statement)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }


def update_of(optimizer, opt_name, objective):
    if opt_name != CHAIN:
        return optimizer.update
    return functools.partial(optimizer.update, value_fn=objective)


def exempt(test, opt_name, target):
    reason = EXEMPT.get((opt_name, target.__name__))
    if reason:
        test.skipTest(f"{opt_name}: {reason}")


def load(module, only):
    """Returns Optax's test module with our optimizers in its tables."""
    name, tables, dropped = MODULES[module]
    if only:
        tables = {key: select(table, only) for key, table in tables.items()}
    path = pathlib.Path(importlib.util.find_spec(name).origin)
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    editor = PutOursInPlace(tables, dropped)
    tree = ast.fix_missing_locations(editor.visit(tree))
    if editor.replaced != set(tables):
        raise RuntimeError(f"{name} has no {set(tables) - editor.replaced} any more.")
    loaded = types.ModuleType(f"{module}_of_optax")
    sys.modules[loaded.__name__] = loaded
    loaded.__ours__ = types.SimpleNamespace(
        tables=tables,
        factories=OURS,
        update=update_of,
        objective=sum_of_squares,
        exempt=exempt,
        numbers=optax.tree.unwrap_random_key_data,
    )
    exec(compile(tree, str(path), "exec"), loaded.__dict__)
    return loaded


def select(table, only):
    """Returns the rows of a table that belong to some optimizers."""
    if isinstance(table, dict):
        return {name: row for name, row in table.items() if name in only}
    return [
        row
        for row in table
        if (row["opt_name"] if isinstance(row, dict) else row[0]) in only
    ]


# --- Faults, which the tests must find ---


def plant(fault):
    """Breaks the library in one way."""
    sound = transforms._scale_by_moments

    def broken(*args, **kwargs):
        tx = sound(*args, **kwargs)

        def flipped_sign(updates, state, params=None, **extra_args):
            updates, state = tx.update(updates, state, params, **extra_args)
            return jax.tree.map(jnp.negative, updates), state

        def float_counter(updates, state, params=None, **extra_args):
            updates, state = tx.update(updates, state, params, **extra_args)
            return updates, state._replace(count=state.count + 0.0)

        def dropped_extra_args(updates, state, params=None):
            return tx.update(updates, state, params)

        update = {f.__name__: f for f in (flipped_sign, float_counter)}.get(
            fault, dropped_extra_args
        )
        return optax.GradientTransformationExtraArgs(tx.init, update)

    transforms._scale_by_moments = broken


FAULTS = ("flipped_sign", "float_counter", "dropped_extra_args")


# --- Running ---


def matching(suite, patterns):
    """Returns the tests whose name starts with one of the patterns."""
    chosen = unittest.TestSuite()
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            chosen.addTests(matching(test, patterns))
        elif any(test._testMethodName.startswith(pattern) for pattern in patterns):
            chosen.addTest(test)
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", choices=MODULES)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--optimizers", nargs="*", default=[])
    parser.add_argument("--tests", nargs="*", default=["test"])
    arguments = parser.parse_args()
    if arguments.fault and arguments.module == "sharding":
        parser.error("The optimizers of `sharding` are made before faults are planted.")
    if arguments.fault:
        plant(arguments.fault)
    loaded = load(arguments.module, arguments.optimizers)
    suite = unittest.defaultTestLoader.loadTestsFromModule(loaded)
    suite = matching(suite, arguments.tests)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    broken = [str(test) for test, _ in result.failures + result.errors]
    counts = {
        "passed": result.testsRun - len(result.skipped) - len(set(broken)),
        "skipped": len(result.skipped),
        "failed": len(result.failures),
        "errors": len(result.errors),
        "broken": broken,
    }
    print(json.dumps(counts))
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
