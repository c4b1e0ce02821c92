"""Counts patterns of speech that the style avoids, in prose alone.

python .ci/language.py              # of each area, by pattern
python .ci/language.py FILE [...]   # each line of some files that matches a pattern

Prose is what a docstring or a comment says, and Markdown without code and tables. The
patterns find words that are often wrong, though not always: counts must fall, not be 0.
"""

import ast
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]

PATTERNS = {
    name: re.compile(pattern, re.MULTILINE)
    for name, pattern in {
        "where": r"\b[Ww]here\b",
        "that of": r"\b(that|those) (of|at|along|with|behind|ahead|before|for|by)\b",
        "summary": r'\A"""(What|That|Those|Of|Where|How|By|To|As|One) ',
        "field": r"^\s+\w+: (How|What|Where|Which|Of|By|That|One) ",
        "behind": r"\bbehind\b",
        "for": r"[,;] for (it|its|they|the|there|one|several|what|that)\b",
        "is to": r"\b(is|are) (not )?to [a-z]+",
        "more": r"(evaluation|axis|vector|parameters|step) more\b",
        "in place of": r"in place of",
        "ours": r"\b[Oo]urs\b",
        "of your own": r"of (yours|ours|your own)\b",
        "as described": r"not as described",
        "metaphor": r"\b(mend\w*|spoil\w*|believed|surprises|beside)\b",
        "go on": r"\bgo(es)? on\b",
    }.items()
}

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)

_NAME = re.compile(r"`[^`\n]+`")

Part = tuple[int, str]  # The number of the first line, and the text.


def files(area: str) -> list[pathlib.Path]:
    """The files of an area: a folder's modules, or all pages of prose."""
    if area != "pages":
        return sorted((ROOT / area).rglob("*.py"))
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found += (ROOT / "examples").rglob("*.md")
    return sorted(page for page in found if page.name != "CHANGELOG.md")


AREAS = ("radazo_jax", "examples", "tests", "pages")


def prose(path: pathlib.Path) -> Iterator[Part]:
    """The parts of a file that are prose."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        parts = [*_docstrings(text), *_comments(path)]
    else:
        parts = [(1, _without_code(text))]
    for first, part in parts:
        yield first, _NAME.sub("`…`", part)


def _docstrings(text: str) -> Iterator[Part]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                # An example is code, up to the next blank line.
                kept, inside = [], False
                for line in docstring.splitlines():
                    inside = line.strip() != "" and (
                        inside or line.lstrip().startswith(">>>")
                    )
                    kept.append("" if inside else line)
                yield node.body[0].lineno, '"""' + "\n".join(kept)


def _comments(path: pathlib.Path) -> Iterator[Part]:
    """Comments, those on consecutive lines as one text."""
    block: list[str] = []
    first = last = 0
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type != tokenize.COMMENT:
                continue
            if block and token.start[0] != last + 1:
                yield first, "\n".join(block)
                block = []
            if not block:
                first = token.start[0]
            last = token.start[0]
            block.append(token.string.lstrip("# "))
    if block:
        yield first, "\n".join(block)


def _without_code(text: str) -> str:
    """Markdown without code and tables, on the same lines."""
    text = _FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    lines = text.split("\n")
    code = tuple(i for i, line in enumerate(lines) if _is_no_prose(lines, i))
    return "\n".join("" if i in code else line for i, line in enumerate(lines))


def _is_no_prose(lines: list[str], i: int) -> bool:
    """Whether a line is a row of a table, a comment, or indented code."""
    line = lines[i]
    if line.startswith(("|", "<!--", "::: ")):
        return True
    return line.startswith("    ") and i > 0 and lines[i - 1].strip() == ""


def counts(area: str) -> dict[str, int]:
    """How often each pattern occurs in the prose of an area."""
    found = dict.fromkeys(PATTERNS, 0)
    for path in files(area):
        for _, text in prose(path):
            for name, pattern in PATTERNS.items():
                found[name] += len(pattern.findall(text))
    return found


def lines(path: pathlib.Path) -> Iterator[str]:
    """Each match of a pattern in a file: its line, the pattern, and the text there."""
    for first, text in prose(path):
        for name, pattern in PATTERNS.items():
            for match in pattern.finditer(text):
                number = text.count("\n", 0, match.start())
                there = text.split("\n")[number].strip()
                yield f"{path}:{first + number}: {name}: {there}"


def main(arguments: list[str]) -> None:
    """Prints the counts of all areas, or the matches in some files."""
    for argument in arguments:
        print(*lines(pathlib.Path(argument)), sep="\n")
    if arguments:
        return
    table = {area: counts(area) for area in AREAS}
    print(f"{'':14}", *(f"{area:>12}" for area in AREAS))
    for name in PATTERNS:
        print(f"{name:14}", *(f"{table[area][name]:12,}" for area in AREAS))


if __name__ == "__main__":
    main(sys.argv[1:])
