"""Results and states of runs, and what is recorded of their steps.

The functions that run are in `radazo_jax`.
"""

from radazo_jax._src.host.ask_tell import AskTell
from radazo_jax._src.host.table import Evaluations
from radazo_jax._src.measure.diagnose import Diagnosis
from radazo_jax._src.measure.learning_rate import LearningRate
from radazo_jax._src.measure.smoothing import Smoothing
from radazo_jax._src.runs.history import History, scalars
from radazo_jax._src.runs.results import Best, Report, Result, Stage
from radazo_jax._src.steps.solver import Solver
from radazo_jax._src.steps.states import Failures, RunError, SolverState, StepInfo
from radazo_jax._src.train.stepper import AskTellOptimizer
from radazo_jax._src.workers.fleet import WorkerReport

__all__ = [
    "AskTell",
    "AskTellOptimizer",
    "Best",
    "Diagnosis",
    "Evaluations",
    "Failures",
    "History",
    "LearningRate",
    "Report",
    "Result",
    "RunError",
    "Smoothing",
    "Solver",
    "SolverState",
    "Stage",
    "StepInfo",
    "WorkerReport",
    "scalars",
]
