"""Random programs for `perturb`, made of every primitive that JAX lowers on the CPU.

`build` puts statements together and knows their types, the makers (`elementwise`,
`moves`, `look_ups`, `sums`, `matrices`, `calls`, `randomness`) each know a primitive,
`definition` is what they must equal, and `run` compares. `python -m campaigns.fuzz`
runs many.
"""
