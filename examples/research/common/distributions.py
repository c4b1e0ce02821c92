"""The distributions of directions by name."""

import radazo_jax as zo

DISTRIBUTIONS: dict[str, zo.Distribution] = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "coordinate": zo.coordinate(),
    "low_rank": zo.low_rank(),
}
