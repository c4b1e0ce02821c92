"""Rows of a user's files: JSON Lines, CSV, or a folder of either.

Rows are read one at a time, so that memory does not grow with their number.
"""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_LONGEST = 1 << 24  # Bytes of a line.
_LARGEST = 1 << 28  # Bytes of an array.
# What is before an object of an array, and after the last.
_BETWEEN, _CLOSED = re.compile(r"\s*[\[,]\s*"), re.compile(r"\s*\]\s*\Z")
_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = {".csv": ",", ".tsv": "\t"}
# The names of splits in files, folders and columns.
SPLITS = {
    "train": "train",
    "dev": "dev",
    "val": "dev",
    "valid": "dev",
    "validation": "dev",
    "test": "test",
}


def split_of(name: str) -> str | None:
    """The split that a name stands for, in any case."""
    return SPLITS.get(name.strip().lower())


class Row(NamedTuple):
    """A row of a file.

    Attributes:
      place: The file and the line, for messages.
      values: The values by column.
      split: train, dev or test if the name of the file says so.
    """

    place: str
    values: dict[str, Any]
    split: str | None = None


def rows(path: Path) -> Iterator[Row]:
    """Yields the rows of a file, or of the files of a folder.

    Args:
      path: A file of JSON Lines (.jsonl, .ndjson, .json) or of an array (.json), a
        table with a header (.csv, .tsv), or a folder with files of these kinds that
        are named by their split, such as train.jsonl.

    Raises:
      ValueError: If the file is of another kind, or damaged; it names the line.
      FileNotFoundError: If there is no such file.
    """
    if path.is_dir():
        yield from _of_folder(path)
        return
    kind = path.suffix.lower()
    if kind not in (*_LINES, *_TABLES):
        raise ValueError(
            f"--data must be a file of {', '.join((*_LINES, *_TABLES))}, or a folder; "
            f"got {path}."
        )
    lines = _lines(path)
    if kind in _TABLES:
        yield from _of_table(path, lines, _TABLES[kind])
        return
    if kind == ".json" and _is_array(path):
        yield from _of_array(path)
        return
    for number, line in lines:
        if line.strip():
            place = f"{path}:{number}"
            yield Row(place, _columns(_json_object(place, line)))


def _of_folder(path: Path) -> Iterator[Row]:
    kinds = (*_LINES, *_TABLES)
    found = [
        file
        for file in sorted(path.iterdir())
        if file.suffix.lower() in kinds and split_of(file.stem)
    ]
    if not any(split_of(file.stem) == "train" for file in found):
        raise ValueError(
            f"{path} must have a file train.jsonl, train.csv or train.tsv; got none. "
            "A dataset of the package datasets writes one by to_json."
        )
    for file in found:
        for row in rows(file):
            yield row._replace(split=split_of(file.stem))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers, each with its end."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST + 1):
            number += 1
            is_object = line.lstrip().startswith(b"{")
            if b"\r" in line.rstrip(b"\r\n") and (is_object or b'"' not in line):
                raise ValueError(
                    f"{path}:{number}: must end with \\n; got \\r alone between lines. "
                    "Save the file with the line ends of Unix."
                )
            if len(line) > _LONGEST:
                raise ValueError(f"{path}:{number}: must be at most {_LONGEST} bytes.")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}:{number}: must be UTF-8; got byte "
                    f"0x{line[error.start]:02x} ({error.reason}). Save the file as "
                    "UTF-8."
                ) from None


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(256).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _of_array(path: Path) -> Iterator[Row]:
    """The rows of an array of JSON, each with the line on which it begins."""
    if path.stat().st_size > _LARGEST:
        raise ValueError(
            f"{path} must have at most {_LARGEST} bytes, as an array. Save the rows as "
            "JSON Lines, an object on each line."
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8; {error}.") from None
    decoder, begin, number, at = json.JSONDecoder(), _BETWEEN.match(text), 1, 0
    while begin and not _CLOSED.match(text, begin.end()):
        number, at = number + text.count("\n", at, begin.end()), begin.end()
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = None, at
        begin = _BETWEEN.match(text, end)
        if not isinstance(value, dict) or not (begin or _CLOSED.match(text, end)):
            break
        yield Row(f"{path}:{number}", _columns(value))
        if not begin:
            return
    else:
        return
    raise ValueError(
        f"{path}:{number}: must be a JSON object, in an array of them; got "
        f"{text[at:]!r:.80}."
    )


def _json_object(place: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        value = error
    if not isinstance(value, dict):
        raise ValueError(
            f"{place}: must be a JSON object on one line; got {line.strip()!r:.80}. "
            "Save the rows as JSON Lines, an object on each line."
        )
    return value


def _of_table(
    path: Path, lines: Iterator[tuple[int, str]], delimiter: str
) -> Iterator[Row]:
    first = next(lines, (1, ""))[1]
    if delimiter == "," and "," not in first and ";" in first:
        delimiter = ";"
    texts = (line for _, line in _with(first, lines))
    table = csv.reader(texts, delimiter=delimiter, strict=True)
    begun = 1
    try:
        header = next(table, [])
        if len(set(header)) < len(header) or not all(header):
            raise ValueError(
                f"{path}:1: must be a header of distinct names; got "
                f"{first.strip()!r:.80}."
            )
        while True:
            begun = table.line_num + 1
            values = next(table, None)
            if values is None:
                return
            if not values:
                continue  # An empty line.
            place = f"{path}:{begun}"
            if len(values) != len(header):
                raise ValueError(
                    f"{place}: must have {len(header)} columns, as the header; got "
                    f"{len(values)}. Quote texts that contain {delimiter!r}."
                )
            yield Row(place, _columns(dict(zip(header, values, strict=True))))
    except csv.Error as error:
        raise ValueError(f"{path}:{begun}: must be a row of a table: {error}") from None


def _with(first: str, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield 1, first
    yield from lines


def _columns(values: dict[str, Any]) -> dict[str, Any]:
    """The columns under their usual names: GLUE has `sentence` for `text`."""
    if "sentence" in values and "text" not in values:
        values["text"] = values.pop("sentence")
    return values
