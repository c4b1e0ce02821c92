"""From gradients to updates, and whole runs."""
