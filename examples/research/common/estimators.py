"""The estimators that the paper builds on, by their names."""

import jax

import radazo_jax as zo

# About as many evaluations a step for each; the rest are defaults.
ESTIMATORS = {
    "forward_difference": zo.forward_difference(),
    "spsa": zo.spsa(5, 5e-4),
    "coordinate_wise": zo.contrib.coordinate_wise(5),
    "residual_feedback": zo.contrib.residual_feedback(num_directions=10),
    "variance_reduced": zo.contrib.variance_reduced(num_directions=5),
    "prior_guided": zo.contrib.prior_guided(num_directions=9),
    "query_reuse": zo.contrib.query_reuse(),
    "linear_interpolation": zo.contrib.linear_interpolation(),
    "gaussian_process": zo.contrib.gaussian_process(num_directions=10, memory_size=100),
    "majority_vote": zo.contrib.majority_vote(),
    "momentum_perturbation": zo.contrib.momentum_perturbation(),
}


def evaluations(estimator: zo.GradientEstimator, params: jax.Array) -> int:
    """The number of evaluations per step of an estimator."""

    def points(key: jax.Array) -> zo.estimators.Points:
        draw = zo.estimators.Draw.once(key)
        return estimator.points(draw, params, estimator.init(params))[0]

    return jax.eval_shape(points, jax.random.key(0)).num_points
