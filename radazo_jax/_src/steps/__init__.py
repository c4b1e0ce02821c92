"""One step of a run, and the parts of a run."""
