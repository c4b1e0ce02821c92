"""Random numbers by position, the keys they come from, and exact sums."""
