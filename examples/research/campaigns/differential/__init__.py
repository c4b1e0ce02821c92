"""Models of other libraries: means of estimates against `jax.grad`.

`python -m campaigns.differential` compares each distribution with each model.
"""
