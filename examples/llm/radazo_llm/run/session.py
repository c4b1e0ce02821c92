"""A run from its model to its exports: what `tune` and `reward` share."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tabulate import tabulate

from radazo_llm.formats import config, load
from radazo_llm.models import quantization
from radazo_llm.models.model import LanguageModel
from radazo_llm.reward import functions
from radazo_llm.run import exports, folder, rate
from radazo_llm.run.log import Log
from radazo_llm.run.loop import run
from radazo_llm.settings import Settings, fields

# The numbers by which a run is judged, and how they are written.
_FORMS = {"reward": ".4f", "accuracy": ".1%", "loss": ".4f"}
RESULT = "result.json"
# Makes the job of a run, the parts of its model, and what tells its data apart.
Prepare = Callable[[LanguageModel, contextlib.ExitStack], Any]


def execute(
    settings: Settings,
    prepare: Prepare,
    *,
    model: str,
    path: Path,
    output: Path,
    notes: dict[str, Any],
    to: exports.Exports,
    dtype: str | None = None,
    resume: bool = False,
    eval_first: bool = True,
    workers: str | None = None,
    report: str | None = None,
) -> list[dict[str, Any]]:
    """Runs, and exports what was tuned.

    Args:
      settings: The settings of the run.
      prepare: Makes the job of the run from the model, which it consumes.
      model: The name of the model.
      path: Its folder or file.
      output: The folder of the run.
      notes: Other contents of `settings.json`.
      to: The paths of exports.
      dtype: The dtype of the model; by default, of the present backend.
      resume: Whether to continue the run in the folder.
      eval_first: Whether to measure before the first step.
      workers: The address of a scheduler, or a number of processes.
      report: The name of a function that gets the numbers of each step.

    Returns:
      The evaluations.
    """
    dtype = dtype or config.default_dtype()
    send = functions.load(report, "--report") if report else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked(output))
        folder.check_free(output, resume)
        made = prepare(loaded(settings, path, dtype), stack)
        job, parts = made.job, made.parts
        about = {
            "settings": {
                f.name: getattr(settings, f.name) for f in fields(settings.command)
            },
            "identity": made.identity | {"--dtype": dtype},
            "notes": {"model": model} | notes,
        }
        begun = folder.begin(output, about, settings.num_steps, resume)
        if not settings.learning_rate and begun.measured is None:
            found = rate.measured(settings, job.fun, job.params, job.sample)
            begun = begun._replace(measured=found)
            folder.write(output, about, begun)
        log = stack.enter_context(Log(output, begun.done, settings.num_steps, send))
        params = run(
            settings,
            job,
            settings.rates(begun.measured, begun.ends),
            log,
            folder=output,
            done=begun.done,
            eval_first=eval_first,
            workers=workers,
        )
        log.bar.close()
        rows = log.evaluations()
        print(tabulate(list(map(_shown, rows)), headers="keys", floatfmt=".4f"))
        print(summary(rows))
        print(f"\nMetrics and the journal are in {output}.")
        to = exports.by_default(settings, output, to)
        exports.write(parts.model(params), model, path, to)
        found = verdict(rows)
        folder.write_json(output / RESULT, found)
        if found["worse"]:
            print(f"\n{found['note']}")
    return rows


def loaded(settings: Settings, path: Path, dtype: str) -> LanguageModel:
    """Loads and describes the model."""
    kept = settings.quantize == "file"
    model = load.load(path, dtype=dtype, keep_blocks=kept)
    for note in quantization.blocks_notes(model) if kept else ():
        print(note)
    parameters = quantization.num_parameters(model)
    print(
        f"{path.name}: {parameters / 1e6:.1f} million parameters, "
        f"{model.config.num_hidden_layers} layers. The first step and the first "
        "evaluation are compiled, which takes up to some minutes.",
        flush=True,
    )
    return model


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an evaluation that all evaluations have."""
    once = "_largest", "_calibrated"
    return {name: value for name, value in row.items() if not name.endswith(once)}


def _figure(row: dict[str, Any]) -> str:
    """The number by which a run is judged: its reward, its accuracy, or its loss."""
    return next(kind for kind in _FORMS if f"dev_{kind}" in row)


def summary(rows: list[dict[str, Any]]) -> str:
    """Returns a line on the run: its reward, its accuracy, or its loss."""
    first, last = rows[0], rows[-1]
    kind = _figure(last)
    name = "test" if f"test_{kind}" in last else "dev"
    form = _FORMS[kind]
    parts = [f"tuned {last[f'{name}_{kind}']:{form}}"]
    if f"{name}_calibrated" in first:
        calibrated = first[f"{name}_calibrated"]
        parts.insert(0, f"untuned with the threshold at its median {calibrated:.1%}")
    if first["step"] == 0:
        parts.insert(0, f"untuned {first[f'{name}_{kind}']:{form}}")
    if f"{name}_largest" in first:
        parts.insert(0, f"the largest class alone {first[f'{name}_largest']:.1%}")
    title = "Loss per token" if kind == "loss" else kind.capitalize()
    return f"\n{title} on {name}: {', '.join(parts)}."


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what became of a run: whether it is worse than the untuned model.

    Args:
      rows: The evaluations.
    """
    first, last = rows[0], rows[-1]
    kind = _figure(last)
    name, sign = f"dev_{kind}", 1 if kind == "loss" else -1
    # Of equal ones, the one with the lowest loss, and then the first.
    best = min(rows, key=lambda row: (sign * row[name], row.get("dev_loss", 0)))
    found = {"figure": name, "tuned": last[name], "best": best[name]}
    found |= {"best_step": best["step"], "worse": False, "note": ""}
    if first["step"] == 0:
        found["untuned"] = first[name]
        found["worse"] = sign * last[name] > sign * first[name]
    if found["worse"]:
        form, step = _FORMS[kind], best["step"]
        fix = "No evaluation was better. Give a smaller --learning-rate (and --output)."
        if step:
            fix = (
                f"The best evaluation was at step {step}, {best[name]:{form}}: the "
                f"same command with --resume --steps {step} exports the model there."
            )
        found["note"] = (
            f"The tuned model is worse than the untuned one: {kind} on dev "
            f"{last[name]:{form}}, untuned {first[name]:{form}}. {fix}"
        )
    return found
