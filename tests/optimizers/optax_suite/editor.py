"""Optax's test modules with our tables in the place of theirs."""

import ast
import importlib.util
import pathlib
import sys
import types

from tests.optimizers.optax_suite.entries import MODULES, OURS, TREATED_AS


class PutOursInPlace(ast.NodeTransformer):
    """Replaces tables, look-ups and lists of names in a test module."""

    def __init__(self, tables, dropped):
        self.tables, self.dropped, self.replaced = dict(tables), dropped, set()

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
        return None if node.name in self.dropped else self.generic_visit(node)

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
    loaded.__ours__ = types.SimpleNamespace(tables=tables, factories=OURS)
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
