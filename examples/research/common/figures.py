"""Figures in one style."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np


def panels(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[plt.Figure, np.ndarray]:
    """A figure and its axes [rows, columns]."""
    figure, all_axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **options
    )
    for axes in all_axes.flat:
        tidy(axes)
    return figure, all_axes


def tidy(axes: plt.Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", lw=0.7)


def band(axes: plt.Axes, x: Any, curves: np.ndarray, **style: Any) -> None:
    """The mean of the curves [seeds, points] as a line, and their range as a band."""
    low, high = curves.min(axis=0), curves.max(axis=0)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.2, lw=0)
    axes.plot(x, curves.mean(axis=0), **style)


def legend(figure: plt.Figure, axes: plt.Axes, columns: int) -> None:
    """Draws one legend below all axes, with the curves of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False
    )


def save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
