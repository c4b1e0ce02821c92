"""Knowledge about residuals: losses, a learned linear model, and the fit."""

from typing import NamedTuple

import numpy as np

from radazo_jax._src.base import checks, shown

# Variance of an unknown Jacobian.
_UNKNOWN = 1e6

# A singular value of the Jacobian counts if it exceeds this share of the largest one.
# Less is an error of the estimate.
_RANK = 1e-6


def _soft_l1(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    root = np.sqrt(1 + z)
    return 2 * (root - 1), 1 / root, -0.5 / root**3


def _huber(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    root, inner = np.sqrt(np.maximum(z, 1)), z <= 1
    return (
        np.where(inner, z, 2 * root - 1),
        1 / root,
        np.where(inner, 0, -0.5) / root**3,
    )


# The losses ρ(z) of squared residuals z, with ρ′ and ρ″, as SciPy defines them.
LOSSES = {
    "linear": lambda z: (z, np.ones_like(z), np.zeros_like(z)),
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": lambda z: (np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2),
    "arctan": lambda z: (np.arctan(z), 1 / (1 + z**2), -2 * z / (1 + z**2) ** 2),
}


class Loss(NamedTuple):
    """A loss of residuals, C² Σ ρ(r²/C²).

    Attributes:
      name: Name of ρ in `LOSSES`.
      scale: C.
    """

    name: str
    scale: float

    def value(self, residuals: np.ndarray) -> np.ndarray:
        """Returns the losses of residuals, shape [n, m] → [n]; NaN if one is NaN."""
        with np.errstate(all="ignore"):
            rho = LOSSES[self.name]((residuals / self.scale) ** 2)[0]
            return self.scale**2 * np.sum(rho, axis=1)

    def weighted(self, residuals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns √w and r̃, so that √w J and r̃ have the loss's Gauss–Newton step.

        References:
          Triggs, McLauchlan, Hartley & Fitzgibbon, Bundle Adjustment, 1999, 4.3.
        """
        z = (residuals / self.scale) ** 2
        _, first, second = LOSSES[self.name](z)
        root = np.sqrt(np.maximum(first + 2 * second * z, np.finfo(float).eps))
        return root, residuals * first / root


class Model(NamedTuple):
    """A linear model of residuals about a point, r + J s, with the errors of r and J.

    All rows have the same covariance, in units of the second derivatives, which are
    independent random numbers of variance 1. So ½ sᵀH s has the variance |s|⁴/4, and
    the Jacobian changes by H s in a step. The model is a Kalman filter of both.

    Attributes:
      mean: r and J, shape [m, 1 + d].
      covariance: Covariance of a row, shape [1 + d, 1 + d].
    """

    mean: np.ndarray
    covariance: np.ndarray

    @property
    def residuals(self) -> np.ndarray:
        """r, shape [m]."""
        return self.mean[:, 0]

    @property
    def jacobian(self) -> np.ndarray:
        """J, shape [m, d]."""
        return self.mean[:, 1:]

    @classmethod
    def begun(cls, residuals: np.ndarray, d: int) -> "Model":
        """Returns the model of known residuals and an unknown Jacobian."""
        mean = np.column_stack([residuals, np.zeros((len(residuals), d))])
        return cls(mean, np.diag(np.r_[0, np.full(d, _UNKNOWN)]))

    def missed(self, step: np.ndarray, residuals: np.ndarray) -> tuple[float, float]:
        """Returns the expected and the observed mean square error at a step."""
        z = np.append(1, step)
        error = residuals - self.mean @ z
        spread = max(float(z @ self.covariance @ z), 0) + float(step @ step) ** 2 / 4
        return spread, float(error @ error) / len(error)

    def learned(self, step: np.ndarray, residuals: np.ndarray, noise: float) -> "Model":
        """Returns the model after residuals at a step, whose variance is `noise`."""
        z, spread = np.append(1, step), self.missed(step, residuals)[0]
        along = self.covariance @ z
        gain = along / (spread + noise + 1e-300)
        covariance = self.covariance - np.outer(gain, along)
        mean = self.mean + np.outer(residuals - self.mean @ z, gain)
        return Model(mean, (covariance + covariance.T) / 2)

    def moved(self, step: np.ndarray) -> "Model":
        """Returns the model about the end of a step."""
        square, shift = step @ step, np.eye(len(step) + 1)
        shift[1:, 0] = step
        change = np.diag(np.r_[square**2 / 4, np.full(len(step), square)])
        change[0, 1:] = change[1:, 0] = square / 2 * step
        return Model(self.mean @ shift, shift.T @ self.covariance @ shift + change)


class Fit(NamedTuple):
    """The fit at the best point.

    Attributes:
      residuals: Residuals at the best point, shape [m].
      jacobian: Estimate of their Jacobian matrix, shape [m, d]; 0 for parameters that
        cannot move.
      weights: Square roots of the weights of the residuals in the Gauss–Newton matrix,
        shape [m]; 1 without a robust loss.
      value: f, the sum of squares, or of the losses.
      free: Whether each parameter can move: bool, shape [d].
    """

    residuals: np.ndarray
    jacobian: np.ndarray
    weights: np.ndarray
    value: float
    free: np.ndarray

    def __repr__(self) -> str:
        return shown.on_a_line(
            self,
            value=shown.number(self.value),
            degrees_of_freedom=str(self.degrees_of_freedom),
            rank=str(self.rank),
            jacobian=shown.tree(self.jacobian),
        )

    @property
    def degrees_of_freedom(self) -> int:
        """Number of residuals minus the number of parameters that can move."""
        return len(self.residuals) - int(np.sum(self.free))

    def _inverse(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns R with (JᵀJ)⁻¹ = R Rᵀ, and the directions without an effect."""
        matrix = self.weights[:, None] * self.jacobian[:, self.free]
        sizes = np.linalg.norm(matrix, axis=0)
        sizes = np.where(sizes > 0, sizes, 1)
        _, w, rows = np.linalg.svd(matrix / sizes)
        known = np.flatnonzero(w > _RANK * max(w, default=0))
        inverse = rows[known].T / w[known] / sizes[:, None]
        return inverse, np.delete(rows, known, axis=0)

    @property
    def rank(self) -> int:
        """Rank of the Jacobian matrix of the parameters that can move."""
        return self._inverse()[0].shape[1]

    @property
    def covariance(self) -> np.ndarray:
        """Covariance of the parameters, f / (m − d) · (JᵀJ)⁻¹, shape [d, d].

        It is infinite for parameters that the residuals do not determine, with a
        warning, NaN without a degree of freedom, and 0 for parameters that cannot move.
        """
        inverse, flat = self._inverse()
        left, which = self.degrees_of_freedom, np.flatnonzero(self.free)
        block = inverse @ inverse.T * (self.value / left if left > 0 else np.nan)
        loose = np.any(abs(flat) > np.sqrt(_RANK), axis=0)
        block[loose] = block[:, loose] = np.inf
        covariance = np.zeros((len(self.free), len(self.free)))
        covariance[np.ix_(which, which)] = block
        if np.any(loose):
            checks.warn(
                f"The Jacobian of {len(which)} parameters has rank {len(inverse.T)}. "
                f"The residuals do not determine parameters {which[loose].tolist()}, "
                "whose standard errors are infinite. Fix some of them, or add data."
            )
        return covariance

    @property
    def standard_errors(self) -> np.ndarray:
        """Standard errors of the parameters, shape [d]."""
        return np.sqrt(np.diag(self.covariance))
