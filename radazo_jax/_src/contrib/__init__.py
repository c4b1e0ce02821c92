"""Estimators related to the paper's, a file each, and what only they need."""
