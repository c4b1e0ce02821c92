"""Reward functions that fail, which processes import without JAX."""

import os
import time

NUMBER = 1.0  # No function.


def raises(prompts, completions, **columns):
    if "bad" in completions:
        raise RuntimeError("not today")
    return [1.0] * len(completions)


def hangs(prompts, completions, **columns):
    while "bad" in completions:
        time.sleep(0.05)
    return [1.0] * len(completions)


def dies(prompts, completions, **columns):
    if "bad" in completions:
        os._exit(1)
    return [1.0] * len(completions)


def exits(prompts, completions, **columns):
    if "bad" in completions:
        raise SystemExit(3)
    return [1.0] * len(completions)


def no_numbers(prompts, completions, **columns):
    return [None if text == "bad" else float("nan") for text in completions]


def text(prompts, completions, **columns):
    return "1" * len(completions)


def texts(prompts, completions, **columns):
    return ["1"] * len(completions)


def too_few(prompts, completions, **columns):
    return [1.0] * (len(completions) - 1)
