"""Optax's test modules with our tables in the place of theirs."""

import ast
import functools
import importlib.util
import pathlib
import sys
import types

import optax

from tests.transforms.optax_suite.entries import (
    CHAIN,
    EXEMPT,
    MODULES,
    OURS,
    TREATED_AS,
    sum_of_squares,
)


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
        """`opt_name in ('sgd', ...)`: also for similar ones of this package."""
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
        """`opt.update`: closed over the objective if `opt` is the chain."""
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
