"""Teaches a MuJoCo robot to run, from nothing but the returns of its episodes.

    python examples/black_boxes/mujoco_policy.py

The policy of Gymnasium's HalfCheetah is one matrix, from what it observes to its six
motors. Episodes are simulated in processes; nothing is differentiated.
"""

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

if sys.platform == "linux":
    os.environ.setdefault("MUJOCO_GL", "egl")  # Pictures without a screen.

import gymnasium
import matplotlib.pyplot as plt
import mujoco
import numpy as np

import radazo_jax as zo
from examples.black_boxes import compare
from examples.black_boxes.results import Table, finish, numbers, save

# MuJoCo would write to a file in the current folder that the robot's model is old.
mujoco.set_mju_user_warning(lambda message: None)

TASK, STEPS = "HalfCheetah-v5", 200  # An episode has 200 steps of 0.05 s.
START = np.zeros((6, 17), np.float32)
ESTIMATOR = zo.central_difference(zo.rademacher(), num_directions=8, smoothing=0.05)


@functools.cache
def environment(**options: Any) -> gymnasium.Env:
    """Returns the environment of this process."""
    return gymnasium.make(TASK, max_episode_steps=STEPS, **options)


def episode(weights: np.ndarray, seed: int, pictures: Sequence[int] = ()) -> Any:
    """The sum of rewards, and pictures at some of the steps."""
    robot = environment(**({"render_mode": "rgb_array"} if pictures else {}))
    observation, _ = robot.reset(seed=seed)
    total, taken = 0.0, []
    for step in range(STEPS):
        action = np.tanh(weights @ observation)
        observation, reward, ended, _, _ = robot.step(action)
        total += reward
        if step in pictures:
            taken.append(robot.render())
        if ended:
            break
    return total, taken


def loss(weights: np.ndarray) -> float:
    """Minus the mean return of two episodes, which always start alike."""
    return -np.mean([episode(weights, seed)[0] for seed in range(2)])


def measure(weights: np.ndarray) -> dict[str, float]:
    """The mean return of the episodes it was trained on, and of 20 others."""
    others = [episode(weights, seed)[0] for seed in range(2, 22)]
    return {"trained": -loss(weights), "test": np.mean(others)}


def tables(content: dict[str, Any]) -> list[Table]:
    names = {"trained": "training_return", "test": "test_return"}
    return [compare.table(content, f"A linear policy for {TASK}", names)]


def rollout(weights: np.ndarray) -> plt.Figure:
    """Six pictures of an episode that it was not trained on."""
    _, pictures = episode(weights, 2, range(STEPS // 2, STEPS // 2 + 12, 2))
    figure, axes = plt.subplots(1, 6, figsize=(12, 2.1), layout="constrained")
    for i, (one, picture) in enumerate(zip(axes, pictures, strict=True)):
        one.imshow(picture)
        one.set_axis_off()
        one.set_title(f"{(STEPS // 2 + 2 * i) * 0.05:.1f} s", fontsize=9)
    return figure


@compare.options(evaluations=640, seeds=3)
def main(args: Any) -> None:
    problem = compare.Problem(
        loss, START, ESTIMATOR, rates=(0.03, 0.06), sigmas=(0.1, 0.3)
    )
    with compare.processes() as pool:
        content, best = compare.compare(problem, measure, args, pool)
    weights = {name: numbers(found) for name, found in best.items()}
    content["weights"] = content.get("weights", {}) | weights
    finish(args.output / "mujoco_policy", content, tables)
    if "R-AdaZO" in best:
        save(rollout(best["R-AdaZO"]), args.output / "mujoco_rollout.png")


if __name__ == "__main__":
    main()
