"""Tests of the estimators and rules of `docs/methods.md`."""
