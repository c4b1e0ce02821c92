"""Language models, tuned by forward passes only."""

__version__ = "0.1.0"
