"""The loop of all runs, with budgets, results, and records."""
