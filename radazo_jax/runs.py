"""Results and states of runs, and what is recorded of their steps.

The functions that run are in `radazo_jax`.
"""

from radazo_jax._src.runs.ask_tell import AskTell, AskTellState
from radazo_jax._src.runs.black_box import Best, BlackBoxResult
from radazo_jax._src.runs.diagnose import Diagnosis
from radazo_jax._src.runs.history import History, scalars
from radazo_jax._src.runs.minimize import MinimizeResult
from radazo_jax._src.runs.solver import Solver
from radazo_jax._src.runs.states import (
    Failures,
    Outcome,
    RunError,
    SolverState,
    StepInfo,
)
from radazo_jax._src.workers.distribute import DistributedResult
from radazo_jax._src.workers.roster import WorkerReport

__all__ = [
    "AskTell",
    "AskTellState",
    "Best",
    "BlackBoxResult",
    "Diagnosis",
    "DistributedResult",
    "Failures",
    "History",
    "MinimizeResult",
    "Outcome",
    "RunError",
    "Solver",
    "SolverState",
    "StepInfo",
    "WorkerReport",
    "scalars",
]
