"""Optax transformations, and the optimizers that are chains of them."""
