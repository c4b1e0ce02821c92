"""Random programs for `perturb`, made of every primitive that JAX lowers on the CPU.

`build` puts statements together and knows their types, the makers (`elementwise`,
`moves`, `look_ups`, `sums`, `matrices`, `calls`, `randomness`) each know a primitive,
`evaluate` runs a program operation by operation, and `properties` says what must hold.
`python -m campaigns.fuzz` runs many.
"""
