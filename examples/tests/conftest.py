"""Settings of the tests of the examples, equal to the library's."""

from tests.conftest import (  # noqa: F401
    compiled_once,
    pytest_collection_finish,
    pytest_configure,
    pytest_runtest_teardown,
)
