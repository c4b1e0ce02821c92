"""Interrupted runs that resume from their checkpoints."""

import dataclasses
import os
import pathlib
import shutil
import signal

import jax
import numpy as np
import pytest

from radazo_llm.tune import report
from radazo_llm.tune import run as runs
from radazo_llm.tune.data import Batch
from radazo_llm.tune.run import run
from radazo_llm.tune.train import State

from ..tiny import DEV, SETTINGS, TRAIN, contents, metrics, model


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory):
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("uncut")
    return folder, run(SETTINGS, model(), TRAIN, DEV, folder=folder)


def test_metrics_have_each_step_once_and_in_order(uncut):
    folder, _ = uncut
    lines = metrics(folder)
    assert [line["step"] for line in lines if "loss" in line] == list(range(12))
    measured = [line for line in lines if "train_loss" in line]
    assert [line["step"] for line in measured] == [0, 4, 8, 12]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


def test_evaluations_are_returned_too(uncut):
    folder, result = uncut
    assert result.evaluations == run(SETTINGS, model(), TRAIN, DEV).evaluations
    assert result.evaluations == [
        line for line in metrics(folder) if "train_loss" in line
    ]


class _Cut(Exception):
    pass


def _cut_run(monkeypatch, folder: pathlib.Path, after: int, settings=SETTINGS) -> None:
    """A run that dies on its way into step `after`."""
    feed = runs.Feed.__call__

    def dying(self, step):
        if step == after:
            raise _Cut
        return feed(self, step)

    with monkeypatch.context() as patch, pytest.raises(_Cut):
        patch.setattr(runs.Feed, "__call__", dying)
        run(settings, model(), TRAIN, DEV, folder=folder)


def _resume(folder: pathlib.Path, settings=SETTINGS, seed: int = 0):
    return run(settings, model(seed=seed), TRAIN, DEV, folder=folder, resume=True)


@pytest.mark.parametrize("after", [3, 5, 7, 10, 11])
def test_resumed_run_ends_as_the_uncut_one(uncut, monkeypatch, tmp_path, after):
    _cut_run(monkeypatch, tmp_path, after)
    result = _resume(tmp_path)
    folder, expected = uncut
    _assert_same(result.state, expected.state)
    name = "metrics.jsonl"
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    # Of the whole run, and not only of what was left of it.
    assert result.evaluations == expected.evaluations


def _assert_same(state: State, expected: State) -> None:
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_longer_run_goes_on_from_a_shorter_one(uncut, tmp_path):
    _, expected = uncut
    shorter = dataclasses.replace(SETTINGS, num_steps=8)
    run(shorter, model(), TRAIN, DEV, folder=tmp_path)
    state = _resume(tmp_path).state
    _assert_same(state, expected.state)


@pytest.mark.parametrize(
    ("change", "saved", "now"),
    [
        ({"method": "zo_adamm"}, "'radazo'", "'zo_adamm'"),
        ({"learning_rate": 0.5}, "0.001", "0.5"),
        ({"seed": 3}, "0", "3"),
        ({"tune": "full"}, "'lora'", "'full'"),
        ({"batch_size": 5}, "4", "5"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_another_run_is_not_resumed(uncut, change, saved, now):
    folder, _ = uncut
    before = contents(folder)
    name = next(iter(change))
    with pytest.raises(ValueError) as error:
        _resume(folder, dataclasses.replace(SETTINGS, **change))
    message = str(error.value)
    assert (
        message.startswith(f"{name} must be {saved}, as") and f"; got {now}" in message
    )
    assert "\n" not in message
    assert contents(folder) == before


def test_another_model_or_other_data_are_not_resumed(uncut):
    folder, _ = uncut
    with pytest.raises(ValueError, match=r"^base model must be [0-9]+, as in"):
        _resume(folder, seed=1)
    with pytest.raises(ValueError, match=r"^data must be [0-9]+, as in"):
        run(SETTINGS, model(), DEV, DEV, folder=folder, resume=True)


def test_a_run_is_not_overwritten(uncut):
    folder, _ = uncut
    before = contents(folder)
    with pytest.raises(ValueError, match="has a run of 12 steps: resume it"):
        run(SETTINGS, model(), TRAIN, DEV, folder=folder)
    assert contents(folder) == before


@pytest.mark.parametrize("after", [7, 8, 12])
def test_a_signal_ends_a_step_and_leaves_a_checkpoint(
    uncut, monkeypatch, tmp_path, after
):
    """Before an evaluation that is due (8), and before the last one (12), too."""
    stepped = runs._stepped

    def signaled(*args):
        if args[3] == after - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return stepped(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runs, "_stepped", signaled)
        run(SETTINGS, model(), TRAIN, DEV, folder=tmp_path)
    steps = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert steps[-1] == after
    result = _resume(tmp_path)
    folder, expected = uncut
    _assert_same(result.state, expected.state)
    name = "metrics.jsonl"
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    files = (folder / "checkpoints" / "12").rglob("*")
    return sorted(f for f in files if f.is_file() and f.stat().st_size > 100)


@pytest.mark.parametrize(
    "damage",
    [
        "flipped",
        pytest.param("truncated", marks=pytest.mark.slow),
        pytest.param("removed", marks=pytest.mark.slow),
    ],
)
def test_damage_is_found_and_the_checkpoint_before_is_left(uncut, tmp_path, damage):
    folder, expected = uncut
    found = 0
    for i in range(len(_files(folder))):
        copy = tmp_path / str(i)
        shutil.copytree(folder, copy)
        path = _files(copy)[i]
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 255])
        path.write_bytes(
            {
                "truncated": content[:middle],
                "flipped": content[:middle] + flipped + content[middle + 1 :],
                "removed": b"",
            }[damage]
        )
        if damage == "removed":
            path.unlink()
        try:
            state = _resume(copy).state
        except ValueError as error:
            assert "is damaged" in str(error) and "\n" not in str(error)
            found += 1
            shutil.rmtree(copy / "checkpoints" / "12")
            state = _resume(copy).state
        _assert_same(
            state, expected.state
        )  # Damage that does no harm, or the one before.
    assert found >= 1


def test_metrics_are_those_of_the_checkpoint(uncut, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(uncut[0], folder)
    path = folder / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:-7])
    _resume(folder)
    assert path.read_bytes() == before


def test_a_loss_that_is_not_finite_ends_the_run():
    settings = dataclasses.replace(SETTINGS, learning_rate=1e30)
    with pytest.raises(FloatingPointError, match="a smaller learning rate"):
        run(settings, model(), TRAIN, DEV)


def test_the_loss_falls():
    settings = dataclasses.replace(
        SETTINGS, learning_rate=1e-2, num_steps=300, eval_every=300
    )
    few = Batch(*(np.concatenate([x[:5]] * 4) for x in TRAIN))
    first, last = run(settings, model(), few, DEV).evaluations
    assert last["train_loss"] < 0.95 * first["train_loss"]


def test_a_batch_larger_than_the_data_is_refused():
    settings = dataclasses.replace(SETTINGS, batch_size=21)
    with pytest.raises(ValueError, match=r"batch_size must be at most 20, .*; got 21"):
        run(settings, model(), TRAIN, DEV)


def test_the_time_of_evaluations_and_between_processes_is_left_out():
    now = 100.0
    seconds = report.Seconds(lambda: now, [])
    now += 5
    with seconds.stopped():
        now += 1000
    assert seconds() == {"cpu_s": 5.0}
    now = 0.0  # Of another process.
    resumed = report.Seconds(lambda: now, [{"step": 0, "cpu_s": 5.0}])
    now += 2
    assert resumed() == {"cpu_s": 7.0}
    assert report.Seconds(None, [{"step": 0}])() == {}
