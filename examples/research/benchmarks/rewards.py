"""Training on a reward: populations and a policy gradient, at equal tokens.

    python -m examples.research.benchmarks.rewards --output docs/evidence/rewards.json

A small model has learned to add from solved sums, most of which forget the carry
(`examples/apps/llm/warm_up.py`), and is rewarded for right answers. Each method is
tuned on the same number of settings, with one seed, and its best setting is run with
three other seeds. ``--resume`` takes the rows that are there, and the journal of a run
that was cut. Each journal is replayed, and the parameters compared.
"""

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from examples.apps.llm import grpo, reward_log, reward_run, rewards, warm_up, weights
from examples.apps.llm.reward_task import Task, steps_done
from examples.common import cli, figures
from examples.common.checkpoint import locked
from examples.common.record import collect, numbers, read
from examples.common.tables import Table

FOLDER = Path(__file__).resolve().parents[2] / "out" / "rewards"
NAMES = {"radazo": "R-AdaZO", "zo_sgd": "ZO-SGD", "grpo": "GRPO, by backpropagation"}
COLORS = {"radazo": "#D55E00", "zo_sgd": "#0072B2", "grpo": "#555555"}
REPLIES = 1024  # Of a step.
# By method: learning rates, and σ of populations or the replies to a prompt of GRPO.
GRIDS = {
    "radazo": ((5e-4, 1e-3), (0.03, 0.06)),
    "zo_sgd": ((0.03, 0.1), (0.03, 0.06)),
    "grpo": ((1e-3, 3e-3), (8, 32)),
}
SEARCHED = ("method", "learning_rate", "other")


def settings(
    method: str, learning_rate: float, other: float, num_steps: int, seed: int
) -> reward_run.Settings:
    grouped = method == "grpo"
    size = int(other) if grouped else 32
    return reward_run.Settings(
        method=method,
        learning_rate=learning_rate,
        smoothing=reward_run.Settings.smoothing if grouped else other,
        temperature=1.0 if grouped else 0.0,
        population_size=size,
        num_prompts=REPLIES // size,
        num_steps=num_steps,
        eval_every=max(num_steps // 10, 1),
        eval_problems=1000,
        seed=seed,
    )


def measured(model: warm_up.Settings, **case: Any) -> dict[str, Any]:
    """The curves of a run, its CPU time, and some of the replies."""
    begin, chosen = process_time(), settings(**case)
    width = FOLDER / f"width-{model.hidden_size}"
    source = warm_up.warmed_up(width / "model", model)
    folder = width / "-".join(map(str, case.values()))

    def make_task(pool: rewards.RewardPool) -> Task:
        loaded = weights.load(source, dtype=jnp.float32)
        return Task(chosen, loaded, source, "sum", pool, folder)

    population = case["method"] != "grpo"
    with locked(str(folder)), rewards.RewardPool({"answer": 1.0}, 1) as pool:
        resumed = steps_done(folder) > 0 or ended(folder, chosen.num_steps)
        run = reward_run.run if population else grpo.run
        if ended(folder, chosen.num_steps) and not population:
            return row_of(folder) | {"cpu_s": None}
        params = run(chosen, make_task(pool), folder)
        spent = round(process_time() - begin)
        found: dict[str, Any] = {"cpu_s": None if resumed else spent}
        if population:
            again = reward_run.replayed(chosen, make_task(pool), folder)
            equal = jax.tree.map(np.array_equal, again, params)
            found["replayed"] = all(jax.tree.leaves(equal))
    return found | row_of(folder)


def ended(folder: Path, num_steps: int) -> bool:
    """Whether the log has the last evaluation of a run."""
    return any("eval" in x and x["step"] == num_steps for x in reward_log.rows(folder))


def row_of(folder: Path) -> dict[str, Any]:
    """The curves of a run, from its log."""
    lines = reward_log.rows(folder)
    steps = [row for row in lines if "eval" not in row]
    names = ("reward", "spread", "tokens", "ended")
    tokens = sum(row["tokens"] + row["ended"] for row in steps)
    return {
        "generated": round(tokens * REPLIES),
        "evaluations": [
            [step, *numbers([row["eval"], row["tokens"], row["ended"]])]
            for step, row in {r["step"]: r for r in lines if "eval" in r}.items()
        ],
        "steps": {name: numbers([row[name] for row in steps]) for name in names},
        "samples": samples(folder),
    }


def samples(folder: Path) -> list[str]:
    """The first and the last replies of a run, to the same held-out problems."""
    text = (folder / reward_log.SAMPLES).read_text("utf-8")
    blocks = [block.splitlines()[1:] for block in text.split("--- ")[1:]]
    return [*blocks[0], *blocks[-1]]


def best(rows: Sequence[dict[str, Any]], method: str) -> dict[str, Any]:
    """The setting of a method whose held-out reward ends highest."""
    mine = [row for row in rows if row["method"] == method]
    found = max(mine, key=lambda row: row["evaluations"][-1][1])
    return {name: found[name] for name in SEARCHED}


def of_runs(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each method that were not part of the search."""
    return {
        method: [r for r in content["rows"] if r["method"] == method and r["seed"]]
        for method in content["searched"]
    }


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean and the standard deviation over seeds."""
    return (
        f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"
    )


def tables(content: dict[str, Any]) -> list[Table]:
    ends, along = [], []
    for method, rows in of_runs(content).items():
        first, last = ([r["evaluations"][i][1] for r in rows] for i in (0, -1))
        gain = [b - a for a, b in zip(first, last, strict=True)]
        error = statistics.stdev(gain) / len(gain) ** 0.5
        ends.append(
            [
                NAMES[method],
                spread(first),
                spread(last),
                f"{statistics.mean(gain) / error:.0f}",
                f"{statistics.mean(r['generated'] for r in rows) / 1e6:.2f}",
            ]
        )
        for at in zip(*(r["evaluations"] for r in rows), strict=True):
            along.append(
                [
                    NAMES[method],
                    str(at[0][0]),
                    *(spread([x[i] for x in at], 2) for i in (1, 2, 3)),
                ]
            )
    search = [
        [
            NAMES[row["method"]],
            f"{row['learning_rate']:g}",
            f"{row['other']:g}",
            f"{row['evaluations'][-1][1]:.3f}",
            "" if row["cpu_s"] is None else str(row["cpu_s"]),
        ]
        for row in content["rows"]
        if not row["seed"]
    ]
    said = [
        [NAMES[method], str(row["evaluations"][at][0]), f"`{line}`"]
        for method, (row, *_) in of_runs(content).items()
        for at, lines in zip(
            (0, -1), np.split(np.array(row["samples"]), 2), strict=True
        )
        for line in lines
    ]
    return [
        Table(
            "Held-out reward, mean ± standard deviation over seeds, and the gain in "
            "standard errors",
            ["method", "at first", "at the end", "gain / error", "million tokens"],
            ends,
        ),
        Table(
            "Held-out reward, length of a reply and share of replies that end",
            ["method", "step", "reward", "tokens", "ended"],
            along,
        ),
        Table(
            "The search, with one seed and fewer steps: held-out reward at the end",
            ["method", "η", "σ, or replies to a prompt", "reward", "CPU seconds"],
            search,
        ),
        Table("Replies of a run", ["method", "step", "reply (reward)"], said),
    ]  # fmt: skip


def plot(content: dict[str, Any]) -> plt.Figure:
    figure, all_axes = figures.panels(1, 3, (12, 3.4))
    reward, length, ended = all_axes.flat
    for method, rows in of_runs(content).items():
        style = {"color": COLORS[method], "label": NAMES[method]}
        at, *curves = np.array([r["evaluations"] for r in rows]).transpose(2, 0, 1)
        for axes, curve in zip(all_axes.flat, curves, strict=True):
            figures.band(axes, at[0], curve, **style)
        if method != "grpo":
            along = [
                np.array([r["steps"][x] for r in rows]) for x in ("reward", "spread")
            ]
            mean, deviation = (x.mean(0) for x in along)
            steps = np.arange(len(mean))
            for edge in (mean - deviation, mean + deviation):
                reward.plot(steps, edge, color=COLORS[method], lw=0.4, alpha=0.5)
    reward.set(title="reward (thin: one deviation of members)", xlabel="step")
    length.set(title="tokens of a reply", xlabel="step")
    ended.set(title="share of replies that end", xlabel="step", ylim=(0, 1.05))
    figures.legend(figure, reward, 3)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = cli.parser(__doc__)
    cli.add_record(parser, resume=True)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=cli.at_least_one, default=3)
    parser.add_argument("--search-steps", type=cli.at_least_one, default=40)
    parser.add_argument("--steps", type=cli.at_least_one, default=100)
    parser.add_argument("--fast", action="store_true", help="a model of 6,000 weights")
    options = parser.parse_args(argv)
    model = warm_up.FAST if options.fast else warm_up.Settings()

    def run(**case: Any) -> tuple[dict[str, Any], Any]:
        return case, functools.partial(measured, model, **case)

    def collected(cases: Any, resume: bool) -> list[dict[str, Any]]:
        return collect(
            options.output,
            resume,
            cases,
            lambda rows: rows,
            searched=options.methods,
            model=dataclasses.asdict(model),
        )

    cases = [
        run(
            method=method,
            learning_rate=rate,
            other=other,
            num_steps=options.search_steps,
            seed=0,
        )
        for method in options.methods
        for rate in GRIDS[method][0]
        for other in GRIDS[method][1]
    ]
    rows = []
    if options.resume and options.output is not None and options.output.exists():
        rows = read(options.output)["rows"]
    # A record without the runs would lose them.
    if not {tuple(case.values()) for case, _ in cases} <= {
        tuple(map(row.get, cases[0][0])) for row in rows
    }:
        rows = collected(cases, options.resume)
    cases += [
        run(**best(rows, method), num_steps=options.steps, seed=seed)
        for seed in range(1, options.seeds + 1)
        for method in options.methods
    ]
    rows = collected(cases, True)
    if options.output is not None:
        content = {"rows": rows, "searched": options.methods}
        figures.save(plot(content), options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
