"""A board: what methods reach with how many evaluations, problem by problem."""

from board.report import plot as plot
from board.report import tables as tables
