"""Distributions of random directions, their storage, and weighted sums."""
