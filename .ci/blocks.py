"""Runs the code blocks of pages, in order; the blocks of a page share their names.

    python -W error .ci/blocks.py PAGE [...]

Blocks fenced as `python` are run. Those with `>>>` prompts must print what they say. A
block fenced as `text` that follows at once is what the block before it prints. Fence a
sketch as `text` after a paragraph, and code of another package as `py`.
"""

import contextlib
import doctest
import io
import os
import pathlib
import re
import sys
import tempfile
import textwrap

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# A block in a tab is indented.
FENCE = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$"
    r"(?:\n+(?P=indent)```text\n(?P<printed>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)


def run(page: str, text: str) -> int:
    """Runs the blocks of a page; returns the number of blocks that print otherwise."""
    parser, failed = doctest.DocTestParser(), 0
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    names = {"__name__": "page"}
    for match in FENCE.finditer(text):
        line = text[: match.start()].count("\n") + 1
        source = textwrap.dedent(match["code"])
        if ">>>" in source:
            test = parser.get_doctest(source, names, page, page, line)
            runner.run(test, clear_globs=False)
            names = test.globs  # A doctest copies the names it is given.
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Blank lines ahead, so that a traceback gives the line of the page.
            exec(compile("\n" * line + source, page, "exec"), names)
        if match["printed"] is not None:
            wanted, got = textwrap.dedent(match["printed"]), printed.getvalue()
            if not doctest.OutputChecker().check_output(wanted, got, FLAGS):
                print(f"{page}:{line}: expected\n{wanted}got\n{got}")
                failed += 1
    return failed + runner.summarize().failed


def main(pages: list[str]) -> None:
    """Runs each page in an empty folder; exits with 1 if one prints otherwise."""
    texts = {page: pathlib.Path(page).read_text(encoding="utf-8") for page in pages}
    failed = 0
    for page, text in texts.items():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            failed += run(page, text)
            os.chdir("/")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
