"""Optimizers on many problems, by evaluations."""
