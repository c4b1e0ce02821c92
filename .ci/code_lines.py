"""Counts lines of code, without docstrings, comments and blank lines.

python .ci/code_lines.py                  # of the package, the examples and the tests
python .ci/code_lines.py radazo_jax/_src  # of each module under a folder
"""

import ast
import pathlib
import sys
import tokenize

_SILENT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


# The package has at most so many lines of code. The number only falls: whoever adds
# lines takes as many away.
MOST = 15_573


def _lines_of_code(path: pathlib.Path) -> tuple[set[int], ast.Module]:
    """Returns the numbers of the lines of a module that hold code, and its tree."""
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    lines = {
        line
        for token in tokens
        if token.type not in _SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return lines, tree


def code_lines(path: pathlib.Path) -> int:
    """Returns the number of lines of a module that hold code."""
    return len(_lines_of_code(path)[0])


def lines_of_functions(path: pathlib.Path) -> dict[str, int]:
    """Returns the numbers of lines of code of the functions of a module, by name."""
    lines, tree = _lines_of_code(path)
    return {
        node.name: sum(node.lineno <= line <= node.end_lineno for line in lines)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


def main(arguments: list[str]) -> str | None:
    """Prints the counts of the folders named, or of all; says if there are too many."""
    totals = {}
    for folder in arguments or ("radazo_jax", "examples", "tests"):
        counts = {
            path: code_lines(path)
            for path in sorted(pathlib.Path(folder).rglob("*.py"))
        }
        if arguments:
            for path, count in counts.items():
                print(f"{count:6,} {path}")
        totals[folder] = sum(counts.values())
        print(f"{totals[folder]:6,} {folder}")
    if totals.get("radazo_jax", 0) > MOST:
        return f"radazo_jax has more than {MOST:,} lines of code: take some away."
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
