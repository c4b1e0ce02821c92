"""Foundations: checks of arguments, trees, compiled programs, and names."""
