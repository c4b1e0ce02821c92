"""Draws the pictures of pages, for light and dark pages, and for small screens.

    python docs/scripts/pictures.py [NAME ...]

It makes `docs/images/NAME_light.png` and `NAME_dark.png`, and `NAME_narrow_light.png`
and `NAME_narrow_dark.png` if a small screen needs another layout. Points and curves
come from runs, or from records in the repository.
"""

import itertools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.text import Text

import radazo_jax as zo

ROOT = pathlib.Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
MODELS = ROOT / "examples" / "llm" / "research" / "records"
MEMORY = ROOT / "examples" / "research" / "records" / "benchmarks"
BOARD = ROOT / "examples" / "research" / "records" / "board"
NARROW = 3.6  # Inches, which a small screen shows as 358 pixels.


class Colors(NamedTuple):
    """The colors of a scheme."""

    text: str
    quiet: str
    main: str
    accent: str
    levels: str


SCHEMES = {
    "light": Colors("#222222", "#6a7178", "#3f51b5", "#c63c10", "#c9cde3"),
    "dark": Colors("#e6e6e6", "#979da4", "#8c9eff", "#ff8a65", "#43496b"),
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
    axes.set(xticks=(), yticks=())
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


def step(colors: Colors, narrow: bool) -> plt.Figure:
    """Draws one step: the points, their differences, the estimate and the move."""
    theta, points, pulls, after = estimate()
    shape, size = ((2, 1), (NARROW, 6.3)) if narrow else ((1, 2), (5.4, 2.7))
    figure, (left, right) = plt.subplots(*shape, figsize=size)
    figure.subplots_adjust(0, 0, 1, 0.95 if narrow else 0.9, wspace=0.03, hspace=0.1)
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
    fills = [colors.levels, colors.main, colors.levels]
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
    """Draws the simulation of the home page, at the start and at its best point."""
    at = 0.01 * np.arange(1000)

    def positions(x: np.ndarray) -> np.ndarray:
        found, position, speed = [], 0.0, 0.0
        for _ in at:
            speed += 0.01 * (x[0] * (1 - position) - x[1] * speed)
            position += 0.01 * speed
            found.append(position)
        return np.array(found)

    def settling_time(x: np.ndarray) -> float:
        return 0.01 * float(np.flatnonzero(np.abs(positions(x) - 1) > 0.02)[-1] + 1)

    start, settings = np.ones(2), {"bounds": (0.1, 20), "progress": False}
    best = zo.minimize(settling_time, start, **settings).best
    figure, axes = card()
    axes.axhspan(0.98, 1.02, color=colors.levels)
    for x, color in ((start, colors.quiet), (best.params, colors.accent)):
        axes.plot(at, positions(x), color=color, lw=2)
        axes.axvline(settling_time(x), color=color, ls=":", lw=1.2)
    said = {"fontsize": 9, "va": "center"}
    axes.text(1.0, 0.15, f"best: {best.value:.2f} s", color=colors.accent, **said)
    words = f"start: {settling_time(start):.2f} s"
    axes.text(7.8, 0.15, words, color=colors.quiet, ha="right", **said)
    axes.set(xlim=(-0.2, 10.0), ylim=(-0.05, 1.35))
    return figure


def loop(colors: Colors) -> plt.Figure:
    """Draws the loss of the training loop of the home page."""
    x = jax.random.normal(jax.random.key(0), (64, 3))
    y = jnp.sign(x @ jnp.array([1.0, -2.0, 0.5]))

    def errors(params: jax.Array) -> jax.Array:
        return jnp.mean((jnp.sign(x @ params) - y) ** 2)

    method = zo.radazo(1e-2), zo.forward_difference(smoothing=0.5)
    start, settings = jnp.ones(3), {"num_steps": 300, "progress": False}
    values = np.asarray(zo.train(errors, start, *method, key=1, **settings).values)
    figure, axes = card()
    axes.fill_between(range(300), values, color=colors.levels)
    axes.plot(values, color=colors.main, lw=1.8)
    axes.text(290, 0.9 * values.max(), "loss", color=colors.text, ha="right")
    axes.set_ylim(0)
    return figure


def devices(colors: Colors) -> plt.Figure:
    """Draws devices with a point each, which send each other losses alone."""
    figure, axes = card()
    axes.plot((0, 3), (0, 0), color=colors.quiet, lw=1.2)
    for i in range(8):
        x, y = i % 4, 0.62 if i < 4 else -0.62
        axes.plot((x, x), (0, y / 2), color=colors.quiet, lw=1.2)
        corner = (x - 0.4, y - 0.3)
        frame = {"fill": False, "edgecolor": colors.main, "linewidth": 1.5}
        axes.add_patch(plt.Rectangle(corner, 0.8, 0.6, **frame))
        said = f"$f(\\theta_{i + 1})$"
        axes.text(x, y, said, color=colors.text, fontsize=9, ha="center", va="center")
    axes.text(1.5, 0.06, "4 bytes", color=colors.text, fontsize=9, ha="center")
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


# The map of tools: a question, and the tool if its answer is yes. The last tool is for
# functions without a yes.
QUESTIONS = (
    ("Does jax.grad\nwork, and fit\nin memory?", "jax.grad\nand Optax"),
    ("A reward of\ngenerated\ntext?", "zo.evolution_\nstrategy"),
    ("A network, or\nover 10,000\nparameters?", "zo.train"),
    ("A sum of\nsquares?", "zo.minimize\nleast_squares"),
    ("Are there\ncategories?", "Optuna"),
    ("Whole\nnumbers?", "zo.minimize\nstep=1"),
)
LAST = "zo.minimize"


def tools(colors: Colors, narrow: bool) -> plt.Figure:
    """The map that leads from a function to a tool."""
    size = (NARROW, 5.6) if narrow else (9.6, 2.2)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    bare(axes)
    across, down = np.array([[0.0, -1.0], [1.0, 0.0]] if narrow else np.diag([1, -1.0]))
    far = np.array([0.4, 0.3] if narrow else [0.44, 0.3])
    frame = {"boxstyle": "round,pad=0.45", "facecolor": "none", "linewidth": 1.4}
    frame["edgecolor"] = colors.main
    style = {"fontsize": 9, "ha": "center", "va": "center"}
    tool = style | {"family": "monospace", "color": colors.main, "bbox": frame}
    for i, (question, found) in enumerate(QUESTIONS):
        at = i * across
        axes.text(*at, question, color=colors.text, **style)
        axes.text(*(at + down), found, **tool)
        for way, answer in ((down, "yes"), (across, "no")):
            begun, end = at + far * way, at + way - far * way
            arrow(axes, begun, end, colors.quiet, 1.2)
            beside = (begun + end) / 2 + (
                [0.0, 0.13] if way[0] else [0.12 if narrow else 0.17, 0.0]
            )
            axes.text(*beside, answer, color=colors.quiet, **style)
    axes.text(*(len(QUESTIONS) * across), LAST, **tool)
    edges = (-0.5, 1.45, -6.25, 0.4) if narrow else (-0.5, 6.5, -1.35, 0.35)
    axes.axis(edges)
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


def board(colors: Colors, narrow: bool) -> plt.Figure:
    """Draws the share of targets that tools reach within 30 (d + 1) evaluations."""
    rows = json.loads((BOARD / "classes.json").read_bytes())["rows"]
    size = (NARROW, 4.6) if narrow else (7.4, 3.8)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
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
    axes.set_xlabel("targets reached, in percent", color=colors.text)
    axes.tick_params(colors=colors.text, length=0)
    axes.grid(axis="y", color=colors.levels, lw=0.8)
    for side in axes.spines.values():
        side.set_visible(False)
    named(figure, axes, colors, narrow)
    return figure


def named(figure: plt.Figure, axes: plt.Axes, colors: Colors, narrow: bool) -> None:
    """Adds the names of lines: above the panel on a small screen, or next to it."""
    style = {"frameon": False, "labelcolor": colors.text}
    if narrow:
        figure.legend(loc="outside upper center", ncols=2, fontsize=9, **style)
        axes.tick_params(labelsize=9)
    else:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), **style)


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
KINDS = {"differences": "quiet", "line search": "accent", "population": "main"}


def decides(colors: Colors, narrow: bool) -> plt.Figure:
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
    figure, axes = panel(colors, narrow)
    axes.plot(best, color=colors.text, lw=1.0, label="lowest so far")
    for name, points in found.items():
        if points:
            x, y = np.transpose(points)
            axes.scatter(x, y, s=14, color=getattr(colors, KINDS[name]), label=name)
    axes.set_yscale("log")
    axes.set_ylabel("value", color=colors.text)
    named(figure, axes, colors, narrow)
    return figure


def panel(colors: Colors, narrow: bool) -> tuple[plt.Figure, plt.Axes]:
    """An empty panel over evaluations."""
    size = (NARROW, 3.2) if narrow else (7.4, 3.0)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    axes.patch.set_alpha(0)
    axes.set_xlabel("evaluations", color=colors.text)
    axes.tick_params(colors=colors.text, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    for side in axes.spines.values():
        side.set_color(colors.quiet)
    return figure, axes


# Lines of the tools of a comparison: a color of the scheme, and a style.
LINES = {
    "default method": ("accent", "-"),
    "R-AdaZO": ("main", "-"),
    "pycma": ("quiet", "-"),
    "Nevergrad": ("quiet", "--"),
}


def compared(
    colors: Colors, narrow: bool, name: str, label: str, sign: float = 1.0
) -> plt.Figure:
    """Draws the best values so far of a comparison: all seeds, and their mean."""
    record = json.loads((ROOT / f"docs/black_boxes/{name}.json").read_bytes())
    figure, axes = panel(colors, narrow)
    for tool, (color, style) in LINES.items():
        curves = sign * np.array(record["runs"][tool]["curves"])
        last = record["settings"]["evaluations"] - 1
        at = np.linspace(0, last, len(curves[0])).astype(int) + 1
        color = getattr(colors, color)
        axes.plot(at, curves.T, style, color=color, lw=0.7, alpha=0.5)
        axes.plot(at, curves.mean(axis=0), style, color=color, lw=2, label=tool)
    axes.set_ylabel(label, color=colors.text)
    named(figure, axes, colors, narrow)
    return figure


def int8(colors: Colors, narrow: bool) -> plt.Figure:
    """Draws the errors of the int8 model."""
    return compared(colors, narrow, "onnx_int8", "share of errors")


def pipeline(colors: Colors, narrow: bool) -> plt.Figure:
    """Draws the cross-validated score of the pipeline."""
    return compared(colors, narrow, "pipeline", "1 − R², cross-validated")


def robot(colors: Colors, narrow: bool) -> plt.Figure:
    """Draws the return of the robot."""
    return compared(colors, narrow, "mujoco_policy", "return", -1.0)


CARDS: dict[str, Callable[[Colors], plt.Figure]] = {
    "card_network": network,
    "card_memory": memory,
    "card_reward": reward,
    "card_simulator": simulator,
    "card_loop": loop,
    "card_devices": devices,
    "card_machines": machines,
}
PICTURES: dict[str, Callable[[Colors, bool], plt.Figure]] = {
    "step": step,
    "tools": tools,
    "board": board,
    "decides": decides,
    "onnx_int8": int8,
    "pipeline": pipeline,
    "mujoco_policy": robot,
}


def save(figure: plt.Figure, name: str) -> None:
    """Writes a picture with a transparent background.

    It says the size of its smallest letters, as a share of its width, and the colors of
    all letters.
    """
    figure.patch.set_alpha(0)
    figure.canvas.draw()
    texts = figure.findobj(lambda x: isinstance(x, Text) and x.get_text().strip())
    sizes = [x.get_fontsize() / 72 / figure.get_figwidth() for x in texts]
    colors = sorted({matplotlib.colors.to_hex(x.get_color()) for x in texts})
    said = {"Letters": f"{min(sizes, default=1.0):.5f}", "Colors": " ".join(colors)}
    figure.savefig(IMAGES / f"{name}.png", dpi=240, metadata=said)
    plt.close(figure)


def main() -> None:
    """Draws the pictures that are named, or all, in both schemes and layouts."""
    matplotlib.use("Agg")
    names = sys.argv[1:] or [*CARDS, *PICTURES]
    for name, (scheme, colors) in itertools.product(names, SCHEMES.items()):
        if name in CARDS:
            save(CARDS[name](colors), f"{name}_{scheme}")
        else:
            save(PICTURES[name](colors, False), f"{name}_{scheme}")
            save(PICTURES[name](colors, True), f"{name}_narrow_{scheme}")


if __name__ == "__main__":
    main()
