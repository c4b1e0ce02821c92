"""A step of a run, and its state."""
