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


def code_lines(path: pathlib.Path) -> int:
    """How many lines of a module hold code."""
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    lines = {
        line
        for token in tokens
        if token.type not in _SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def main(arguments: list[str]) -> None:
    """Prints the counts of the folders named, or of all."""
    for folder in arguments or ("radazo_jax", "examples", "tests"):
        counts = {
            path: code_lines(path)
            for path in sorted(pathlib.Path(folder).rglob("*.py"))
        }
        if arguments:
            for path, count in counts.items():
                print(f"{count:6,} {path}")
        print(f"{sum(counts.values()):6,} {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
