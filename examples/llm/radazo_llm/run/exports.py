"""Exports of a tuned model: adapters, adapters for llama.cpp, the merged model."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from radazo_llm.exits import reason
from radazo_llm.formats import adapters, config, gguf_adapter, save
from radazo_llm.settings import Settings

Exports = dict[str, Path | None]


def check(settings: Settings, model: Path, exports: Exports) -> None:
    """Raises a ValueError if an export is not possible, before hours of tuning."""
    for name, to in exports.items():
        if to is None:
            continue
        option = "--" + name.replace("_", "-")
        whole = settings.tune == "full" and name != "export_merged"
        if whole or to.resolve() == model.resolve():
            raise ValueError(
                f"{option} must not be the path of --model"
                f"{', and not be given with --tune full' * whole}; got {to}."
            )
        if name == "export_merged" and settings.quantized:
            raise ValueError(
                f"{option} must not be given with --quantize, whose matrices are not "
                f"the model's; got {to}."
            )
        if name == "export_gguf":
            gguf_adapter.check(config.read(model).to_dict().get("model_type"))
        _check_writable(option, to, name == "export_gguf")


def _check_writable(option: str, to: Path, is_file: bool) -> None:
    folder = to.parent if is_file else to
    try:
        if is_file and to.is_dir():
            raise IsADirectoryError("it is a folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise ValueError(
            f"{option} must be a path that can be written; got {to} "
            f"({error.strerror or error})."
        ) from None


def by_default(settings: Settings, output: Path, exports: Exports) -> Exports:
    """The exports that were named; otherwise one in the folder of the run."""
    if any(exports.values()):
        return exports
    if settings.tune == "full":
        return {"export_merged": output / "merged"}
    return {"export_adapters": output / "adapters"}


def write(model: Any, name: str, path: Path, exports: Exports) -> None:
    """Writes what was tuned.

    Args:
      model: The tuned model, which is consumed.
      name: The name of the untuned one.
      path: The folder or file of the untuned one.
      exports: A path by the name of an export.
    """
    if to := exports.get("export_adapters"):
        to.mkdir(parents=True, exist_ok=True)
        _whole(to, lambda folder: adapters.save(model, folder, base=name))
        print(f"The adapters are in {to}.")
    if to := exports.get("export_gguf"):
        with _one_line(to):
            gguf_adapter.save(model, to)
        print(f"The adapters for llama.cpp are in {to}.")
    if to := exports.get("export_merged"):
        to.mkdir(parents=True, exist_ok=True)
        _whole(to, lambda folder: save.merged(model, folder, base=path))
        print(f"The tuned model is in {to}.")


def _whole(to: Path, write: Callable[[Path], None]) -> None:
    """Writes files to a folder, each of which is there once all are whole."""
    with _one_line(to), tempfile.TemporaryDirectory(dir=to, prefix=".part-") as part:
        write(Path(part))
        names = {file.name for file in Path(part).iterdir()}
        if any(name.startswith("model") for name in names):
            for stale in to.glob("model*.safetensors*"):  # Of another number of files.
                if stale.name not in names:
                    stale.unlink()
        for name in sorted(names):
            Path(part, name).replace(to / name)


@contextlib.contextmanager
def _one_line(to: Path) -> Iterator[None]:
    """Says in one line that an export failed, and why."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{to} cannot be written ({reason(error)}). The same command with --resume "
            "exports the tuned model."
        ) from error
