"""Language models fine-tuned by forward passes only.

    python -m examples.llm.main         # the paper's comparison, at a laptop's size
    python -m examples.llm.main --fast  # a small run: to see that it works
    python -m examples.llm.main --model facebook/opt-1.3b --task sst2 --data FOLDER

Without `--model`, a small OPT is pretrained and then tuned on the sentences that are
here, by all methods; a table, a JSON file and a figure say how that went. With it, one
run of one method: the paper's job.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub.errors import HFValidationError
from tabulate import tabulate

import radazo_jax as zo
from examples.llm import corpus, data, export, figure, lora, pretrain, train, weights
from examples.llm.checkpoint import locked
from examples.llm.model import OPT
from examples.paper import common

OUTPUT = Path(__file__).resolve().parents[1] / "out" / "llm"
PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "tokenizers")
# Options of a single run -> the fields of its settings.
FIELDS = {
    "tune": "tune",
    "method": "method",
    "law": "law",
    "learning_rate": "learning_rate",
    "b1": "b1",
    "smoothing": "smoothing",
    "directions": "num_directions",
    "batch_size": "batch_size",
    "steps": "num_steps",
    "seed": "seed",
    "eval_every": "eval_every",
    "checkpoint_every": "checkpoint_every",
}


def make_parser() -> common.Parser:
    parser = common.Parser(
        prog="examples.llm.main",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the model: float32 on a CPU by default, bfloat16 otherwise",
    )
    parser.add_argument(
        "--fast", action="store_true", help="a small comparison: to see that it works"
    )
    one = parser.add_argument_group("one run")
    one.add_argument("--model", help="a folder, or a name in the local cache")
    one.add_argument("--task", choices=tuple(data.TASKS))
    one.add_argument("--data", type=Path, help="folder of the task's files")
    one.add_argument(
        "--train-examples", type=common.at_least_one, help="at most; 1000, as in MeZO"
    )
    one.add_argument(
        "--dev-examples", type=common.at_least_one, help="at most; 500, as in MeZO"
    )
    one.add_argument(
        "--max-length", type=common.at_least_one, help="cut examples to as many tokens"
    )
    one.add_argument("--tune", choices=tuple(lora.FILTERS))
    one.add_argument("--method", choices=train.METHODS)
    one.add_argument("--law", choices=tuple(train.LAWS))
    one.add_argument("--learning-rate", type=float)
    one.add_argument("--b1", type=float)
    one.add_argument("--smoothing", type=float)
    one.add_argument("--directions", type=int, help="K")
    one.add_argument("--batch-size", type=int)
    one.add_argument("--steps", type=int)
    one.add_argument("--seed", type=int)
    one.add_argument("--eval-every", type=int)
    one.add_argument("--checkpoint-every", type=int)
    one.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in the output folder, if there is one",
    )
    one.add_argument(
        "--export-adapters",
        type=Path,
        metavar="FOLDER",
        help="write the adapters or the soft prompt, in the format of peft",
    )
    one.add_argument(
        "--export-merged",
        type=Path,
        metavar="FOLDER",
        help="write the tuned model, in Hugging Face's format",
    )
    return parser


def run_one(args: argparse.Namespace) -> None:
    """One run of one method, on a model and data that are there."""
    for name in ("task", "data"):
        if getattr(args, name) is None:
            raise ValueError(f"--model needs --{name}.")
    task = data.TASKS[args.task]
    kind = "classification" if task.train_as_classification else "language_model"
    given = {FIELDS[name]: getattr(args, name) for name in FIELDS}
    settings = train.Settings(
        objective=kind, **{k: v for k, v in given.items() if v is not None}
    )
    check_exports(args, settings)
    folder = find_model(args.model)
    # What is wrong with the small files is said before the large ones are read.
    limits = {"train": args.train_examples or 1000, "dev": args.dev_examples or 500}
    examples = {
        split: sample(task.read(args.data / getattr(task, split)), limit)
        for split, limit in limits.items()
    }
    tokenizer = data.load_tokenizer(folder)
    model = weights.load(folder, dtype=args.dtype or default_dtype())
    room = model.config.max_position_embeddings
    if settings.tune == "prompt":
        room -= settings.prompt_length
    # Cut, as MeZO does, only where a length is asked for.
    cut = args.max_length is not None
    length = min(args.max_length, room) if cut else room
    batches = {
        split: data.encode(tokenizer, some, max_length=length, truncate=cut)
        for split, some in examples.items()
    }
    result = train.run(
        settings, model, **batches, folder=args.output, resume=args.resume
    )
    print(tabulate(result.evaluations, headers="keys", floatfmt=".4f"))
    print(f"\nMetrics and checkpoints are in {args.output}.")
    if args.export_adapters is not None:
        export.save_adapters(result.model, args.export_adapters, base=args.model)
        print(f"The adapters are in {args.export_adapters}.")
    if args.export_merged is not None:
        export.save_merged(result.model, args.export_merged, base=folder)
        print(f"The tuned model is in {args.export_merged}.")


def check_exports(args: argparse.Namespace, settings: train.Settings) -> None:
    """Before anything is trained."""
    for name, impossible in (("export_adapters", "full"), ("export_merged", "prompt")):
        folder = getattr(args, name)
        if folder is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if settings.tune == impossible:
            raise ValueError(f"{option} must not be given with --tune {impossible}.")
        if folder.resolve() == Path(args.model).resolve():
            raise ValueError(
                f"{option} must be another folder than that of --model, got {folder}."
            )


def sample(examples: Sequence[data.Example], limit: int) -> list[data.Example]:
    """As many at random, and the same for all runs: what differs is the method."""
    order = np.random.default_rng(0).permutation(len(examples))
    return [examples[i] for i in order[:limit]]


def find_model(name: str) -> Path:
    """The folder of a model: itself, or where Hugging Face's cache has it."""
    if Path(name).is_dir():
        return Path(name)
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, weights.CONFIG)
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    raise FileNotFoundError(
        f"--model must be a folder or a model in the local Hugging Face cache, got "
        f"{name!r}; `hf download {name}` gets its files where there is a network."
    )


def default_dtype() -> Any:
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def compare(args: argparse.Namespace) -> None:
    """The paper's comparison, on a small model that is made here."""
    start = time.perf_counter()
    plan, settings, name = (
        (figure.FAST, pretrain.FAST, "fast")
        if args.fast
        else (figure.FULL, pretrain.Settings(), "llm")
    )
    folder = pretrain.pretrained(args.output / f"{name}-model", settings)
    tokenizer = data.load_tokenizer(folder)
    batches = [
        data.encode(
            tokenizer,
            data.sst2(corpus.SENTIMENT / file),
            max_length=settings.max_position_embeddings,
        )
        for file in ("train.tsv", "dev.tsv")
    ]
    dtype = args.dtype or default_dtype()
    graphdef, weights_of_base = nnx.split(weights.load(folder, dtype=dtype))

    def make_model() -> OPT:
        return nnx.merge(graphdef, jax.tree.map(jnp.copy, weights_of_base))

    found = figure.compare(plan, figure.Problem(make_model, *batches))
    runs = common.numbers(found)  # As the file has them, for tables and picture too.
    content = provenance(args, start) | {
        "settings": dataclasses.asdict(train.Settings()) | plan._asdict(),
        "pretraining": dataclasses.asdict(settings),
        "num_parameters": sum(x.size for x in jax.tree.leaves(weights_of_base)),
        "dtype": str(jnp.dtype(dtype)),
        "train_examples": len(batches[0].label),
        "dev_examples": len(batches[1].label),
        "rows": list(figure.rows(runs)),
        "runs": runs,
    }
    common.write(args.output / f"{name}.json", content)
    common.save(figure.plot(runs), args.output / f"{name}.png")
    print(f"\n{figure.printed(content['rows'])}\n")
    print(
        f"Wrote {args.output / name}.json and .png after "
        f"{content['seconds'] / 60:.1f} minutes."
    )


def provenance(args: argparse.Namespace, start: float) -> dict[str, Any]:
    """How the file came about; `start` is when the script began."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "command": " ".join(["python -m examples.llm.main", *args.given]),
        "date": datetime.date.today().isoformat(),
        "device": f"{device.platform} ({device.device_kind})",
        "cpu_count": os.cpu_count(),
        "versions": versions | {"radazo_jax": zo.__version__},
        "seconds": round(time.perf_counter() - start),
        "cpu_seconds": round(time.process_time()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    args.given = sys.argv[1:] if argv is None else list(argv)
    try:
        check(args)
        with locked(args.output):
            compare(args) if args.model is None else run_one(args)
    except (ValueError, OSError, FloatingPointError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        rest = "" if args.model is None else "; --resume goes on from its checkpoint"
        parser.exit(130, f"\n{parser.prog}: interrupted{rest}\n")


def check(args: argparse.Namespace) -> None:
    """Whether the options go together."""
    one_run = (
        *FIELDS,
        *("task", "data", "train_examples", "dev_examples", "max_length"),
        *("export_adapters", "export_merged"),
    )
    given = [name for name in one_run if getattr(args, name) is not None]
    given += ["resume"] if args.resume else []
    if args.model is None and given:
        raise ValueError(f"--{given[0].replace('_', '-')} needs --model.")
    if args.model is not None and args.fast:
        raise ValueError("--fast is for the comparison, which --model replaces.")


if __name__ == "__main__":
    main()
