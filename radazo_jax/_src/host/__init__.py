"""Runs of methods on the host: minimize, and ask and tell."""
