"""Compares each distribution with each model.

    python -m campaigns.differential --output records/trust/models.json

A model that is not installed is left out, and its rows can be added later by
``--resume``. The exit status is 1 if a mean is too far from the gradient.
"""

import functools
import itertools
import sys
from pathlib import Path

import jax

from campaigns.distributions import DISTRIBUTIONS
from common import options, record

from .models import MODELS
from .statistic import LARGEST, NUM, along_vectors, distances


def compared(loss, params, distribution):
    """The row of a distribution and a model."""
    found = distances(*along_vectors(loss, params, DISTRIBUTIONS[distribution]))
    return {"statistics": found.size, "largest": round(float(found.max()), 2)}


def of_models(rows):
    """The rows, and one for each model."""
    result = list(rows)
    for name, group in itertools.groupby(rows, key=lambda row: row["model"]):
        group = list(group)
        result.append(
            {
                "model": name,
                "distribution": "all",
                "distributions": len(group),
                "statistics": sum(row["statistics"] for row in group),
                "largest": max(row["largest"] for row in group),
            }
        )
    return result


def installed():
    """Each model that is installed: its name, its loss and its parameters."""
    for model in MODELS:
        try:
            yield model.__name__.replace("_", " "), *model()
        except ImportError as missing:
            print(f"{model.__name__}: {missing}", file=sys.stderr)


@options.command(__doc__)
@options.output
@options.resume
def main(output: Path | None, resume: bool) -> None:
    cases = [
        (
            {"model": name, "distribution": distribution},
            functools.partial(compared, loss, params, distribution),
        )
        for name, loss, params in installed()
        for distribution in DISTRIBUTIONS
    ]
    rows = record.collect(
        output, resume, cases, of_models, estimates=NUM, bound=LARGEST
    )
    sys.exit(any(row["largest"] >= LARGEST for row in rows))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
