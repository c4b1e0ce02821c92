"""The job of `radazo-llm tune`: a model, its data, a run, and exports."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from tabulate import tabulate

from radazo_llm.exits import reason
from radazo_llm.formats import find, gguf_adapter, weights
from radazo_llm.models import quantization
from radazo_llm.tune import data, on_workers, tracking
from radazo_llm.tune.checkpoint import locked, write_json
from radazo_llm.tune.run import SETTINGS, Result, run
from radazo_llm.tune.settings import Settings

# Kinds of tuning that have no such export.
_NOT_EXPORTED = {
    "export_adapters": ("full", "scales"),
    "export_gguf": ("full", "prompt", "scales"),
    "export_merged": ("prompt", "scales"),
}


def tune(
    settings: Settings,
    *,
    model: str,
    source: Any,
    output: Path,
    dtype: str | None = None,
    resume: bool = False,
    eval_first: bool = True,
    train_examples: int | None = None,
    eval_examples: int | None = None,
    workers: str | None = None,
    wandb: bool = False,
    **exports: Path | None,
) -> None:
    """Tunes a model on examples, and exports it.

    Args:
      settings: The settings of the run.
      model: A name that `find.model` takes.
      source: The examples: `data.TaskFiles`, or `splits.Own`.
      output: The folder of the run.
      dtype: The dtype of the model; by default, of the present backend.
      resume: Whether to continue the run in the folder.
      eval_first: Whether to measure before the first step.
      train_examples: The largest number of examples to train on.
      eval_examples: The largest number of examples to evaluate.
      workers: The address of a scheduler, or a number of processes.
      wandb: Whether the metrics go to Weights & Biases too.
      exports: Paths of `export_adapters`, `export_gguf` and `export_merged`.

    Raises:
      ValueError: If an argument is wrong, or the folder has another run.
      FloatingPointError: If the loss is not finite.
      RunError: If the workers are lost.
    """
    path = find.model(model)
    _check_exports(settings, path, exports)
    _check_wandb(wandb, workers)
    # Errors in the small files are reported before the large ones are read.
    prompt_length = settings.prompt_length if settings.tune == "prompt" else 0
    limits = prompt_length, train_examples, eval_examples
    splits = source.read(path, *limits)
    _check_objective(settings, splits.batches[0])
    print(splits.summary, flush=True)
    dtype = dtype or weights.default_dtype()
    options = {"dtype": dtype, "keep_blocks": settings.quantize == "file"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(output))
        about = _about(settings, model, source, dtype, limits)
        log = stack.enter_context(tracking.on_wandb(output, about)) if wandb else None
        loaded = _loaded(settings, path, options)
        if workers is not None:
            result = on_workers.run(
                settings,
                loaded,
                *splits.batches,
                make=functools.partial(
                    _on_worker, source.absolute(), path.resolve(), limits, options
                ),
                workers=workers,
                folder=output,
                resume=resume,
            )
            write_json(output / SETTINGS, about)
        else:
            result = run(
                settings,
                loaded,
                *splits.batches,
                folder=output,
                resume=resume,
                eval_first=eval_first,
                eval_examples=eval_examples or source.eval_examples,
                announce=True,
                about=about,
                log=log,
            )
        print(tabulate(result.evaluations, headers="keys", floatfmt=".4f"))
        print(summary(result.evaluations))
        print(f"\nMetrics and checkpoints are in {output}.")
        _export(result, model, path, exports)


def dry_run(source: Any, model: str) -> None:
    """Prints examples as the model sees them, and reads no weights.

    Args:
      source: The examples, `splits.Own`.
      model: A name that `find.model` takes.
    """
    path = find.model(model)
    print(source.shown(path))


def _about(
    settings: Settings, model: str, source: Any, dtype: str, limits: Sequence[Any]
) -> dict[str, Any]:
    """The content of `settings.json`."""
    _, train_examples, eval_examples = limits
    return {
        "settings": dataclasses.asdict(settings),
        "model": model,
        "data": dataclasses.asdict(source),
        "dtype": dtype,
        "train_examples": train_examples,
        "eval_examples": eval_examples,
    }


def _check_wandb(wandb: bool, workers: str | None) -> None:
    if wandb and workers is not None:
        raise ValueError("--wandb must not be given with --workers. Leave it out.")


def _check_exports(
    settings: Settings, path: Path, exports: dict[str, Path | None]
) -> None:
    for name, tuned in _NOT_EXPORTED.items():
        to = exports.get(name)
        if to and (settings.tune in tuned or to.resolve() == path.resolve()):
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} must not be the path of --model, and not be given "
                f"with --tune {' or '.join(tuned)}; got {to}."
            )
    if exports.get("export_merged") and settings.quantized:
        raise ValueError(
            "--export-merged must not be given with --quantize, whose matrices are not "
            f"the model's; got {exports['export_merged']}."
        )
    if exports.get("export_gguf"):
        gguf_adapter.check(weights.read_config(path).to_dict().get("model_type"))
    for name, to in exports.items():
        if to is not None:
            _check_writable("--" + name.replace("_", "-"), to, name == "export_gguf")


def _check_writable(option: str, to: Path, is_file: bool) -> None:
    """Writes a byte to the folder of an export, before hours of tuning."""
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


def _check_objective(settings: Settings, train: data.Batch) -> None:
    if settings.objective != "language_model" and train.targets.shape[1] == 1:
        raise ValueError(
            "--objective must be language_model for completions, since there is "
            f"nothing to choose from; got {settings.objective}."
        )


def _loaded(settings: Settings, path: Path, options: dict[str, Any]) -> Any:
    """Loads and describes the model."""
    # A model that will be quantized may be too large for its device.
    device = jax.local_devices(backend="cpu" if settings.quantized else None)[0]
    with jax.default_device(device):
        model = weights.load(path, **options)
    if settings.quantized:
        kept = options["keep_blocks"]
        notes = quantization.blocks_notes if kept else quantization.notes
        for note in notes(model):
            print(note)
    parameters = quantization.num_parameters(model)
    print(
        f"{path.name}: {parameters / 1e6:.1f} million parameters, "
        f"{model.config.num_hidden_layers} layers. The first step and the first "
        "evaluation are compiled, which takes up to some minutes.",
        flush=True,
    )
    return model


def _on_worker(
    source: Any, model: Path, limits: Sequence[Any], options: dict[str, Any]
) -> tuple[Any, data.Batch]:
    """The model and the examples to train on, as a worker reads them."""
    train, *_ = source.read(model, *limits).batches
    return weights.load(model, **options), train


def summary(evaluations: list[dict[str, Any]]) -> str:
    """Returns a line on the run: its accuracy, or its loss if nothing is chosen."""
    first, last = evaluations[0], evaluations[-1]
    chosen = any(key.endswith("_accuracy") for key in last)
    kind, form = ("accuracy", ".1%") if chosen else ("loss", ".4f")
    name = "test" if f"test_{kind}" in last else "dev"
    parts = [f"tuned {last[f'{name}_{kind}']:{form}}"]
    if first["step"] == 0:
        parts.insert(0, f"untuned {first[f'{name}_{kind}']:{form}}")
    if f"{name}_calibrated" in first:
        calibrated = first[f"{name}_calibrated"]
        parts.insert(1, f"untuned with the threshold at its median {calibrated:.1%}")
    title = "Accuracy" if chosen else "Loss per token"
    return f"\n{title} on {name}: {', '.join(parts)}."


def _export(
    result: Result, name: str, path: Path, exports: dict[str, Path | None]
) -> None:
    model = result.model
    if to := exports.get("export_adapters"):
        _whole(to, lambda folder: weights.save_adapters(model, folder, base=name))
        print(f"The adapters are in {to}.")
    if to := exports.get("export_gguf"):
        with _one_line(to):
            gguf_adapter.save(model, to)
        print(f"The adapters for llama.cpp are in {to}.")
    if to := exports.get("export_merged"):
        _whole(to, lambda folder: weights.save_merged(model, folder, base=path))
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
    """Says in one line that an export failed, whatever the class of the error."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{to} cannot be written ({reason(error)}). Make room, or choose another "
            "path; the same command with --resume exports the tuned model."
        ) from error
