"""Shared by experiments, benchmarks and campaigns."""

from pathlib import Path

RESEARCH = Path(__file__).resolve().parents[1]
ROOT = RESEARCH.parents[1]  # The repository.
RECORDS = RESEARCH / "records"
OUTPUT = RESEARCH / "out"  # Of runs without an output of their own.
