"""Files from elsewhere, which are read as what they must be or refused in one line."""

import json
import os
from pathlib import Path
from typing import Any

_LARGEST = 1 << 26  # Bytes of a file of JSON.


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
      ValueError: If the file has none, or is nested too deep, or very large.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _LARGEST:
                raise ValueError(f"it has more than {_LARGEST} bytes")
            value = json.loads(file.read(size))
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON object: {error!s:.200}") from None
    return value


def model_file(folder: Path, name: str) -> Path:
    """The path of a model's file, which is not elsewhere.

    In Hugging Face's cache, files are links to `blobs`, next to the folder of all
    snapshots.

    Raises:
      ValueError: If it is a link to elsewhere.
    """
    path, inside = folder / name, folder.resolve()
    check_within(path, inside, inside.parent.parent / "blobs")
    return path


def check_within(path: Path, *folders: Path) -> None:
    """Raises if a path, its links followed, ends in none of these folders."""
    end = path.resolve()
    if not any(map(end.is_relative_to, folders)):
        raise ValueError(f"{path} must not be a link to another folder; got {end}")
