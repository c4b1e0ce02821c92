"""The count of the lines of code."""

from code_lines import code_lines

_MODULE = '''"""A module
of two lines."""

# A comment.
import os  # Code, with a comment.


class Kept:
    """Documented."""

    text = """a string
that is code"""


def fun(
    x,
):
    "Documented, too."
    return x
'''


def test_docstrings_comments_and_blank_lines_do_not_count(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(_MODULE)
    # The import, the class, its string of two lines, three of a signature, a return.
    assert code_lines(path) == 1 + 1 + 2 + 3 + 1
