"""Searches: how long a step is, and whether it stands.

An optimizer gives directions of descent, and a search gives the length of the steps
along them. Import from here to choose a search, or to write one.
"""

from radazo_jax._src.base import Descent, Search
from radazo_jax._src.search.backtracking import BacktrackingState, backtracking
from radazo_jax._src.search.parabolic import ParabolicState, parabolic
from radazo_jax._src.search.whole import WholeState, whole

__all__ = [
    "BacktrackingState",
    "Descent",
    "ParabolicState",
    "Search",
    "WholeState",
    "backtracking",
    "parabolic",
    "whole",
]
