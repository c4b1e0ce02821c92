"""A function at θ + s·u, evaluated without building θ + s·u."""
