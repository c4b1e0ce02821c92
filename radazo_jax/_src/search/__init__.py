"""Step sizes that are found from function values."""
