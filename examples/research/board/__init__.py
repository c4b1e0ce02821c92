"""A board: what methods reach with how many evaluations, problem by problem."""

from examples.research.board.report import plot as plot
from examples.research.board.report import tables as tables
