"""Tables and pictures of a record of the board."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from board.profiles import median_ratio, profile
from common import figures
from common.record import array
from common.tables import Table

REFERENCE = "ZO-AdaMM, best of 5"  # What ratios are to.
UNTUNED = "radazo_jax, untuned"
RULES = ("ZO-SGD", "ZO-AdaMM", "R-AdaZO")
BUDGETS = (1, 3, 10, 30)
KINDS = ("Synthetic", "Rotated", "CUTEst", "BBOB", "Noisy")
# By Okabe and Ito, and a line's style for what is tuned.
STYLES = {
    UNTUNED: ("#D55E00", "-"),
    "R-AdaZO, parabolic step": ("#CC79A7", "-"),
    REFERENCE: ("#0072B2", "--"),
    "ZO-SGD, best of 5": ("#777777", "--"),
    "ZO-AdaMM, η = 0.001": ("#56B4E9", "-"),
    "SciPy L-BFGS-B": ("#000000", "-"),
    "CMA, best of 2": ("#E69F00", "--"),
    "VkD-CMA, best of 2": ("#F0E442", "--"),
    "NGOpt": ("#009E73", "-"),
    "SNES": ("#88CCAA", "-"),
}


class Runs(NamedTuple):
    """The runs of one method: evaluations [problems, targets], and d [problems]."""

    evaluations: np.ndarray
    dimensions: np.ndarray
    names: list[tuple[str, str, int]]

    def at(self, names: Iterable[tuple[str, str, int]]) -> np.ndarray:
        """The evaluations on the problems of these names."""
        places = {name: i for i, name in enumerate(self.names)}
        return self.evaluations[[places[name] for name in names]]

    def common(self, other: "Runs") -> list[tuple[str, str, int]]:
        """The problems on which both were run."""
        return [name for name in self.names if name in set(other.names)]

    def shares(self, budgets: Iterable[float]) -> np.ndarray:
        return profile(self.evaluations, self.dimensions, list(budgets))


def runs(
    rows: Iterable[dict[str, Any]], kinds: Iterable[str] = KINDS
) -> dict[str, Runs]:
    """The runs of each method on the problems of some kinds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] in kinds:
            found.setdefault(row["method"], []).append(row)
    return {
        method: Runs(
            array([row["evaluations"] for row in of_method]),
            np.array([row["dimension"] for row in of_method]),
            [(row["kind"], row["problem"], row["dimension"]) for row in of_method],
        )
        for method, of_method in found.items()
    }


def tables(content: dict[str, Any]) -> list[Table]:
    """All deterministic problems, then each kind; or what another record has."""
    if content["rows"] and "estimator" in content["rows"][0]:
        return [_equal(content), _tuned(content)]
    if content["rows"] and "harm" in content["rows"][0]:
        return [_diverged(content, dtype) for dtype in ("float32", "float64")]
    deterministic = [kind for kind in KINDS if kind != "Noisy"]
    made = [_table(content, "All without noise", deterministic)]
    return made + [_table(content, kind, [kind]) for kind in KINDS]


def _table(content: dict[str, Any], caption: str, kinds: list[str]) -> Table:
    every, rows = runs(content["rows"], kinds), []
    for method, found in every.items():
        shares = [f"{share:.0%}" for share in found.shares(BUDGETS)]
        ratio = same = ""
        if REFERENCE in every:
            both = found.common(every[REFERENCE])
            others = every[REFERENCE].at(both)
            ratio = _ratio(median_ratio(found.at(both), others))
        if UNTUNED in every:
            both = found.common(every[UNTUNED])
            dimensions = [d for _, _, d in both]
            share = profile(every[UNTUNED].at(both), dimensions, BUDGETS[-1:])[0]
            same = f"{share:.0%}"
        rows.append((method, str(len(found.names)), *shares, same, ratio))
    headers = ["method", "problems", *(f"≤ {b}" for b in BUDGETS)]
    headers += ["untuned, ≤ 30", "to tuned ZO-AdaMM"]
    return Table(
        f"{caption}: the share of targets (10⁻¹, 10⁻², 10⁻³ of the gap at the start) "
        "reached within so many times d + 1 evaluations; what `radazo_jax` untuned "
        f"reaches within 30 on the same problems; and the median ratio to {REFERENCE}",
        headers,
        rows,
    )


def _diverged(content: dict[str, Any], dtype: str) -> Table:
    """Runs that ended higher than they began, by what was wrong."""
    every = [row for row in content["rows"] if row["dtype"] == dtype]
    rows = []
    for harm in dict.fromkeys(row["harm"] for row in every):
        found = [row for row in every if row["harm"] == harm]
        bad = [f"{r['problem']} ({r['dimension']})" for r in found if r["up"]]
        diverged = sum(row["diverged"] for row in found)
        median = np.median(array([row["last"] for row in found]))
        where = ", ".join(bad[:4]) + (", …" if len(bad) > 4 else "")
        counts = len(found), diverged, len(bad)
        rows.append((harm, *map(str, counts), f"{median:.2g}", where))
    headers = ["what is wrong", "problems", "diverged", "up", "last gap", "where"]
    return Table(
        f"Runs of `radazo_jax` untuned in {dtype}, 10 (d + 1) evaluations. Gaps are "
        "shares of the gap at the start, and the last one is a median. *Up* counts the "
        "runs that end above 1.5, by a step that no other has measured; *diverged* "
        "counts the runs that are still there after another step",
        headers,
        rows,
    )


def _by_estimator(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        found.setdefault(row["estimator"], []).append(row)
    return found


def _equal(content: dict[str, Any]) -> Table:
    rows = []
    for name, every in _by_estimator(content).items():
        gaps = {
            rule: array(
                [r["gap"] for r in every if r["method"] == f"{rule}, η = 0.001"]
            )
            for rule in RULES
        }
        radazo, others = gaps["R-AdaZO"], (gaps["ZO-AdaMM"], gaps["ZO-SGD"])
        below = [f"{np.mean(radazo < other):.0%}" for other in others]
        medians = [f"{np.median(gaps[rule]):.2g}" for rule in RULES]
        rows.append((f"`{name}`", str(len(radazo)), *medians, *below))
    headers = ["estimator", "problems", *RULES]
    headers += ["R-AdaZO < ZO-AdaMM", "R-AdaZO < ZO-SGD"]
    return Table(
        "At η = 0.001: the median over the problems of the lowest gap, as a share of "
        "the gap at the start; and the share of problems on which R-AdaZO's is lower",
        headers,
        rows,
    )


def _tuned(content: dict[str, Any]) -> Table:
    rows = []
    for name, every in _by_estimator(content).items():
        found = runs(every)
        of = {rule: found[f"{rule}, best of 5"] for rule in RULES}
        shares = [f"{one.shares(BUDGETS[-1:])[0]:.0%}" for one in of.values()]
        ratios = [
            _ratio(median_ratio(of["R-AdaZO"].evaluations, of[other].evaluations))
            for other in ("ZO-AdaMM", "ZO-SGD")
        ]
        rows.append((f"`{name}`", *shares, *ratios))
    headers = ["estimator", *RULES, "R-AdaZO : ZO-AdaMM", "R-AdaZO : ZO-SGD"]
    return Table(
        "At the best of five η for each target: the share of targets reached within "
        f"{BUDGETS[-1]} (d + 1) evaluations, and the median ratio of evaluations",
        headers,
        rows,
    )


def _ratio(ratio: float) -> str:
    if np.isnan(ratio):
        return ""
    return f"{ratio:.2f}" if np.isfinite(ratio) else "∞"


def plot(content: dict[str, Any]) -> plt.Figure:
    """Data profiles, all targets together, by kind of problem."""
    kinds = [kind for kind in KINDS if runs(content["rows"], [kind])]
    figure, all_axes = figures.panels(2, 3, (13, 7.4))
    budgets = np.geomspace(0.1, BUDGETS[-1], 120)
    first = all_axes.flat[0]
    shown = [(kind, [kind]) for kind in kinds]
    shown.insert(0, ("All without noise", [k for k in kinds if k != "Noisy"]))
    for axes in all_axes.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (title, wanted) in zip(all_axes.flat, shown, strict=False):
        every = runs(content["rows"], wanted)
        for method, (color, line) in STYLES.items():
            if method in every:
                shares = every[method].shares(budgets)
                axes.plot(budgets, shares, line, color=color, lw=1.8, label=method)
        axes.set(xscale="log", title=title, ylim=(0, 1), ylabel="share of targets")
        axes.set_xlabel("evaluations / (d + 1)")
    figures.legend(figure, first, 5)
    return figure
