"""Runs on rewards: resumed, and what is wrong in one line."""

import json
import shutil
import sys
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from radazo_llm.examples import forms
from radazo_llm.formats import load as loading
from radazo_llm.formats import save as saving
from radazo_llm.formats import tokenizers
from radazo_llm.models.decode import Replies
from radazo_llm.reward import command, pool, problems
from radazo_llm.reward.task import Task
from radazo_llm.settings import Settings
from radazo_llm.tune.job import parts_of
from research import warm_up

from .. import tiny

ARGUMENTS = ["--steps", "4", "--eval-every", "2", "--eval-examples", "8"]
ARGUMENTS += ["--train-examples", "32", "--lora-rank", "2", "--population-size", "4"]
REWARDS = ["--reward", "answer=1", "--reward", "length=0.5"]


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A model that cannot add, with the tokenizer of one that can, and sums."""
    folder = tmp_path_factory.mktemp("small")
    warm_up.tokenizer().save(str(folder / "tokenizer.json"))
    warm_up.write_sums(folder)
    saving.save(tiny.model(), folder)
    return folder


def lines(folder):
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_that_was_cut_ends_as_if_it_had_not_been(small, tmp_path, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ["reward", "--model", small, "--data", small, *ARGUMENTS, *REWARDS]
    arguments += ["--resume", "--output"]
    tiny.command(*arguments, whole)
    shutil.copytree(whole, cut)
    journal = (whole / "journal.jsonl").read_bytes().splitlines(keepends=True)
    assert len(journal) == 5
    (cut / "journal.jsonl").write_bytes(b"".join(journal[:4]) + journal[4][:20])
    shutil.rmtree(cut / "adapters")
    with pytest.warns(UserWarning, match="its last line was not complete"):
        tiny.command(*arguments, cut)
    for name in ("adapters/adapter_model.safetensors", "metrics.jsonl"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert (
        json.loads((whole / "result.json").read_text("utf-8"))["figure"] == "dev_reward"
    )
    steps = [row for row in lines(whole) if "reward" in row]
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    assert [r["step"] for r in lines(whole) if "dev_reward" in r] == [0, 2, 4]
    for row in steps:
        total = row["answer"] + 0.5 * row["length"]
        assert row["reward"] == pytest.approx(total, rel=1e-6)
        assert 0 <= row["ended"] <= 1 and row["spread"] >= 0
    assert "-> " in (whole / "samples.txt").read_text()
    # The journal has the negative rewards: 4 members, 16 prompts.
    values = np.array(json.loads(journal[1])["values"])
    assert values.shape == (4, 16)
    assert -values.mean() == pytest.approx(steps[0]["reward"], rel=1e-5)
    capsys.readouterr()
    for other, message in (
        (("--seed", "1"), "--seed must be 0, as in"),
        (("--reward", "format=1"), "--reward must be {'answer': 1.0, 'length': 0.5}"),
    ):
        assert message in tiny.refused(capsys, *arguments, cut, *other, status=2)
    exports = ("--steps", 6, "--export-merged", cut / "merged")
    tiny.command(*arguments, cut, *exports)
    assert [row["step"] for row in lines(cut)][-1] == 6
    assert loading.load(cut / "merged", dtype=jnp.float32).config.hidden_size == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--population-size", "5"], "--population-size must be even; got 5"),
        (["--processes", "0"], "--processes"),
        (["--reward", "answer"], "--reward must be NAME=WEIGHT; got 'answer'"),
        (["--reward", "answer=nan"], "--reward must be NAME=WEIGHT"),
        (["--reward", "none=1"], "reward must be one of answer, format"),
        (["--tokens", "40"], "--tokens must be below the model's 32 positions"),
        (["--tokens", "26"], "prompts must have from 1 to 6 tokens"),
    ],
)
def test_errors_are_one_line(arguments, message, small, tmp_path, capsys):
    options = ("--data", small, "--output", tmp_path, *ARGUMENTS, *arguments)
    assert message in tiny.refused(capsys, "reward", "--model", small, *options)


def test_reward_functions_may_lie_in_the_present_folder(small, tmp_path, monkeypatch):
    """They are found, since the error is about what comes next."""
    text = (
        "def short(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n"
    )
    (tmp_path / "rewards_of_mine.py").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    given = ("--reward", "rewards_of_mine:short=1", "--tokens", 40, "--output", "run")
    with pytest.raises(SystemExit):
        tiny.command("reward", "--model", small, "--data", small, *given)
    assert "rewards_of_mine" in sys.modules
    del sys.modules["rewards_of_mine"]


class Pool(NamedTuple):
    """Scores of processes."""

    total: list[float]
    failures: list[str]

    def score(self, prompts, completions, columns, size):
        return pool.Scores(np.array(self.total), {}, self.failures)


def task_of(small, folder, scores, before=None, **settings):
    """A task whose scores are given, for two problems of each split."""
    settings = Settings.of("reward", **{"num_tokens": 2, "lora_rank": 2} | settings)
    parts = parts_of(settings, loading.load(small, dtype=jnp.float32))
    some = [p._replace(before=before) for p in warm_up.sums(2, 0)]
    made = {name: some for name in ("train", "dev")}
    folder.mkdir(exist_ok=True)
    return Task(settings, parts, small, made, scores, folder)


def replied(*shape):
    empty = np.zeros(shape, np.int32)
    return Replies(np.zeros((*shape, 2), np.int32), empty, empty > 0)


def test_rewards_of_held_out_replies_and_failures(small, tmp_path, capsys):
    task = task_of(small, tmp_path, Pool([np.nan] * 2, ["f: RuntimeError: no"]))
    with pytest.raises(ValueError, match=r"got none for 2 held-out ones \(f: Runtime"):
        task.measure(task.parts.params, 0)
    shown = capsys.readouterr().err
    assert shown.strip() == "f: RuntimeError: no. metrics.jsonl counts such failures."
    task.pool = Pool([1.0, np.nan], ["f: RuntimeError: no"])
    found = task.measure(task.parts.params, 0)
    assert found["dev_reward"] == 1.0
    assert not capsys.readouterr().err  # It was said.
    task.losses(np.array([0, 1]), replied(2))
    assert task.latest["reward"] == 1.0 and task.latest["failures"] == 1
    assert (tmp_path / "samples.txt").read_text("utf-8").count("-> ") == 2


def test_equal_rewards_of_all_members_are_said_once(small, tmp_path, capsys):
    task = task_of(small, tmp_path, None)
    # Members differ for one prompt; each prompt has equal rewards; the same again.
    for total in ([0, 1, 0, 0.5], [0, 1, 0, 1], [0, 1, 0, 1]):
        task.pool = Pool(total, [])
        found = task.losses(np.array([0, 1]), replied(2, 2))
        np.testing.assert_array_equal(found.ravel(), -np.array(total, np.float32))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("All members of a step have the same rewards (mean 0.5), so")


METRICS = """
def exact(prompts, completions, *, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]
"""
SUMS = [{"prompt": f"{i}+1=", "completion": str(i + 1), "id": i} for i in range(9)]


@pytest.fixture
def sums(tmp_path):
    """Prompts of a user, and metrics."""
    text = "".join(json.dumps(row) + "\n" for row in SUMS)
    (tmp_path / "sums.jsonl").write_text(text, "utf-8")
    (tmp_path / "metrics.py").write_text(METRICS, "utf-8")
    return tmp_path


@pytest.mark.slow
def test_prompts_and_a_metric_of_a_user(small, sums, capsys):
    metric = f"{sums / 'metrics.py'}:exact"
    data = ("--data", sums / "sums.jsonl", "--metric", metric)
    output = ("--output", sums / "run")
    drawn = ("--eval-temperature", 1.0, "--dev-share", 0.2)
    tiny.command("reward", "--model", small, *data, *output, *drawn, *ARGUMENTS)
    shown = capsys.readouterr().out
    assert "train 7, dev 2 prompts; those that are held out are answered by d" in shown
    rows = lines(sums / "run")
    assert all(metric in row or f"dev_{metric}" in row for row in rows)
    about = json.loads((sums / "run" / "settings.json").read_text("utf-8"))
    assert about["notes"]["data"] == str(sums / "sums.jsonl")


def test_rows_become_problems():
    turns = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    columns = {"prompts": "p", "level": 3, "answer": "0"}
    item = forms.Item("my.jsonl:1", turns, "", (" a", " b"), 1, columns)
    found = problems.of_item(item)
    assert found == ("u", {"level": 3, "answer": "b"}, turns[:1], None)
    item = item._replace(turns=(), prompt="q", candidates=())
    assert problems.of_item(item) == ("q", {"level": 3, "answer": "0"}, None, None)
    both = problems.columns([found, problems.Problem("q", {"level": 4})])
    assert both == {"level": [3, 4], "answer": ["b", None]}
    with pytest.raises(ValueError, match="must have a turn of the user before"):
        problems.of_item(item._replace(turns=turns[:1]))


def test_an_instruction_stands_in_front_of_each_question(small, tmp_path):
    task = task_of(small, tmp_path, None, instruction="1+1=")
    plain = warm_up.sums(2, 0)
    for name in ("train", "dev"):
        found = task.problems[name]
        assert [p.question for p in found] == ["1+1=" + p.question for p in plain]
        assert [p.columns for p in found] == [p.columns for p in plain]
        lengths = [len("1+1=" + p.question) + 1 for p in plain]
        np.testing.assert_array_equal(task.prompts[name].lengths, lengths)


def test_a_chat_template_is_for_turns_alone(small, tmp_path):
    """Plain prompts stay as they are, as `tune` reads them without --chat."""
    chatting = shutil.copytree(small, tmp_path / "chatting")
    (chatting / "chat_template.jinja").write_text("{{ messages[-1].content }}==")
    expected = [len(p.question) for p in warm_up.sums(2, 0)]
    for before, more in ((None, 1), ((), 2)):  # `</s>` at the begin, or the template.
        task = task_of(chatting, tmp_path, None, before)
        found = task.prompts["dev"].lengths
        np.testing.assert_array_equal(found, np.add(expected, more))


def test_held_out_sums_are_no_others():
    train = {p.question for p in warm_up.sums(5000, 0)}
    held_out = {p.question for p in warm_up.sums(500, 0, held_out=True)}
    assert train.isdisjoint(held_out) and len(held_out) > 300
    for problem in warm_up.sums(50, 1):
        a, b = problem.question.removesuffix("=").split("+")
        assert problem.columns["answer"] == str(int(a) + int(b))


def test_prompts_are_padded_and_not_cut(small):
    tokenizer = tokenizers.load(small)
    texts = ["1+2=", "10+20="]
    kinds = {"special": True, "vocab_size": 16}
    found = problems.encode(tokenizer, texts, most=7, **kinds)
    np.testing.assert_array_equal(found.lengths, [5, 7])
    assert found.tokens.shape == (2, 7) and not found.tokens[0, 5:].any()
    with pytest.raises(ValueError, match=r"from 1 to 6 tokens.*got 7: '10"):
        problems.encode(tokenizer, texts, most=6, **kinds)
    with pytest.raises(ValueError, match="below the model's vocab_size, 8"):
        problems.encode(tokenizer, texts, most=7, special=True, vocab_size=8)


@pytest.mark.slow
def test_a_measured_rate(small, tmp_path, capsys):
    arguments = ["reward", "--model", small, "--data", small, *ARGUMENTS]
    arguments += ["--learning-rate", 0, "--reward", "length=1"]
    tiny.command(*arguments, "--output", tmp_path)
    assert "decayed to 0 over     4 steps" in capsys.readouterr().out
    about = json.loads((tmp_path / "settings.json").read_text("utf-8"))
    assert about["measured"] > 0


def test_the_settings_have_options():
    assert command.weights_of(["a.b:c=0.5", "format=-1"]) == {
        "a.b:c": 0.5,
        "format": -1.0,
    }
