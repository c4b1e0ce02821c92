"""The command that tunes."""

import errno
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock

from radazo_llm.formats import find, weights
from radazo_llm.models import quantization
from radazo_llm.tune import command, on_workers
from research.faults.compare import compare

from .. import tiny
from ..tiny import contents, metrics

ROOT = pathlib.Path(__file__).parents[2]


def _arguments(job: pathlib.Path, output: pathlib.Path, *others: str) -> list[str]:
    options = {
        "--model": job,
        "--data": job,
        "--task": "sst2",
        # Those of tiny.SETTINGS, so that all compile one step.
        "--batch-size": 4,
        "--eval-batch-size": 5,
        "--smoothing": 0.01,
        "--learning-rate": 0.001,
        "--lora-rank": 2,
        "--eval-every": 10,
        "--checkpoint-every": 10,
        "--steps": 40,
        "--output": output,
    }
    return ["tune", *(str(part) for pair in options.items() for part in pair), *others]


@pytest.mark.parametrize("task", ["sst2", pytest.param("copa", marks=pytest.mark.slow)])
def test_one_command_starts_a_run_and_resumes_it(job, tmp_path, capsys, task):
    arguments = _arguments(job, tmp_path / "run", "--task", task, "--resume")
    tiny.command(*arguments, "--steps", "20")
    capsys.readouterr()
    tiny.command(*arguments)
    table = capsys.readouterr().out
    assert "train_loss" in table and "dev_accuracy" in table
    steps = re.findall(r"^ *(\d+) ", table, re.MULTILINE)
    assert steps == ["0", "10", "20", "30", "40"]
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(40))


def test_a_second_run_in_the_same_folder_is_refused(job, tmp_path, capsys):
    arguments = _arguments(job, tmp_path)
    with FileLock(tmp_path / ".lock"), pytest.raises(SystemExit) as error:
        tiny.command(*arguments)
    assert error.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and f"{tmp_path} is in use by another run" in lines[0]
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_of_two_runs_started_together_one_is_refused(job, tmp_path):
    arguments = _arguments(job, tmp_path, "--steps", "400")
    processes = [_start(*arguments) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2], errors
    assert "is in use by another run" in errors[codes.index(2)]
    steps = [line["step"] for line in metrics(tmp_path) if "loss" in line]
    assert steps == list(range(400))


def test_what_was_tuned_is_exported(job, tmp_path, monkeypatch):
    """All files get the mode that the umask leaves; a merged model is a model."""
    adapters, merged = tmp_path / "adapters", tmp_path / "merged"
    exports = ("--export-adapters", str(adapters), "--export-merged", str(merged))
    before = os.umask(0o027)
    try:
        tiny.command(*_arguments(job, tmp_path / "run", "--steps", "10", *exports))
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert len(modes) > 10
    for path, mode in modes.items():
        assert mode == (0o750 if path.is_dir() else 0o640), path
    config = json.loads((adapters / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str(job)
    arguments = _arguments(job, tmp_path / "next", "--steps", "10")
    tiny.command(*arguments, "--model", merged)
    last, first = (metrics(tmp_path / name) for name in ("run", "next"))
    assert first[0]["train_loss"] == pytest.approx(last[-1]["train_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_quantized_run_and_what_it_exports(job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quantization, "GROUP", 10)
    arguments = _arguments(job, tmp_path / "run", "--quantize", "int4", "--steps", "5")
    tiny.command(*arguments, "--export-adapters", tmp_path / "adapters")
    assert [line["step"] for line in metrics(tmp_path / "run")][-1] == 5
    assert "All 16 inputs share a scale" in capsys.readouterr().out
    model = tiny.model()
    weights.load_adapters(model, tmp_path / "adapters")
    assert float(abs(model.layers.q_proj.lora.lora_b[...]).max()) > 0


def test_an_export_to_a_full_disk_is_one_line_and_can_be_repeated(
    job, tmp_path, monkeypatch, capsys
):
    to = tmp_path / "adapters"
    options = ("--steps", "10", "--resume", "--export-adapters", str(to))
    arguments = _arguments(job, tmp_path / "run", *options)

    def full(model, folder, base):
        (folder / "adapter_config.json").write_text("{", "utf-8")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(weights, "save_adapters", full)
        tiny.command(*arguments)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{to} cannot be written ([Errno 28] No space left on device). Make" in line
    assert not [*to.iterdir()]
    tiny.command(*arguments)
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in to.iterdir()} == names


def test_an_export_does_not_replace_the_base_model(job, tmp_path, capsys):
    before = contents(job)
    with pytest.raises(SystemExit):
        tiny.command(*_arguments(job, tmp_path, "--export-merged", str(job)))
    assert "--export-merged must not be the path of --model" in capsys.readouterr().err
    assert contents(job) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "no/model"], "--model must be a folder, a GGUF file or a model"),
        (["--model", "a/b/c"], "--model must be a folder, a GGUF file or a model"),
        (["--task", "mnli"], "Invalid value for '--task': 'mnli' is not one of"),
        (["--data", "nowhere"], "No such file"),
        (["--learning-rate", "-1"], "learning_rate must be 0 or more; got -1.0."),
        (["--batch-size", "21"], "batch_size must be at most 20"),
        (["--metric", "f.py:f"], "--metric must be given to radazo-llm reward"),
        (["--tune", "full", "--export-adapters", "x"], "--export-adapters must not"),
        (["--tune", "prompt", "--export-merged", "x"], "--export-merged must not"),
        (["--quantize", "int4", "--export-merged", "x"], "must not be given with --qu"),
        (["--quantize", "int4", "--tune", "full"], "tune must not be full with quant"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(job, tmp_path, capsys, given, message):
    with pytest.raises(SystemExit) as error:
        tiny.command(*_arguments(job, tmp_path, *given))
    assert error.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0], lines


def test_options_come_from_a_file_and_the_line_before_it(job, tmp_path, capsys):
    """A run on a user's file, with a measured rate, ends with an adapter."""
    lines = [json.dumps({"text": f"day {i}", "label": i % 2}) for i in range(24)]
    data, config = tmp_path / "my.jsonl", tmp_path / "run.toml"
    data.write_text("\n".join(lines), "utf-8")
    given = f'data = "{data}"\nlabels = "good=1,bad=0"\nlora_rank = 2\nsteps = 99\n'
    config.write_text(f"{given}no-first-evaluation = true\nresume = false\n", "utf-8")
    folder, adapters = tmp_path / "run", tmp_path / "new" / "adapters"
    options = ("--batch-size", 4, "--eval-batch-size", 5, "--smoothing", 0.01)
    options += ("--steps", 6, "--output", folder, "--export-adapters", adapters)
    tiny.command("tune", "--model", job, "--config", config, *options)
    shown = capsys.readouterr().out
    assert "my.jsonl: train: 22 examples; dev: 2 examples; at most 16" in shown
    assert re.search(r"A step takes .* for 6 steps and 2 evaluations\. Memory", shown)
    assert "Accuracy on dev: tuned" in shown
    about = json.loads((folder / "settings.json").read_text("utf-8"))
    assert about["data"]["shape"]["labels"] == "good=1,bad=0"
    assert about["settings"]["num_steps"] == 6 and about["settings"]["lora_rank"] == 2
    assert about["settings"]["learning_rate"] > 0
    assert about["settings"]["bias_correction"] is True
    assert (adapters / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("steps = ", "run.toml must be TOML: Invalid value"),
        ("stepz = 3", "run.toml: stepz must be an option of tune; see"),
        ("[method]\nsteps = 3", "run.toml: method must be an option of tune"),
        ("steps = 'many'", "'many' is not a valid integer"),
        ("resume = 1", "run.toml: resume must be true or false; got 1"),
    ],
)
def test_a_bad_file_of_options_is_one_line(job, tmp_path, capsys, content, message):
    config = tmp_path / "run.toml"
    config.write_text(content, "utf-8")
    arguments = ("tune", "--model", job, "--data", job, "--config", config)
    with pytest.raises(SystemExit) as error:
        tiny.command(*arguments)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_an_export_that_cannot_be_written_ends_the_run_before_it(job, tmp_path, capsys):
    (tmp_path / "file").write_text("", "utf-8")
    for option, to in (
        ("--export-adapters", tmp_path / "file"),
        ("--export-merged", tmp_path / "file" / "model"),
    ):
        with pytest.raises(SystemExit):
            tiny.command(*_arguments(job, tmp_path / "run", option, to))
        error = capsys.readouterr().err
        assert f"{option} must be a path that can be written; got {to}" in error
    assert not (tmp_path / "run").exists()


def test_a_bad_model_in_gguf_is_one_line(job, tmp_path, capsys):
    (tmp_path / "model.Q4_K.gguf").write_bytes(b"GGUF")
    with pytest.raises(SystemExit):
        tiny.command(*_arguments(job, tmp_path / "run", "--model", str(tmp_path)))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "model.Q4_K.gguf must be a complete GGUF file: it ends within" in line


def test_a_full_disk_is_one_line(job, tmp_path, monkeypatch, capsys):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "tune", full)
    with pytest.raises(SystemExit) as error:
        tiny.command(*_arguments(job, tmp_path))
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "No space left on device. Make room, or choose another folder" in line


def test_an_interrupted_run_says_how_to_continue(job, tmp_path, monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "tune", interrupted)
    with pytest.raises(SystemExit) as error:
        tiny.command(*_arguments(job, tmp_path))
    assert error.value.code == 130
    said = capsys.readouterr().err.strip()
    assert said == "radazo-llm: interrupted; --resume continues from its checkpoint"


def test_a_prompt_longer_than_the_context_is_refused(job, tmp_path, capsys):
    lines = (job / "train.tsv").read_text(encoding="utf-8").splitlines()
    lines.append(f"{'a good day. ' * 100}\t1")
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        tiny.command(*_arguments(job, tmp_path / "run", "--data", str(tmp_path)))
    error = capsys.readouterr().err.strip()
    longest = tiny.CONFIG.max_position_embeddings
    assert "\n" not in error and f"at most {longest} tokens" in error


@pytest.mark.parametrize("missing", ["--model", "--data"])
def test_what_is_tuned_must_be_given(missing, job, tmp_path, capsys):
    arguments = _arguments(job, tmp_path)
    at = arguments.index(missing)
    with pytest.raises(SystemExit) as error:
        tiny.command(*arguments[:at], *arguments[at + 2 :])
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"radazo-llm tune: error: Missing option '{missing}'.")


def test_a_model_is_found_in_the_local_cache(tmp_path, monkeypatch):
    cached = tmp_path / "models--facebook--opt-1.3b"
    snapshot = cached / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    config = '{"model_type": "opt"}'
    (snapshot / "config.json").write_text(config, encoding="utf-8")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find.model("facebook/opt-1.3b") == snapshot


def _start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "radazo_llm", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(job, tmp_path):
    """Killed twice, at so many lines of metrics, wherever it is by then."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    steps = ("--steps", "200", "--tune", "full")
    uncut = _start(*_arguments(job, whole, *steps))
    metrics, resume = killed / "metrics.jsonl", ()
    for lines in (13, 49):
        process = _start(*_arguments(job, killed, *steps), *resume)
        while process.poll() is None and (
            not metrics.exists() or metrics.read_bytes().count(b"\n") < lines
        ):
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        resume = ("--resume",)
    assert uncut.communicate()[0] and uncut.returncode == 0
    resumed = _start(*_arguments(job, killed, *steps), *resume)
    _, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    assert metrics.read_bytes() == (whole / "metrics.jsonl").read_bytes()
    compared = compare(whole / "checkpoints", killed / "checkpoints")
    assert compared == "step 200: equal, bit for bit"


@pytest.mark.slow
def test_one_flag_runs_on_workers(job, tmp_path, capsys):
    pytest.importorskip("distributed")
    flags = ("--workers", "2", "--directions", "4", "--steps", "4")
    arguments = _arguments(job, tmp_path / "run", *flags)
    tiny.command(*arguments)
    assert "train_loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tiny.command(*arguments)
    assert "has a run: resume it (--resume)" in capsys.readouterr().err
    others = ("--steps", "8", "--resume", "--export-adapters", str(tmp_path / "out"))
    tiny.command(*arguments, *others)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(8))
    model = tiny.model()
    weights.load_adapters(model, tmp_path / "out")
    assert float(abs(model.layers.q_proj.lora.lora_b[...]).max()) > 0


@pytest.mark.slow
def test_processes_of_this_machine_listen_to_it_alone():
    pytest.importorskip("distributed")
    with on_workers.connected("1") as client:
        about = client.scheduler_info()
        ports = [about["address"], *about["workers"]]
        assert all(address.startswith("tcp://127.0.0.1:") for address in ports)
        assert client.dashboard_link.startswith("http://127.0.0.1:")
        (server,) = {s.http_server for s in [client.cluster.scheduler]}
        bound = {s.getsockname()[0] for s in server._sockets.values()}
        assert bound == {"127.0.0.1"}


def test_runs_on_workers_have_fewer_settings(job, tmp_path, capsys):
    arguments = _arguments(job, tmp_path, "--workers", "2", "--buckets", "2")
    with pytest.raises(SystemExit):
        tiny.command(*arguments)
    assert "num_buckets must be 1 with workers; got 2" in capsys.readouterr().err
