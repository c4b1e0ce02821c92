"""The laws of directions by name."""

import radazo_jax as zo

LAWS: dict[str, zo.Law] = {
    "sphere": zo.sphere(),
    "gaussian": zo.gaussian(),
    "rademacher": zo.rademacher(),
    "coordinate": zo.coordinate(),
    "low_rank": zo.low_rank(),
}
