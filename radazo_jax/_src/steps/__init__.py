"""One step of a run, and what a run is made of."""
