"""The loop that tunes language models: its loss, its step, and its checkpoints.

The model is a table of logits by token or a tiny OPT; NumPy in float64 and a step
written out by hand are the authorities.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from filelock import FileLock
from flax import nnx

from examples.llm import corpus, figure, main, pretrain, train, weights
from examples.llm.checkpoint import CheckpointError
from examples.llm.data import Batch
from examples.llm.model import OPT, Config

_ROOT = pathlib.Path(__file__).parents[1]
_CONFIG = Config(
    vocab_size=20,
    hidden_size=16,
    ffn_dim=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
)
_SMALL = train.Settings(
    learning_rate=1e-3,
    batch_size=4,
    num_steps=12,
    eval_every=4,
    eval_batch_size=5,
    checkpoint_every=5,
    lora_rank=2,
    prompt_length=2,
)


def _examples(number: int, sequences: int, seed: int = 0) -> Batch:
    """Random examples with two candidates of one or, with `sequences` 2, two tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 20, (number, sequences, 8)).astype(np.int32)
    length = sequences  # Candidates of one token share a sequence.
    positions = np.sort(rng.integers(2, 7, (number, 2, length)), axis=-1)
    if sequences == 1:
        positions[:] = positions[:, :1]
    mask = np.ones((number, 2, length), np.float32)
    mask[::3, 1, 1:] = 0  # Some candidates are shorter.
    return Batch(
        tokens,
        positions.astype(np.int32),
        rng.integers(3, 20, (number, 2, length)).astype(np.int32),
        mask,
        rng.integers(0, 2, number).astype(np.int32),
    )


_TRAIN, _DEV = _examples(13, 1), _examples(6, 1, seed=1)


def _model(seed: int = 0) -> OPT:
    return OPT(_CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(seed))


def _log_probabilities(model: OPT, batch: Batch) -> np.ndarray:
    """Of the candidates' tokens [B, C, L], in float64, one by one."""
    b, c, length = batch.targets.shape
    tokens = np.broadcast_to(batch.tokens, (b, c, batch.tokens.shape[-1]))
    logits = model(jnp.asarray(tokens.reshape(b * c, -1)))
    logits = np.asarray(logits, np.float64).reshape(*tokens.shape, -1)
    rows = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    result = np.zeros((b, c, length))
    for i, j, k in np.ndindex(b, c, length):
        result[i, j, k] = rows[i, j, batch.positions[i, j, k], batch.targets[i, j, k]]
    return result


@pytest.mark.parametrize("sequences", [1, 2])
def test_scores_are_mean_log_probabilities(sequences):
    model, batch = _model(), _examples(5, sequences)
    expected = _log_probabilities(model, batch) * batch.mask
    expected = expected.sum(axis=-1) / batch.mask.sum(axis=-1)
    np.testing.assert_allclose(train.scores(model, batch), expected, rtol=1e-5)


@pytest.mark.parametrize("sequences", [1, 2])
def test_classification_is_the_cross_entropy_over_the_candidates(sequences):
    model, batch = _model(), _examples(5, sequences)
    logp = _log_probabilities(model, batch) * batch.mask
    score = logp.sum(axis=-1) / batch.mask.sum(axis=-1)
    chosen = np.take_along_axis(score, batch.label[:, None], axis=1)[:, 0]
    expected = np.mean(np.log(np.exp(score).sum(axis=1)) - chosen)
    np.testing.assert_allclose(train.loss_fn(model, batch), expected, rtol=1e-5)


@pytest.mark.parametrize("sequences", [1, 2])
def test_language_model_loss_is_that_of_the_right_tokens(sequences):
    model, batch = _model(), _examples(5, sequences)
    rows, mask = np.arange(5), np.asarray(batch.mask, np.float64)
    logp = _log_probabilities(model, batch)[rows, batch.label]
    mask = mask[rows, batch.label]
    expected = -(logp * mask).sum() / mask.sum()
    found = train.loss_fn(model, batch, "language_model")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "objective",
    ["classification", pytest.param("language_model", marks=pytest.mark.slow)],
)
def test_evaluation_in_batches_is_the_loss_on_all(objective):
    data = _examples(13, 2)
    model = _model()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    expected = jax.jit(train.loss_fn, static_argnums=2)(model, data, objective)
    scores = jax.jit(train.scores)(model, data)
    right = np.asarray(scores).argmax(axis=1) == data.label
    for batch_size in (5, 13, 64):
        loss, accuracy = train.evaluate(
            graphdef, params, rest, data, objective=objective, batch_size=batch_size
        )
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(accuracy, right.mean(), rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "tune"),
    [
        ("radazo", "lora"),
        pytest.param("zo_rmsprop", "lora", marks=pytest.mark.slow),
        pytest.param("zo_adamm", "lora", marks=pytest.mark.slow),
        pytest.param("zo_sgd", "lora", marks=pytest.mark.slow),
        pytest.param("radazo", "prompt", marks=pytest.mark.slow),
        pytest.param("zo_adamm", "full", marks=pytest.mark.slow),
    ],
)
def test_step_is_the_one_written_out(method, tune):
    """Central difference along Gaussian u, then the recursions of the paper, twice."""
    settings = dataclasses.replace(_SMALL, method=method, tune=tune)
    job, state = train.prepare(settings, _model())
    key, rate = jax.random.clone(state.key), settings.learning_rate  # It is donated.
    theta, unravel = jax.flatten_util.ravel_pytree(state.params)
    theta, m, v = np.asarray(theta, np.float64), 0.0, 0.0
    loss_fn = jax.jit(
        lambda vector, batch: train.loss_fn(
            nnx.merge(job.graphdef, unravel(vector), job.rest), batch
        )
    )
    for i in range(2):
        batch = jax.tree.map(lambda leaf, i=i: leaf[i : i + 4], _TRAIN)

        def loss(vector: np.ndarray, batch: Batch = batch) -> float:
            return float(loss_fn(jnp.asarray(vector, jnp.float32), batch))

        # The first direction of a step has the step's key folded once more.
        u_key = jax.random.fold_in(jax.random.fold_in(key, i), 0)
        u = np.asarray(jax.random.normal(u_key, theta.shape), np.float64)
        g = (loss(theta + 1e-3 * u) - loss(theta - 1e-3 * u)) / 2e-3 * u
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * (m if method == "radazo" else g) ** 2
        step = {
            "radazo": m / np.sqrt(v + 1e-8),
            "zo_adamm": m / np.sqrt(v + 1e-8),
            "zo_rmsprop": g / np.sqrt(v + 1e-8),
            "zo_sgd": g,
        }[method]
        theta = theta - rate * step
        state, _ = train.train_step(
            job.graphdef, job.recipe, state, job.rest, job.rates, batch
        )
    found = jax.flatten_util.ravel_pytree(state.params)[0]
    moved = np.abs(theta - np.asarray(found)).max()
    assert moved < 0.02 * rate, moved
    assert int(state.step) == 2


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, train.State]:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("uncut")
    result = train.run(_SMALL, _model(), _TRAIN, _DEV, folder=folder)
    return folder, result.state


def _lines(folder: pathlib.Path) -> list[dict[str, float]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_metrics_have_each_step_once_and_in_order(uncut):
    folder, _ = uncut
    lines = _lines(folder)
    assert [line["step"] for line in lines if "loss" in line] == list(range(12))
    measured = [line for line in lines if "train_loss" in line]
    assert [line["step"] for line in measured] == [0, 4, 8, 12]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))


def test_evaluations_are_returned_too(uncut):
    folder, _ = uncut
    evaluations = train.run(_SMALL, _model(), _TRAIN, _DEV).evaluations
    assert evaluations == [line for line in _lines(folder) if "train_loss" in line]


class _Cut(Exception):
    pass


def _cut_run(monkeypatch, folder: pathlib.Path, after: int, settings=_SMALL) -> None:
    """A run that dies on its way into step `after`."""
    batch_at = train.batch_at

    def dying(data, seed, step, batch_size):
        if step == after:
            raise _Cut
        return batch_at(data, seed, step, batch_size)

    with monkeypatch.context() as patch, pytest.raises(_Cut):
        patch.setattr(train, "batch_at", dying)
        train.run(settings, _model(), _TRAIN, _DEV, folder=folder)


def _resume(folder: pathlib.Path, settings=_SMALL, model: OPT | None = None):
    return train.run(
        settings, model or _model(), _TRAIN, _DEV, folder=folder, resume=True
    )


@pytest.mark.parametrize("after", [3, 5, 7, 10, 11])
def test_resumed_run_ends_as_the_uncut_one(uncut, monkeypatch, tmp_path, after):
    _cut_run(monkeypatch, tmp_path, after)
    result = _resume(tmp_path)
    folder, expected = uncut
    _assert_same(result.state, expected)
    name = "metrics.jsonl"
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    # Of the whole run, and not only of what was left of it.
    measured = [line for line in _lines(folder) if "train_loss" in line]
    assert result.evaluations == measured


def _assert_same(state: train.State, expected: train.State) -> None:
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        np.testing.assert_array_equal(one, two)


def test_a_longer_run_goes_on_from_a_shorter_one(uncut, tmp_path):
    _, expected = uncut
    shorter = dataclasses.replace(_SMALL, num_steps=8)
    train.run(shorter, _model(), _TRAIN, _DEV, folder=tmp_path)
    state = _resume(tmp_path).state
    _assert_same(state, expected)


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
    before = _contents(folder)
    name = next(iter(change))
    with pytest.raises(CheckpointError) as error:
        _resume(folder, dataclasses.replace(_SMALL, **change))
    message = str(error.value)
    assert message.startswith(f"{name} must be {saved}, ") and f"got {now}." in message
    assert "\n" not in message
    assert _contents(folder) == before


def test_another_model_or_other_data_are_not_resumed(uncut):
    folder, _ = uncut
    with pytest.raises(CheckpointError, match=r"^base model must be 'crc32"):
        _resume(folder, model=_model(seed=1))
    with pytest.raises(CheckpointError, match=r"^data must be 'crc32"):
        train.run(_SMALL, _model(), _DEV, _DEV, folder=folder, resume=True)


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_is_not_overwritten(uncut):
    folder, _ = uncut
    before = _contents(folder)
    with pytest.raises(CheckpointError, match="has a run of 12 steps: resume it"):
        train.run(_SMALL, _model(), _TRAIN, _DEV, folder=folder)
    assert _contents(folder) == before


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    files = (folder / "checkpoints" / "12").rglob("*")
    return sorted(f for f in files if f.is_file() and f.stat().st_size > 100)


@pytest.mark.parametrize(
    "damage",
    [
        "flipped",
        pytest.param("truncated", marks=pytest.mark.slow),
        pytest.param("emptied", marks=pytest.mark.slow),
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
                "emptied": b"",
                "flipped": content[:middle] + flipped + content[middle + 1 :],
                "removed": b"",
            }[damage]
        )
        if damage == "removed":
            path.unlink()
        try:
            state = _resume(copy).state
        except CheckpointError as error:
            assert "cannot be read" in str(error) and "\n" not in str(error)
            found += 1
            shutil.rmtree(copy / "checkpoints" / "12")
            state = _resume(copy).state
        _assert_same(state, expected)  # Damage that does no harm, or the one before.
    assert found >= 1


def test_where_the_metrics_ended_is_covered_by_the_checksum(uncut, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(uncut[0], folder)
    (path,) = (folder / "checkpoints" / "12" / "run").glob("metadata")
    content = json.loads(path.read_bytes())
    content["metrics_position"] -= 1
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="its checksum is another"):
        _resume(folder)


def test_metrics_shorter_than_their_checkpoint_are_refused(uncut, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(uncut[0], folder)
    (folder / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"metrics\.jsonl has 0 bytes where"):
        _resume(folder)


def test_a_loss_that_is_not_finite_ends_the_run():
    settings = dataclasses.replace(_SMALL, method="zo_sgd", learning_rate=1e30)
    with pytest.raises(FloatingPointError, match="a smaller learning rate"):
        train.run(settings, _model(), _TRAIN, _DEV)


def test_the_loss_falls():
    settings = dataclasses.replace(
        _SMALL, learning_rate=1e-2, num_steps=300, eval_every=300
    )
    first, last = train.run(settings, _model(), _TRAIN, _DEV).evaluations
    assert last["train_loss"] < 0.95 * first["train_loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "adam"}, "method must be one of radazo, zo_adamm"),
        ({"tune": "head"}, "tune must be one of lora, prompt, full, got 'head'"),
        ({"learning_rate": -1.0}, "learning_rate must be positive, got -1.0"),
        ({"num_steps": 0}, "num_steps must be positive, got 0"),
        ({"smoothing": float("nan")}, "smoothing must be positive, got nan"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"b1": 1.0}, "b1 must be in [0, 1), got 1.0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError) as error:
        train.Settings(**options)
    assert message in str(error.value)


def test_a_batch_larger_than_the_data_is_refused():
    settings = dataclasses.replace(_SMALL, batch_size=14)
    with pytest.raises(ValueError, match=r"batch_size must be at most 13, .* got 14"):
        train.run(settings, _model(), _TRAIN, _DEV)


# The command line.
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a tiny model, its tokenizer, and data of both tasks."""
    folder = tmp_path_factory.mktemp("tiny")
    lines = ["a good day. It was great", "a bad day. It was terrible"]
    tokenizer = corpus.train_tokenizer(lines * 10, 300)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dataclasses.replace(_CONFIG, vocab_size=tokenizer.get_vocab_size())
    weights.save(OPT(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), folder)
    rows = ["sentence\tlabel", *("a good day.\t1", "a bad day.\t0") * 10]
    record = {"premise": "It ran.", "choice1": "It hid.", "choice2": "I saw."}
    copa = [
        json.dumps(record | {"question": "effect", "label": i % 2}) for i in range(8)
    ]
    for name, content in (("train.tsv", rows), ("dev.tsv", rows)):
        (folder / name).write_text("\n".join(content) + "\n", encoding="utf-8")
    for name in ("train.jsonl", "val.jsonl"):
        (folder / name).write_text("\n".join(copa) + "\n", encoding="utf-8")
    return folder


def _arguments(tiny: pathlib.Path, output: pathlib.Path, *others: str) -> list[str]:
    options = {
        "--model": tiny,
        "--data": tiny,
        "--task": "sst2",
        "--batch-size": 4,
        "--eval-every": 10,
        "--checkpoint-every": 10,
        "--steps": 40,
        "--output": output,
    }
    return [*(str(part) for pair in options.items() for part in pair), *others]


@pytest.mark.parametrize("task", ["sst2", pytest.param("copa", marks=pytest.mark.slow)])
def test_one_command_starts_a_run_and_resumes_it(tiny, tmp_path, capsys, task):
    arguments = _arguments(tiny, tmp_path / "run", "--task", task, "--resume")
    main.main([*arguments, "--steps", "20"])
    capsys.readouterr()
    main.main(arguments)
    table = capsys.readouterr().out
    assert "train_loss" in table and "dev_accuracy" in table
    steps = [line.split()[0] for line in table.splitlines() if line.count("0.") >= 4]
    assert steps == ["0", "10", "20", "30", "40"]
    lines = _lines(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(40))


def test_a_second_run_in_the_same_folder_is_refused(tiny, tmp_path, capsys):
    arguments = _arguments(tiny, tmp_path)
    with FileLock(tmp_path / ".lock"), pytest.raises(SystemExit) as error:
        main.main(arguments)
    assert error.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and f"{tmp_path} is in use by another run" in lines[0]
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_of_two_runs_started_together_one_is_refused(tiny, tmp_path):
    arguments = _arguments(tiny, tmp_path, "--steps", "400")
    processes = [_start(*arguments) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2], errors
    assert "is in use by another run" in errors[codes.index(2)]
    steps = [line["step"] for line in _lines(tmp_path) if "loss" in line]
    assert steps == list(range(400))


def test_what_was_tuned_is_exported(tiny, tmp_path, monkeypatch):
    """All files get the mode that the umask leaves; a merged model is a model."""
    adapters, merged = tmp_path / "adapters", tmp_path / "merged"
    exports = ("--export-adapters", str(adapters), "--export-merged", str(merged))
    before = os.umask(0o027)
    try:
        main.main(_arguments(tiny, tmp_path / "run", "--steps", "10", *exports))
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert len(modes) > 10
    for path, mode in modes.items():
        assert mode == (0o750 if path.is_dir() else 0o640), path
    config = json.loads((adapters / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str(tiny)
    arguments = _arguments(tiny, tmp_path / "next", "--steps", "10")
    main.main([*arguments, "--model", str(merged)])
    last, first = (_lines(tmp_path / name) for name in ("run", "next"))
    assert first[0]["train_loss"] == pytest.approx(last[-1]["train_loss"], rel=1e-5)


def test_an_export_does_not_replace_the_base_model(tiny, tmp_path, capsys):
    before = _contents(tiny)
    with pytest.raises(SystemExit):
        main.main(_arguments(tiny, tmp_path, "--export-merged", str(tiny)))
    assert "must be another folder than that of --model" in capsys.readouterr().err
    assert _contents(tiny) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "no/model"], "--model must be a folder or a model in the local"),
        (["--model", "a/b/c"], "--model must be a folder or a model in the local"),
        (["--task", "mnli"], "argument --task: invalid choice: 'mnli'"),
        (["--data", "nowhere"], "no such file"),
        (["--learning-rate", "-1"], "learning_rate must be positive, got -1.0."),
        (["--batch-size", "21"], "batch_size must be at most 20"),
        (["--max-length", "0"], "must be an integer of at least 1, got 0"),
        (["--tune", "full", "--export-adapters", "x"], "--export-adapters must not be"),
        (["--tune", "prompt", "--export-merged", "x"], "--export-merged must not be"),
        (["--fast"], "--fast is for the comparison"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(tiny, tmp_path, capsys, given, message):
    with pytest.raises(SystemExit) as error:
        main.main(_arguments(tiny, tmp_path, *given))
    assert error.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0], lines


def test_a_prompt_longer_than_the_context_is_cut_only_if_asked_for(
    tiny, tmp_path, capsys
):
    lines = (tiny / "train.tsv").read_text(encoding="utf-8").splitlines()
    lines.append(f"{'a good day. ' * 100}\t1")
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = _arguments(tiny, tmp_path / "run", "--data", str(tmp_path))
    with pytest.raises(SystemExit):
        main.main(arguments)
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and str(_CONFIG.max_position_embeddings) in error
    main.main([*arguments, "--steps", "10", "--max-length", "32"])


@pytest.mark.parametrize("given", [["--resume"], ["--steps", "3"], ["--task", "sst2"]])
def test_options_of_one_run_need_a_model(capsys, given):
    with pytest.raises(SystemExit) as error:
        main.main(given)
    assert error.value.code == 2
    assert capsys.readouterr().err.strip().endswith(f"{given[0]} needs --model.")


def test_a_model_is_found_in_the_local_cache(tmp_path, monkeypatch):
    cached = tmp_path / "models--facebook--opt-1.3b"
    snapshot = cached / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main.find_model("facebook/opt-1.3b") == snapshot


def _start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "examples.llm.main", *arguments],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


@pytest.mark.slow
@pytest.mark.parametrize("lines", [13, 29])
def test_a_killed_run_ends_as_one_that_was_not(tiny, tmp_path, lines):
    """Killed when its file of metrics has so many lines, wherever it is by then."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    steps = ("--steps", "400", "--tune", "full", "--seed", str(lines))
    uncut = _start(*_arguments(tiny, whole, *steps))
    process = _start(*_arguments(tiny, killed, *steps))
    metrics = killed / "metrics.jsonl"
    while process.poll() is None and (
        not metrics.exists() or metrics.read_bytes().count(b"\n") < lines
    ):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert uncut.communicate()[0] and uncut.returncode == 0
    resumed = _start(*_arguments(tiny, killed, *steps), "--resume")
    _, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    assert metrics.read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert _checksum(killed) == _checksum(whole)


def _checksum(folder: pathlib.Path) -> int:
    """Of all that the last checkpoint holds."""
    items = ocp.args.Composite(run=ocp.args.JsonRestore())
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        return manager.restore(400, args=items)["run"]["checksum"]


# The figure.
def _run(method: str, losses: list[float], **others: object) -> dict[str, object]:
    values = {"tune": "lora", "b1": 0.9, "learning_rate": 5e-5, "seed": 0} | others
    points = range(len(losses))
    return values | {
        "method": method,
        "step": [10 * i for i in points],
        "train_loss": losses,
        "train_accuracy": [0.5 for _ in points],
        "dev_accuracy": [0.5 for _ in points],
    }


def test_steps_to_a_loss_are_interpolated_and_infinite_if_never():
    runs = [
        _run("R-AdaZO", [1.0, 0.5, 0.0]),
        _run("R-AdaZO", [1.0, 0.9, 0.8], seed=1),
    ]
    found = figure.group(runs, method="R-AdaZO")
    steps = figure.steps_to(found, np.array([0.75, 0.7]))
    np.testing.assert_allclose(steps, [5.0, np.inf])


def test_best_rate_is_sought_upward_while_the_loss_falls():
    asked = []

    def run(*, learning_rate: float, **others: str) -> dict[str, list[float]]:
        asked.append(learning_rate)
        return {"train_loss": [1.0, abs(np.log(learning_rate / 8e-4))]}

    assert figure.best_rate(run, "lora", "radazo", 6) == pytest.approx(8e-4)
    np.testing.assert_allclose(asked, [5e-5, 2e-4, 8e-4, 3.2e-3])


@pytest.mark.slow
def test_pretraining_is_done_once(tmp_path, monkeypatch):
    lines = ["a good day. It was great"] * 20
    tokenizer = corpus.train_tokenizer(lines, 300)
    tokens = corpus.token_stream(tokenizer, lines)
    calls = []

    def prepare(vocab_size: int):
        calls.append(vocab_size)
        return tokenizer, tokens

    monkeypatch.setattr(corpus, "prepare", prepare)
    settings = dataclasses.replace(
        pretrain.FAST, vocab_size=300, hidden_size=16, num_steps=3, length=8
    )
    for _ in range(2):
        folder = pretrain.pretrained(tmp_path, settings)
    assert calls == [300]
    assert weights.load(folder, dtype=jnp.float32).config == settings.config()
    pretrain.pretrained(tmp_path, dataclasses.replace(settings, num_steps=4))
    assert calls == [300, 300]


@pytest.mark.slow
def test_the_comparison_runs_on_a_bare_machine(tmp_path):
    process = _start("--fast", "--output", str(tmp_path))
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    for caption in figure.CAPTIONS.values():
        assert caption in out
    content = json.loads((tmp_path / "fast.json").read_text(encoding="utf-8"))
    assert {row["table"] for row in content["rows"]} == set(figure.CAPTIONS)
    assert (tmp_path / "fast.png").read_bytes().startswith(b"\x89PNG")


# What docs/llm.md says of the comparison, held against its file.
@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    path = _ROOT / "docs" / "evidence" / "llm.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_settings_of_the_comparison_are_the_appendix(content):
    settings = content["settings"]
    assert settings["num_directions"] == 1
    assert settings["learning_rate"] == 5e-5
    assert settings["smoothing"] == 1e-3
    assert (settings["b1"], settings["b2"]) == (0.9, 0.99)
    assert settings["seeds"] == 3
    assert "--fast" not in content["command"]


def test_tables_and_curves_are_of_the_same_runs(content):
    assert content["rows"] == list(figure.rows(content["runs"]))


@pytest.fixture(scope="module")
def equal(content) -> dict[str, dict[str, figure.Group]]:
    return {
        tune: {one.name: one for one in figure.equal_rates(content["runs"], tune)}
        for tune in figure.TUNES
    }


@pytest.mark.parametrize("tune", figure.TUNES)
def test_radazo_is_faster_at_equal_rates_on_each_seed(equal, tune):
    ours, other = equal[tune]["R-AdaZO"], equal[tune]["ZO-AdaMM"]
    assert len(ours.losses) == 3
    steps = figure.steps_to(ours, other.losses[:, -1])
    assert (steps < other.steps[-1] / 2).all()


@pytest.mark.parametrize("tune", figure.TUNES)
def test_zo_adamm_and_zo_rmsprop_learn_alike(equal, tune):
    """Their losses fall equally far, to a fifth."""
    one, two = equal[tune]["ZO-AdaMM"], equal[tune]["ZO-RMSProp"]
    falls = [(g.losses[:, 0] - g.losses[:, -1]).mean() for g in (one, two)]
    assert falls[0] == pytest.approx(falls[1], rel=0.2)


def test_best_rates_differ_by_about_the_length_of_the_steps(content):
    """By one step of the grid, which is a factor of four."""
    for tune in figure.TUNES:
        found = {g.name: g for g in figure.tuned_rates(content["runs"], tune)}
        ratio = found["ZO-AdaMM"].learning_rate / found["R-AdaZO"].learning_rate
        assert ratio == pytest.approx(4)


def test_tuned_methods_end_closer_together_than_their_seeds(content):
    for tune in figure.TUNES:
        found = {g.name: g for g in figure.tuned_rates(content["runs"], tune)}
        ends = [found[name].losses[:, -1] for name in ("R-AdaZO", "ZO-AdaMM")]
        apart = abs(ends[0].mean() - ends[1].mean())
        assert apart < min(end.std(ddof=1) for end in ends)
        ahead = ends[0] < ends[1]
        assert ahead.all() == (tune == "lora")


def test_little_moves_with_adapters_at_the_rate_of_the_paper(equal):
    losses = equal["lora"]["ZO-AdaMM"].losses
    assert (losses[:, 0] - losses[:, -1] < 0.01).all()


def test_a_tuned_rate_need_not_be_the_better_on_all_seeds(content, equal):
    found = figure.tuned_rates(content["runs"], "full")
    (tuned,) = (one for one in found if one.name == "R-AdaZO")
    assert equal["full"]["R-AdaZO"].losses[:, -1].mean() < tuned.losses[:, -1].mean()


def test_with_b1_of_zero_radazo_ends_as_zo_rmsprop(content, equal):
    """They start alike, with the same directions, and differ in nothing."""
    ours, other = figure.betas(content["runs"])[0], equal["lora"]["ZO-RMSProp"]
    np.testing.assert_allclose(ours.losses, other.losses, rtol=1e-4)


def test_nobody_learns_to_tell_the_sentences_apart(content):
    ends = [run["dev_accuracy"][-1] for run in content["runs"]]
    assert max(ends) < 0.65


def test_a_larger_b1_is_faster(content):
    ends = [one.losses[:, -1].mean() for one in figure.betas(content["runs"])]
    assert (np.diff(ends) < 0).all()
