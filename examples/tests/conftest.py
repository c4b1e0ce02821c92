"""The tests of the examples run as those of the library do."""

from tests.conftest import (  # noqa: F401
    compiled_once,
    pytest_collection_finish,
    pytest_configure,
    pytest_runtest_teardown,
)
