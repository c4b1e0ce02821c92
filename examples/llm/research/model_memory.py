"""Draws the memory of a step of a 13B model on a GPU, for light and dark pages.

    python -m research.model_memory

It reads `records/llm_memory_gpu.json`, which `memory.py` writes, and
`all_parameters_gpu.json` of the project `examples/research`, and makes
`docs/images/model_memory_light.png` and `model_memory_dark.png`. The two decoders
differ a little, so each size is divided by the size of its own forward pass.
"""

from pathlib import Path

import click
import matplotlib.pyplot as plt

from research import common
from research.common import read
from research.compilers import GPUS

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "docs" / "images"
DECODERS = common.RECORDS / "llm_memory_gpu.json"
REPLAYED = ROOT / "examples/research/records/benchmarks/all_parameters_gpu.json"
# Text, bars of radazo_jax, and bars of the rest.
COLORS = {
    "light": ("#222222", "#3f51b5", "#9aa0a6"),
    "dark": ("#e6e6e6", "#8c9eff", "#7d838a"),
}


def bars() -> list[tuple[str, float, bool]]:
    """Returns a name, times inference, and whether it is this package's, per bar."""
    adam = _size(
        DECODERS, size="13b", device="h100", method="adam, remat", tuned="full"
    )
    replayed = _size(REPLAYED, size="13B", device="h100", method="R-AdaZO, replayed")
    return [
        ("Inference", 1.0, False),
        ("R-AdaZO, replayed moments", replayed["memory/forward"], True),
        ("Backpropagation, Adam", adam["total/forward"], False),
    ]


def limit() -> float:
    """Returns what a program may use of an H100, in forward passes."""
    forward = _size(DECODERS, size="13b", device="h100", method="forward")
    return 0.95 * GPUS["h100"].memory / 2**30 / forward["total_GiB"]


def _size(path: Path, **case: str) -> dict[str, float]:
    rows = read(path)["rows"]
    (row,) = (row for row in rows if case.items() <= row.items())
    return row


def draw(scheme: str) -> plt.Figure:
    """Draws one figure, with a transparent background."""
    text, own, other = COLORS[scheme]
    names, sizes, owned = zip(*bars(), strict=True)
    figure, ((axes,),) = common.panels(1, 1, (6.4, 1.9))
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    colors = [own if mine else other for mine in owned]
    drawn = axes.barh(names, sizes, color=colors, height=0.65)
    axes.bar_label(drawn, fmt="%.2f", padding=4, color=text, fontsize=11)
    axes.axvline(limit(), color=text, lw=1, ls="--")
    axes.text(limit() + 0.1, 0, "one H100", color=text, fontsize=11, va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(sizes))
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelcolor=text, labelsize=11)
    axes.set_title(
        "All weights of a 13B model: memory / memory of inference",
        color=text,
        fontsize=11,
        loc="right",
    )
    return figure


@click.command(help=__doc__)
def main() -> None:
    for scheme in COLORS:
        path = IMAGES / f"model_memory_{scheme}.png"
        common.save_figure(draw(scheme), path)


if __name__ == "__main__":
    main()
