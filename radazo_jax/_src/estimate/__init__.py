"""Points and reductions, what evaluates them, and how they join a training step."""
