"""Draws the pictures of the home page, for light and dark pages.

    python docs/scripts/pictures.py

It makes `docs/images/step_light.png`, `docs/images/card_*_light.png`, and the same for
dark pages. Points and curves come from runs, or from records in the repository.
"""

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np

import radazo_jax as zo

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
MODELS = ROOT / "examples" / "llm" / "research" / "records"
MEMORY = ROOT / "examples" / "research" / "records" / "benchmarks"
BOARD = ROOT / "examples" / "research" / "records" / "board"


class Colors(NamedTuple):
    """The colors of a scheme."""

    text: str
    quiet: str
    main: str
    accent: str
    levels: str


SCHEMES = {
    "light": Colors("#222222", "#9aa0a6", "#3f51b5", "#d84315", "#c9cde3"),
    "dark": Colors("#e6e6e6", "#7d838a", "#8c9eff", "#ff8a65", "#43496b"),
}


def loss(x: jax.Array) -> jax.Array:
    """A smooth function of two parameters, with its minimum at the origin."""
    a, b = x[..., 0], x[..., 1]
    return 0.5 * a**2 + 1.6 * b**2 + 0.5 * a * b


def levels(axes: plt.Axes, colors: Colors) -> None:
    """Draws the level lines of the loss."""
    a, b = np.meshgrid(np.linspace(-2.9, 0.9, 200), np.linspace(-0.9, 2.3, 200))
    values = np.asarray(loss(jnp.stack([a, b], axis=-1)))
    axes.contour(
        a, b, values, np.geomspace(0.1, 12, 11), colors=colors.levels, linewidths=0.8
    )


def bare(axes: plt.Axes) -> None:
    """Removes the frame, the ticks and the background."""
    axes.axis("off")
    axes.patch.set_alpha(0)


def arrow(
    axes: plt.Axes, start: np.ndarray, end: np.ndarray, color: str, width: float
) -> None:
    """Draws an arrow between two points."""
    style = {"arrowstyle": "-|>", "color": color, "lw": width, "shrinkA": 0}
    style |= {"shrinkB": 0, "mutation_scale": 7 + 3 * width}
    axes.annotate("", end, start, arrowprops=style)


def estimate() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns θ, the points [K, 2], their parts of the step [K, 2], and the new θ."""
    start, smoothing, rate = jnp.array([-1.75, 1.25]), 0.72, 0.3
    estimator = zo.forward_difference(num_directions=6, smoothing=smoothing)
    run = zo.ask_tell(start, zo.zo_sgd(rate), estimator, key=2)
    points = run.ask()
    values = np.asarray(loss(points))
    run.tell(values)
    theta, after = np.asarray(start), run.params
    moved = np.linalg.norm(points - theta, axis=1) > 1e-3
    before, values, points = float(values[~moved][0]), values[moved], points[moved]
    slopes, directions = (values - before) / smoothing, (points - theta) / smoothing
    # The estimator multiplies by d = 2, because u lies on the unit sphere.
    pulls = -rate * 2 * slopes[:, None] * directions
    np.testing.assert_allclose(theta + pulls.mean(axis=0), after, atol=1e-4)
    return theta, points, pulls, after


def step(colors: Colors) -> plt.Figure:
    """Draws one step: the points, their differences, the estimate and the move."""
    theta, points, pulls, after = estimate()
    figure, (left, right) = plt.subplots(1, 2, figsize=(5.4, 2.7))
    figure.subplots_adjust(0, 0, 1, 0.9, wspace=0.03)
    titles = "1  Evaluate f at K points", "2  Estimate, and step"
    for axes, title in zip((left, right), titles, strict=True):
        levels(axes, colors)
        bare(axes)
        axes.set(xlim=(-2.9, 0.9), ylim=(-0.95, 2.25), aspect="equal")
        axes.set_title(title, color=colors.text, fontsize=10, loc="left", pad=3)
        axes.plot(0, 0, "+", color=colors.quiet, ms=9)
        named = {"color": colors.quiet, "fontsize": 8.5, "ha": "center"}
        axes.text(0, -0.45, "minimum of f", **named)
        axes.plot(*theta, "o", color=colors.text, ms=6, zorder=4)
        at = theta + np.array([-0.3, 0.12])
        axes.text(*at, r"$\theta$", color=colors.text, fontsize=12)
    radius = np.linalg.norm(points[0] - theta)
    left.add_patch(plt.Circle(theta, radius, fill=False, ls=":", ec=colors.quiet))
    for point in points:
        left.plot(*zip(theta, point, strict=True), color=colors.main, lw=1)
    left.scatter(*points.T, color=colors.main, s=34, zorder=3)
    last = points[np.argmax(points[:, 0])] + np.array([0.13, -0.05])
    label = r"$\theta+\mu u_k$"
    left.text(*last, label, color=colors.main, fontsize=11)
    for pull in pulls:
        arrow(right, theta, theta + pull, colors.main, 0.9)
    arrow(right, theta, after, colors.accent, 2.4)
    label = r"$-\frac{f(\theta+\mu u_k)-f(\theta)}{\mu}\,u_k$"
    right.text(-0.95, 1.75, label, color=colors.main, fontsize=12)
    label = "the step: their mean"
    right.text(-1.0, 0.95, label, color=colors.accent, fontsize=9)
    return figure


def card(size: tuple[float, float] = (2.8, 1.4)) -> tuple[plt.Figure, plt.Axes]:
    """An empty picture of a card."""
    figure, axes = plt.subplots(figsize=size)
    figure.subplots_adjust(0.02, 0.04, 0.98, 0.96)
    bare(axes)
    return figure, axes


def network(colors: Colors) -> plt.Figure:
    """Draws a network with an output in steps, through which no gradient passes."""
    figure, axes = card()
    heights = [np.linspace(-1, 1, n) for n in (4, 5, 3)]
    for x, (these, those) in enumerate(itertools.pairwise(heights)):
        for a in these:
            for b in those:
                axes.plot((x, x + 1), (a, b), color=colors.levels, lw=0.9)
    for x, these in enumerate(heights):
        axes.scatter(np.full(len(these), x), these, color=colors.main, s=38, zorder=3)
    arrow(axes, np.array([2.15, 0]), np.array([2.6, 0]), colors.quiet, 1.2)
    stairs = np.linspace(-0.8, 0.8, 5)
    x = np.linspace(2.75, 3.9, 5)
    axes.step(x, stairs, where="mid", color=colors.accent, lw=2)
    axes.set(xlim=(-0.3, 4.1), ylim=(-1.25, 1.25))
    return figure


def memory(colors: Colors) -> plt.Figure:
    """Draws memory in multiples of inference, from the records of compiled programs."""
    figure, axes = card()
    bars = {"Inference": 1.0, "R-AdaZO": replayed(), "Adam": backpropagation()}
    fills = [colors.quiet, colors.main, colors.quiet]
    drawn = axes.barh(list(bars), list(bars.values()), color=fills, height=0.62)
    for bar, (name, value) in zip(drawn, bars.items(), strict=True):
        y, inside = bar.get_y() + bar.get_height() / 2, value > 3
        said = f"{name}, {value:.2f} ×"
        x = 0.2 if inside else value + 0.15
        axes.text(x, y, said, color=colors.text, fontsize=9.5, va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 6.2)
    return figure


def replayed() -> float:
    """The memory of R-AdaZO with replayed moments, in forward passes."""
    record = json.loads((MEMORY / "all_parameters_gpu.json").read_bytes())
    (row,) = (
        row
        for row in record["rows"]
        if (row["size"], row["method"]) == ("13B", "R-AdaZO, replayed")
    )
    return row["memory/forward"]


def backpropagation() -> float:
    """The memory of backpropagation with Adam, in forward passes."""
    record = json.loads((MODELS / "llm_memory_gpu.json").read_bytes())
    (row,) = (
        row
        for row in record["rows"]
        if (row["size"], row["device"], row["tuned"]) == ("13b", "h100", "full")
        and row["method"] == "adam, remat"
    )
    return row["total/forward"]


def reward(colors: Colors) -> plt.Figure:
    """Draws the mean reward of a population, whose answers are rounded."""
    target = jnp.array([0.3, -0.7, 0.5, 0.1])

    def negative(answers: jax.Array) -> jax.Array:
        return -jnp.exp(-3 * jnp.abs(jnp.round(answers, 1) - target)).mean()

    estimator = zo.evolution_strategy(zo.gaussian(), 16, 0.1)
    result = zo.train(
        negative,
        jnp.zeros(4),
        zo.radazo(1e-2, bias_correction=True),
        estimator,
        num_steps=120,
        key=0,
        progress=False,
    )
    figure, axes = card()
    rewards = -np.asarray(result.values)
    axes.fill_between(range(120), rewards, color=colors.levels)
    axes.plot(rewards, color=colors.main, lw=1.8)
    axes.set_ylim(0)
    axes.text(2, rewards.max(), "reward", color=colors.text, fontsize=10, va="top")
    return figure


def simulator(colors: Colors) -> plt.Figure:
    """Draws the points of a run of a Python function in bounds."""
    points = []

    def simulate(x: np.ndarray) -> float:
        points.append(np.array(x))
        return float(np.hypot(x[0] - 1.6, 2 * (x[1] + 0.5)) + 0.2 * np.round(2 * x[1]))

    zo.minimize(
        simulate,
        np.array([-1.5, 0.6]),
        zo.methods.evolution(),
        bounds=([-2.0, -1.0], [1.2, 1.0]),
        max_evaluations=90,
        progress=False,
    )
    figure, axes = card()
    box = plt.Rectangle((-2, -1), 3.2, 2, fill=False, ec=colors.text, lw=1.5)
    axes.add_patch(box)
    found = np.array(points)
    shades = np.linspace(0.25, 1, len(found))
    axes.scatter(*found.T, color=colors.main, s=16, alpha=shades, lw=0)
    best = found[np.argmin([simulate(x) for x in found])]
    axes.plot(*best, "*", color=colors.accent, ms=16)
    axes.set(xlim=(-2.9, 2.1), ylim=(-1.15, 1.15), aspect="equal")
    return figure


def devices(colors: Colors) -> plt.Figure:
    """Draws devices with a point each, which send each other losses alone."""
    figure, axes = card()
    axes.plot((0, 3), (0, 0), color=colors.quiet, lw=1.2)
    for i in range(8):
        x, y = i % 4, 0.62 if i < 4 else -0.62
        axes.plot((x, x), (0, y), color=colors.quiet, lw=1.2, zorder=0)
        corner = (x - 0.4, y - 0.3)
        axes.add_patch(plt.Rectangle(corner, 0.8, 0.6, color=colors.main))
        said = f"$f(\\theta+\\mu u_{i + 1})$"
        axes.text(x, y, said, color="white", fontsize=6.5, ha="center", va="center")
    axes.text(1.5, 0.06, "4 bytes", color=colors.text, fontsize=8, ha="center")
    axes.set(xlim=(-0.5, 3.5), ylim=(-1.0, 1.0))
    return figure


def machines(colors: Colors) -> plt.Figure:
    """Draws machines around the driver of a run; one of them has left."""
    figure, axes = card()
    for i, angle in enumerate(np.linspace(0, 2 * np.pi, 7, endpoint=False)):
        place = np.array([1.9 * np.cos(angle), 0.85 * np.sin(angle)])
        gone = i == 5
        color, line = (colors.accent, ":") if gone else (colors.main, "-")
        axes.plot((0, place[0]), (0, place[1]), line, color=colors.quiet, lw=1.2)
        mark = "X" if gone else "s"
        axes.plot(*place, mark, color=color, ms=13 if gone else 15)
    axes.plot(0, 0, "o", color=colors.text, ms=18)
    axes.set(xlim=(-2.3, 2.3), ylim=(-1.2, 1.2))
    return figure


# The map of tools: a node has a place and a text; answers lead to the next one. A tool
# has a frame.
QUESTIONS = {
    "gradient": (0.0, 3.0, "Does jax.grad work,\nand fit in memory?"),
    "network": (0.0, 2.0, "A network or\na language model?"),
    "score": (0.0, 1.0, "Is the loss a reward\nof generated text?"),
    "traced": (2.2, 2.0, "More than 10,000\nparameters?"),
    "slow": (2.2, 1.0, "Is an evaluation\nslow?"),
}
TOOLS = {
    "optax": (2.2, 3.0, "jax.grad and Optax"),
    "radazo": (0.0, 0.0, "zo.train, or\nzo.value_and_grad"),
    "shaping": (-2.2, 1.0, "zo.evolution_strategy"),
    "many": (4.4, 2.0, "zo.train"),
    "workers": (4.4, 1.0, "zo.minimize\nwith workers, journal"),
    "minimize": (2.2, 0.0, "zo.minimize"),
}
ANSWERS = (
    ("gradient", "optax", "yes"),
    ("gradient", "network", "no"),
    ("network", "score", "yes"),
    ("network", "traced", "no"),
    ("score", "shaping", "yes"),
    ("score", "radazo", "no"),
    ("traced", "many", "yes"),
    ("traced", "slow", "no"),
    ("slow", "workers", "yes"),
    ("slow", "minimize", "no"),
)


def tools(colors: Colors) -> plt.Figure:
    """The map that leads from a function to a tool."""
    figure, axes = plt.subplots(figsize=(9.6, 4.2), layout="constrained")
    figure.patch.set_alpha(0)
    bare(axes)
    nodes = QUESTIONS | TOOLS
    for start, end, answer in ANSWERS:
        (x, y, _), (to_x, to_y, _) = nodes[start], nodes[end]
        far = np.array([0.98, 0.0]) if y == to_y else np.array([0.0, 0.27])
        away = np.sign([to_x - x, to_y - y])
        begun, done = np.array([x, y]) + far * away, np.array([to_x, to_y]) - far * away
        arrow(axes, begun, done, colors.quiet, 1.2)
        beside = (begun + done) / 2 + (np.array([0, 0.1]) if y == to_y else [0.16, 0])
        axes.text(*beside, answer, color=colors.quiet, fontsize=9, ha="center")
    for name, (x, y, text) in nodes.items():
        tool = name in TOOLS
        frame = {"boxstyle": "round,pad=0.45", "facecolor": "none", "linewidth": 1.4}
        frame["edgecolor"] = colors.main if tool else "none"
        font = {"family": "monospace" if tool else "sans-serif", "fontsize": 9}
        axes.text(
            *(x, y, text),
            **font,
            color=colors.main if tool else colors.text,
            ha="center",
            va="center",
            bbox=frame,
        )
    axes.set(xlim=(-3.3, 5.5), ylim=(-0.4, 3.4))
    return figure


# Tools of the comparison of optimizers, with their names and marks in the picture.
COMPARED = {
    "default": ("radazo_jax", "o"),
    "newuoa": ("NEWUOA, BOBYQA", "^"),
    "cobyqa": ("COBYQA", "v"),
    "lbfgsb": ("L-BFGS-B", "s"),
    "cma": ("CMA", "D"),
    "powell": ("Powell", "P"),
}
CLASSES = {
    "free": "Smooth",
    "boxes": "In a box",
    "middle": "30 to 100 parameters",
    "steps": "In steps",
    "scales-2": "Badly scaled",
    "nan-20": "Failing at 20 % of points",
    "region": "Failing in a region",
    "jump": "Jumps",
    "nonsmooth": "Kinks",
    "multimodal": "Many minima",
}


def board(colors: Colors) -> plt.Figure:
    """Draws the share of targets that tools reach within 30 (d + 1) evaluations."""
    rows = json.loads((BOARD / "classes.json").read_bytes())["rows"]
    figure, axes = plt.subplots(figsize=(7.4, 3.8), layout="constrained")
    axes.patch.set_alpha(0)
    for tool, (name, mark) in COMPARED.items():
        ours = tool == "default"
        shares = [share(rows, kind, tool) for kind in CLASSES]
        axes.plot(
            *(shares, range(len(CLASSES)), mark),
            color=colors.accent if ours else colors.quiet,
            markersize=8 if ours else 5,
            zorder=3 if ours else 2,
            label=name,
        )
    axes.set_yticks(range(len(CLASSES)), CLASSES.values(), color=colors.text)
    axes.invert_yaxis()
    axes.set_xlim(-3, 103)
    axes.set_xlabel("share of targets reached, in percent", color=colors.text)
    axes.tick_params(colors=colors.text, length=0)
    axes.grid(axis="y", color=colors.levels, lw=0.8)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1, 1), frameon=False, labelcolor=colors.text
    )
    return figure


def share(rows: list[dict[str, Any]], kind: str, tool: str) -> float:
    """The share of targets of a class within 30 (d + 1) evaluations, in percent."""
    found = [row for row in rows if (row["kind"], row["method"]) == (kind, tool)]
    within = [
        count is not None and count <= 30 * (row["dimension"] + 1)
        for row in found
        for count in row["evaluations"]
    ]
    return 100 * float(np.mean(within)) if within else float("nan")


# Steps of the default method, by their number of points.
KINDS = {"differences": "levels", "line search": "accent", "population": "main"}


def decides(colors: Colors) -> plt.Figure:
    """Draws the values of a run of the default method, by the kind of their step."""
    size, found, best = 8, {name: [] for name in KINDS}, []

    def fun(x: np.ndarray) -> float:
        away = x - np.array([1.0, 2.0, -1.0, 3.0, 0.5, 2.0, -2.0, 1.5])
        away[5] = np.round(4 * x[5]) / 4 - 1
        return float(1e-2 + np.sum(away**2))

    def see(report: zo.runs.Report) -> None:
        n = len(report.values)
        kind = "line search" if n == 1 else "differences" if n <= size else "population"
        first = len(best)
        for i, value in enumerate(report.values):
            found[kind].append((first + i, value))
            best.append(min([value, *best[-1:]]))

    zo.minimize(fun, np.zeros(size), max_evaluations=160, progress=False, callback=see)
    figure, axes = plt.subplots(figsize=(7.4, 3.0), layout="constrained")
    axes.patch.set_alpha(0)
    axes.plot(best, color=colors.quiet, lw=1.2, label="lowest so far")
    for name, points in found.items():
        if points:
            x, y = np.transpose(points)
            axes.scatter(x, y, s=14, color=getattr(colors, KINDS[name]), label=name)
    axes.set_yscale("log")
    axes.set_xlabel("evaluations", color=colors.text)
    axes.set_ylabel("value", color=colors.text)
    axes.tick_params(colors=colors.text, which="both")
    for side in axes.spines.values():
        side.set_color(colors.quiet)
    axes.legend(frameon=False, labelcolor=colors.text)
    return figure


PICTURES: dict[str, Callable[[Colors], plt.Figure]] = {
    "step": step,
    "card_network": network,
    "card_memory": memory,
    "card_reward": reward,
    "card_simulator": simulator,
    "card_devices": devices,
    "card_machines": machines,
    "tools": tools,
    "board": board,
    "decides": decides,
}


def main() -> None:
    """Draws each picture in both schemes, with a transparent background."""
    matplotlib.use("Agg")
    for name, draw in PICTURES.items():
        for scheme, colors in SCHEMES.items():
            figure = draw(colors)
            figure.patch.set_alpha(0)
            figure.savefig(IMAGES / f"{name}_{scheme}.png", dpi=240, metadata={})
            plt.close(figure)


if __name__ == "__main__":
    main()
