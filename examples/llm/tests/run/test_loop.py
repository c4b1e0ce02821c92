"""Runs that end, are cut, resume, diverge or continue."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest

import radazo_jax as zo
from radazo_llm.run import session, usage
from radazo_llm.run.log import Log

from .. import tiny
from ..tables import slow
from ..tiny import DEV, SETTINGS, TRAIN, contents, metrics, run

KEPT = "metrics.jsonl", "adapters/adapter_model.safetensors"


@pytest.fixture(scope="module")
def uncut(job, tmp_path_factory):
    """The folder and the evaluations of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("uncut")
    return folder, run(job, folder)


def assert_same(folder, other):
    for name in KEPT:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def test_the_files_of_a_run(uncut):
    folder, evaluations = uncut
    lines = metrics(folder)
    assert [line["step"] for line in lines if "loss" in line] == list(range(12))
    assert [line for line in lines if "dev_loss" in line] == evaluations
    assert [line["step"] for line in evaluations] == [0, 4, 8, 12]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert (folder / "journal.jsonl").stat().st_size < 1000 + 12 * 200


class _Cut(Exception):
    pass


@pytest.mark.parametrize(
    ("after", "written"), [(0, False), (7, False), (4, True), slow(11, True)]
)
def test_a_run_that_was_cut_ends_as_the_uncut_one(
    uncut, job, monkeypatch, tmp_path, after, written
):
    """It dies after a step is in the journal, before or after its line is written."""
    write = Log.step

    def dying(self, number, values):
        if written or number < after:
            write(self, number, values)
        if number == after:
            raise _Cut

    with monkeypatch.context() as patch, pytest.raises(_Cut):
        patch.setattr(Log, "step", dying)
        run(job, tmp_path)
    assert run(job, tmp_path, resume=True) == uncut[1]
    assert_same(tmp_path, uncut[0])


def test_an_interrupted_run_resumes(uncut, job, monkeypatch, tmp_path):
    write = Log.step

    def interrupted(self, number, values):
        write(self, number, values)
        if number == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Log, "step", interrupted)
        run(job, tmp_path)
    assert not (tmp_path / "adapters").exists()
    run(job, tmp_path, resume=True)
    assert_same(tmp_path, uncut[0])


def test_more_and_fewer_steps(uncut, job, tmp_path):
    shorter = dataclasses.replace(SETTINGS, num_steps=8)
    run(job, tmp_path, shorter)
    part = contents(tmp_path)
    run(job, tmp_path, resume=True)
    assert_same(tmp_path, uncut[0])
    about = json.loads((tmp_path / "settings.json").read_text("utf-8"))
    assert about["ends"] == [8, 12]
    # What was best so far is exported by fewer steps.
    copy = shutil.copytree(uncut[0], tmp_path / "copy")
    run(job, copy, shorter, resume=True)
    assert (copy / KEPT[1]).read_bytes() == part[KEPT[1]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"method": "zo_adamm"}, "--method must be 'radazo', as in .*; got 'zo_adamm'"),
        ({"learning_rate": 0.5}, "--learning-rate must be 0.001, as in .*; got 0.5"),
        ({"seed": 3}, "--seed must be 0, as"),
        ({"batch_size": 5}, "--batch-size must be 4, as"),
        ({"tune": "full"}, "--tune must be 'lora', as"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_another_run_is_not_resumed(uncut, job, change, expected):
    before = contents(uncut[0])
    with pytest.raises(ValueError, match=expected) as error:
        run(job, uncut[0], dataclasses.replace(SETTINGS, **change), resume=True)
    assert "\n" not in str(error.value)
    assert contents(uncut[0]) == before


def test_other_data_are_not_resumed_and_nothing_is_overwritten(uncut, job):
    before = contents(uncut[0])
    with pytest.raises(ValueError, match=r"the data must be [0-9]+, as in"):
        run(job, uncut[0], splits=(DEV, DEV), resume=True)
    with pytest.raises(ValueError, match="has a run of 12 steps: resume it"):
        run(job, uncut[0])
    assert contents(uncut[0]) == before


def test_a_damaged_journal_is_one_line(uncut, job, tmp_path):
    copy = shutil.copytree(uncut[0], tmp_path / "copy")
    path = copy / "journal.jsonl"
    content = path.read_bytes()
    at = content.index(b"values", len(content) // 2) + 12
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(ValueError) as error:
        run(job, copy, resume=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("steps", [1, 12])
def test_a_diverged_run_exports_nothing(job, tmp_path, steps, capsys):
    """After one step an evaluation finds it, otherwise a step does."""
    settings = dataclasses.replace(SETTINGS, learning_rate=1e30, num_steps=steps)
    with pytest.raises(FloatingPointError, match="must be finite; got nan at step"):
        run(job, tmp_path, settings)
    assert not (tmp_path / "adapters").exists()
    assert "tuned" not in capsys.readouterr().out


def test_the_best_evaluation_of_a_diverged_run_is_named(tmp_path):
    with Log(tmp_path) as log:
        for step, loss in ((0, 3.0), (10, 1.0), (20, 2.0)):
            log.evaluation(step, {"dev_loss": loss})
        with pytest.raises(FloatingPointError, match="--resume --steps 10 exports"):
            log.evaluation(30, {"dev_loss": float("inf")})


def test_a_run_that_ends_worse_than_it_began_says_so(job, tmp_path, capsys):
    settings = dataclasses.replace(
        SETTINGS, learning_rate=3.0, objective="language_model", num_steps=8
    )
    rows = run(job, tmp_path, settings, splits=(tiny.ONE, tiny.ONE))
    losses = {row["step"]: row["dev_loss"] for row in rows}
    assert losses[8] > losses[0]
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(
        f"The tuned model is worse than the untuned one: loss on dev {losses[8]:.4f}, "
        f"untuned {losses[0]:.4f}. "
    )
    record = json.loads((tmp_path / "result.json").read_text("utf-8"))
    best = min(losses, key=losses.get)
    assert record["worse"] and record["note"].strip() == last
    assert (record["best_step"], record["best"]) == (best, losses[best])


@pytest.mark.parametrize(
    ("accuracies", "best", "words"),
    [
        ([0.83, 0.9, 0.67], 2, "at step 2, 90.0%: the same command with --resume --st"),
        ([0.83, 0.5, 0.67], 0, "No evaluation was better. Give a smaller --learning-r"),
        ([0.83, 0.9, 0.83], 2, ""),
        ([None, 0.9, 0.67], 2, ""),
    ],
)
def test_the_best_evaluation_of_a_worse_run_is_named(accuracies, best, words):
    rows = [
        {"step": 2 * i, "dev_accuracy": x, "dev_loss": 1.0}
        for i, x in enumerate(accuracies)
        if x is not None
    ]
    found = session.verdict(rows)
    assert found["best_step"] == best and words in found["note"]
    assert found["worse"] == bool(words)


def test_a_measured_rate_is_kept(job, tmp_path, monkeypatch, capsys):
    settings = dataclasses.replace(SETTINGS, learning_rate=0.0)
    found = run(job, tmp_path, settings)
    assert "decayed to 0 over     12 steps" in capsys.readouterr().out
    about = json.loads((tmp_path / "settings.json").read_text("utf-8"))
    assert about["measured"] > 0

    def refused(*args, **options):
        raise AssertionError("It is not measured again.")

    with monkeypatch.context() as patch:
        patch.setattr(zo, "find_learning_rate", refused)
        assert run(job, tmp_path, settings, resume=True) == found

    def flat(*args, **options):
        raise ValueError("fun must rise")

    monkeypatch.setattr(zo, "find_learning_rate", flat)
    with pytest.raises(ValueError, match=r"--learning-rate must be given .* must rise"):
        run(job, tmp_path / "other", settings)


def test_the_loss_falls_from_adapters_too(job, tmp_path):
    settings = dataclasses.replace(
        SETTINGS, learning_rate=1e-2, num_steps=300, eval_every=300
    )
    few = type(TRAIN)(*(np.concatenate([x[:5]] * 4) for x in TRAIN))
    first, last = run(job, tmp_path, settings, (few, DEV))
    assert last["train_loss"] < 0.95 * first["train_loss"]
    short = dataclasses.replace(settings, num_steps=2)
    options = {"splits": (few, DEV), "start": tmp_path / "adapters"}
    begun, _ = run(job, tmp_path / "next", short, **options)
    assert begun["train_loss"] == pytest.approx(last["train_loss"], rel=1e-5)
    whole = dataclasses.replace(short, tune="full")
    with pytest.raises(ValueError, match="--adapters must be given with --tune lora"):
        run(job, tmp_path / "other", whole, **options)


@pytest.mark.slow
def test_a_whole_model_is_tuned_and_exported(job, tmp_path):
    settings = dataclasses.replace(SETTINGS, tune="full")
    _, *_, last = run(job, tmp_path, settings)
    resumed = run(job, tmp_path, settings, resume=True)
    assert resumed[-1] == last
    folder = tmp_path / "merged"
    short = dataclasses.replace(settings, num_steps=2)
    again = {"path": folder, "model": str(folder)}
    first, _ = run(job, tmp_path / "next", short, **again)
    assert first["dev_loss"] == pytest.approx(last["dev_loss"], rel=1e-5)


def test_rates_of_a_run_that_goes_on():
    """Each part has its own schedule, so that earlier steps stay as they were."""
    settings = dataclasses.replace(
        SETTINGS, schedule="cosine", warmup_steps=2, learning_rate=0.5, num_steps=10
    )
    whole = settings.rates(None, [10])
    expected = [0.25, 0.5]
    expected += [0.25 * (1 + np.cos(np.pi * i / 8)) for i in range(8)]
    np.testing.assert_allclose(whole, expected, rtol=1e-6)
    longer = settings.rates(None, [10, 14])
    np.testing.assert_array_equal(longer[:10], whole)
    expected = [0.25 * (1 + np.cos(np.pi * i / 4)) for i in range(4)]
    np.testing.assert_allclose(longer[10:], expected, rtol=1e-6)
    constant = dataclasses.replace(settings, schedule="constant", warmup_steps=0)
    np.testing.assert_array_equal(constant.rates(None, [3]), np.float32(0.5))
    assert constant.rates(0.1, [3])[-1] < 0.1, "A measured rate falls."


def test_what_a_run_takes_is_told(tmp_path):
    for seconds, shown in (
        (50, "about 50 seconds"),
        (600, "about 10 minutes"),
        (9000, "about 2.5 hours"),
    ):
        text = usage.told(seconds / 10, 10, tmp_path)
        assert f"s: {shown} for 10 more steps, without evaluations. Memory: " in text
    assert usage.peak() > 50 * usage.MIB


def test_a_function_gets_the_numbers_of_a_run(job, tmp_path):
    file, to = tmp_path / "mine.py", tmp_path / "out"
    lines = "def report(*given):", f"    with open({str(to)!r}, 'a') as file:"
    lines += "        print(*given, file=file)", "def broken(step, values): 1 / 0\n"
    file.write_text("\n".join(lines), "utf-8")
    short = dataclasses.replace(SETTINGS, num_steps=1)
    run(job, tmp_path / "run", short, report=f"{file}:report")
    found = to.read_text("utf-8").splitlines()
    expected = [f"{row.pop('step')} {row}" for row in metrics(tmp_path / "run")]
    assert found == expected
    for name, message in (("none", "--report must be"), ("broken", "ZeroDivisionErr")):
        with pytest.raises(ValueError, match=message):
            run(job, tmp_path / name, short, report=f"{file}:{name}")


@pytest.mark.slow
def test_runs_on_workers_take_the_same_steps(uncut, job, tmp_path):
    pytest.importorskip("distributed")
    options = ("--labels", "great=1,terrible=0", "--template", "{text} It was")
    options += ("--batch-size", 4, "--learning-rate", 1e-3, "--lora-rank", 2)
    options += ("--eval-every", 3, "--eval-batch-size", 5, "--directions", 2)
    for name, steps, more in (("here", 6, ()), ("there", 4, ("--workers", 1))):
        output = tmp_path / name
        arguments = ("tune", "--model", job, "--data", job, "--output", output)
        tiny.command(*arguments, *options, *more, "--steps", steps)
    tiny.command(*arguments, *options, *more, "--steps", 6, "--resume")
    here, there = (metrics(tmp_path / name) for name in ("here", "there"))
    losses = [[r["loss"] for r in rows if "loss" in r] for rows in (here, there)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert there[-1]["dev_loss"] == pytest.approx(here[-1]["dev_loss"], rel=1e-4)
