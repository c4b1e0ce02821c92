"""Minimizers of functions whose values are all there is, as generators."""
