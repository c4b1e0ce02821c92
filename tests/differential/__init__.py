"""Models of other libraries: means of estimates against `jax.grad`.

`python -m tests.differential` compares each distribution with each model.
"""
