"""Runs: their state, their steps, their ends, and their records."""
