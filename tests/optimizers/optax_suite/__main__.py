"""Runs Optax's own tests with the optimizers of this package in their tables.

Optax ships its tests in the wheel, and drives the tests of optimizers by tables that
are expanded while the classes are created. So the module's source is parsed, the tables
and the look-ups are replaced in the syntax tree, tests of particular Optax
algorithms are dropped, and what remains is executed and run.

    python -m tests.optimizers.optax_suite alias
    python -m tests.optimizers.optax_suite alias --optimizers radazo --tests test_opt

The last line of the output counts the tests, as JSON. The exit status is 0 if none
failed. One module a process: two of them need settings of JAX that cannot be undone.
"""

import argparse
import json
import os
import sys
import unittest

# As sharding_test asks for, and before JAX is imported.
if "sharding" in sys.argv:
    devices = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"

from tests.optimizers.optax_suite.editor import load
from tests.optimizers.optax_suite.entries import MODULES


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
    parser.add_argument("--optimizers", nargs="*", default=[])
    parser.add_argument("--tests", nargs="*", default=["test"])
    arguments = parser.parse_args()
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
