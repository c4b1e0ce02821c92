"""Random numbers by position, distributions of directions, and weighted sums."""
