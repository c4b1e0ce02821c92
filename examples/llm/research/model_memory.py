"""Draws the memory of a step of a 13B model on a GPU, for light and dark pages.

    python -m research.model_memory

It reads `records/llm_memory_gpu.json`, which `memory.py` writes,
and makes `docs/images/model_memory_light.png` and `model_memory_dark.png`.
"""

from pathlib import Path
from typing import Any

import click
import matplotlib.pyplot as plt

from research import common
from research.common import read
from research.compilers import GPUS

IMAGES = Path(__file__).parents[3] / "docs" / "images"
RECORD = common.RECORDS / "llm_memory_gpu.json"
# A program may use 95 % of the memory.
LIMIT = 0.95 * GPUS["h100"].memory / 2**30
NAMES = {
    ("forward", ""): "Inference",
    ("radazo", "lora"): "Adapters: R-AdaZO",
    ("adam, remat", "lora"): "Adapters: backpropagation, Adam",
    ("zo_sgd", "full"): "All weights: ZO-SGD",
    ("radazo", "full"): "All weights: R-AdaZO",
    ("adam, remat", "full"): "All weights: backpropagation, Adam",
}
# Text and grid, bars of radazo_jax, and bars of the rest.
COLORS = {
    "light": ("#222222", "#3f51b5", "#9aa0a6"),
    "dark": ("#e6e6e6", "#8c9eff", "#7d838a"),
}


def bars(content: dict[str, Any]) -> list[tuple[str, float, bool]]:
    """Returns a name, GiB, and whether it is a method of this package, per bar."""
    rows = {
        (row["method"], row["tuned"]): row["total_GiB"]
        for row in content["rows"]
        if row["size"] == "13b" and row["device"] == "h100"
    }
    return [
        (name, rows[case], case[0] in ("zo_sgd", "radazo"))
        for case, name in NAMES.items()
    ]


def draw(content: dict[str, Any], scheme: str) -> plt.Figure:
    """Draws one figure, with a transparent background."""
    text, own, other = COLORS[scheme]
    names, sizes, owned = zip(*bars(content), strict=True)
    figure, ((axes,),) = common.panels(1, 1, (7.6, 3.0))
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    colors = [own if mine else other for mine in owned]
    drawn = axes.barh(names, sizes, color=colors, height=0.65)
    axes.bar_label(drawn, fmt="%.1f GiB", padding=4, color=text, fontsize=10)
    axes.axvline(LIMIT, color=text, lw=1, ls="--")
    axes.text(LIMIT + 2, 0, "one H100", color=text, fontsize=10, va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(sizes))
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelcolor=text, labelsize=10)
    axes.set_title(
        "Memory of a step with a 13B language model",
        color=text,
        fontsize=11,
        loc="left",
    )
    return figure


@click.command(help=__doc__)
def main() -> None:
    content = read(RECORD)
    for scheme in COLORS:
        path = IMAGES / f"model_memory_{scheme}.png"
        common.save_figure(draw(content, scheme), path)


if __name__ == "__main__":
    main()
