"""Results and states of runs, and what is recorded of their steps.

The functions that run are in `radazo_jax`.
"""

from radazo_jax._src.runs.asker import MethodState, Stage
from radazo_jax._src.runs.diagnose import Diagnosis
from radazo_jax._src.runs.history import History, scalars
from radazo_jax._src.runs.learning_rate import LearningRate
from radazo_jax._src.runs.results import Best, Report, Result
from radazo_jax._src.runs.smoothing import Smoothing
from radazo_jax._src.runs.told import Told
from radazo_jax._src.steps.solver import Solver
from radazo_jax._src.steps.states import Failures, RunError, SolverState, StepInfo
from radazo_jax._src.workers.fleet import WorkerReport

__all__ = [
    "Best",
    "Diagnosis",
    "Failures",
    "History",
    "LearningRate",
    "MethodState",
    "Report",
    "Result",
    "RunError",
    "Smoothing",
    "Solver",
    "SolverState",
    "Stage",
    "StepInfo",
    "Told",
    "WorkerReport",
    "scalars",
]
