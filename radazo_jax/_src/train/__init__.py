"""Runs of an estimator and an optimizer, in one program or on values."""
