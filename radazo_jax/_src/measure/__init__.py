"""Measurements before a run: smoothing, learning rate, and a diagnosis."""
