"""Reward functions, and the processes that run them."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from radazo_llm.reward import functions
from radazo_llm.reward.functions import Wrong
from radazo_llm.reward.pool import RewardPool

from .failing import no_numbers, text, texts, too_few

HERE = "tests.reward.failing"
TEXTS = ["fine", "bad", "fine", "fine"]


@pytest.mark.slow
def test_functions_that_fail_in_their_processes():
    """A raise takes one completion, a hang or a death the completions of its call."""
    for name, scored in (
        ("raises", [1, np.nan, 1, 1]),
        ("exits", [1, np.nan, 1, 1]),
        ("hangs", [np.nan, np.nan, 1, 1]),
        ("dies", [np.nan, np.nan, 1, 1]),
    ):
        with RewardPool({f"{HERE}:{name}": 1.0}, 2, timeout=8.0) as pool:
            found = pool.score(TEXTS, TEXTS, {}, 2)
            np.testing.assert_array_equal(found.total, scored, err_msg=name)
            assert len(found.failures) == 1 and name in found.failures[0]
            # The pool works on.
            again = pool.score(TEXTS[2:], TEXTS[2:], {}, 2)
            np.testing.assert_array_equal(again.total, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "timeout", "problem"),
    [
        ("hangs", 1.0, "gave no result within 1.0 s in 3 calls of 3: it hangs, or"),
        ("dies", 60.0, "dies gave no result, and its process ended in 3 calls of 3"),
    ],
)
def test_a_function_that_never_answers(name, timeout, problem):
    with (
        RewardPool({f"{HERE}:{name}": 1.0}, 1, timeout=timeout) as pool,
        pytest.raises(ValueError, match=problem),
    ):
        pool.score(["bad"] * 3, ["bad"] * 3, {}, 1)


KILLED = """
import os, signal
from radazo_llm.reward.pool import RewardPool

if __name__ == "__main__":
    RewardPool({"answer": 1.0}, 1).score([""], ["7"], {"answer": ["7"]}, 1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_processes_end_with_a_run_that_is_killed(tmp_path):
    """They have its output, which ends with the last of them."""
    (tmp_path / "run.py").write_text(KILLED, "utf-8")
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, tmp_path / "run.py"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_weighted_sums_and_columns():
    with RewardPool({"answer": 2.0, "format": 0.5}, 1) as pool:
        completions = ["<answer>7</answer>", "7", "8", "<answer>8</answer>"]
        found = pool.score([""] * 4, completions, {"answer": ["7"] * 4}, 3)
        np.testing.assert_array_equal(found.total, [2.5, 2, 0, 0.5])
        np.testing.assert_array_equal(found.each["format"], [1, 0, 0, 1])
        with pytest.raises(ValueError, match="too_few must return a list of 4"):
            pool.weights = {f"{HERE}:too_few": 1.0}
            pool.score([""] * 4, completions, {}, 4)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            text,
            "must return a list of 4 numbers, one for each completion; got 4 values",
        ),
        (texts, "must return numbers; got '1'"),
        (too_few, "must return a list of 4 numbers, one for each completion; got 3"),
        (lambda *args: 1.0, "got no list: 1.0"),
    ],
)
def test_functions_that_return_something_else(function, message):
    found = functions.checked("f", function(TEXTS, TEXTS), 4)
    assert isinstance(found, Wrong) and message in found.problem


def test_no_number_is_no_reward():
    assert np.isnan(functions.checked("f", no_numbers(TEXTS, TEXTS), 4)).all()
    assert functions.checked("f", np.arange(4, dtype=np.float32), 4) == [0, 1, 2, 3]


def test_functions():
    given = [""] * 4
    texts = ["<answer> 4 </answer>", "4.0", "x <answer>5</answer>", "<answer></answer>"]
    assert functions.answer(given, texts, answer=[4] * 4) == [1, 1, 0, 0]
    assert functions.formatted(given, texts) == [1, 0, 1, 0]
    assert functions.brevity(given[:2], ["", "x" * 100]) == [1, 0.5]


@pytest.mark.parametrize(
    "name", ["none", "llm.none:f", f"{HERE}:none", f"{HERE}:NUMBER", ":"]
)
def test_functions_that_are_not_there(name):
    with pytest.raises(ValueError, match=r"reward .*must be"):
        RewardPool({name: 1.0})


def test_functions_come_from_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    path, wrong = tmp_path / "metrics.py", tmp_path / "wrong.py"
    path.write_text("def exact(prompts, completions): return [2.0]\n", "utf-8")
    wrong.write_text("1 / 0\n", "utf-8")
    assert functions.load(f"{path}:exact")([""], [""]) == [2.0]
    monkeypatch.chdir(tmp_path)
    assert functions.load("metrics.py:exact") is functions.load(f"{path}:exact")
    for name, cause in (
        ("metrics.py:none", "AttributeError: "),
        ("nowhere.py:f", "FileNotFoundError: "),
        ("wrong.py:f", "ZeroDivisionError: division by zero"),
    ):
        with pytest.raises(ValueError, match=f"got '{name}' .{cause}"):
            functions.load(name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("5", "5"),
        ("<answer> 5 </answer>", "5"),
        ("<answer>4</answer><answer>5</answer> so", "5"),
        ("<answer>4<answer>5</answer>", "5"),
        ("<answer>5</answer> or <answer>", "5"),
        ("a</answer><answer>5</answer> or </answer>", "5"),
        ("<answer>5", "<answer>5"),
        ("</answer>5<answer>", "</answer>5<answer>"),
    ],
)
def test_the_last_pair_of_tags_has_the_answer(text, found):
    assert functions.answered(text) == found


@pytest.mark.parametrize(
    "text",
    ["<answer>" * 16_000, "<answer></answer>" * 8_000, "1" * 128_000],
    ids=["tags that stay open", "pairs", "a number"],
)
def test_a_long_reply_takes_no_time(text):
    """128 kB of tags took a pattern 8.8 s."""
    begin = time.process_time()
    functions.answer([""], [text], answer=["1"])
    functions.formatted([""], [text])
    assert time.process_time() - begin < 0.5
