"""Gradient estimators, and gradients that they estimate."""
