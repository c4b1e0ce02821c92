"""The command that tunes."""

import errno
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock

from radazo_llm.formats import adapters as of_peft
from radazo_llm.formats import find
from radazo_llm.run import loop
from radazo_llm.tune import command

from .. import tiny
from ..tiny import contents, metrics

ROOT = pathlib.Path(__file__).parents[2]


def _arguments(job: pathlib.Path, output: pathlib.Path, *others: str) -> list[str]:
    options = {
        "--model": job,
        "--data": job,
        "--labels": "great=1,terrible=0",
        "--template": "{text} It was",
        # Those of tiny.SETTINGS, so that all compile one step.
        "--batch-size": 4,
        "--eval-batch-size": 5,
        "--smoothing": 0.01,
        "--learning-rate": 0.001,
        "--lora-rank": 2,
        "--eval-every": 10,
        "--steps": 40,
        "--output": output,
    }
    return ["tune", *(str(part) for pair in options.items() for part in pair), *others]


def test_one_command_starts_a_run_and_resumes_it(job, tmp_path, capsys):
    arguments = _arguments(job, tmp_path / "run", "--resume")
    tiny.command(*arguments, "--steps", "20")
    assert "Classes: great 10, terrible 10." in capsys.readouterr().out
    tiny.command(*arguments)
    table = capsys.readouterr().out
    assert "train_loss" in table and "dev_accuracy" in table
    assert "Accuracy on dev: the largest class alone 50.0%, untuned" in table
    steps = re.findall(r"^ *(\d+) ", table, re.MULTILINE)
    assert steps == ["0", "10", "20", "30", "40"]
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(40))


def test_a_template_names_the_time_of_the_first_start(job, tmp_path):
    """A run resumes at another time with the same texts."""
    model = tmp_path / "model"
    shutil.copytree(job, model)
    template = (
        "{{ strftime_now('%S%f') }}{% for m in messages %}{{ m.content }}</s>"
        "{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template, "utf-8")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name in ("train", "dev"):
        row = json.dumps({"messages": turns}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(row * 4, "utf-8")
    options = ("--resume", "--model", model, "--data", tmp_path, "--objective", "auto")
    for steps in (1, 2):
        tiny.command(*_arguments(job, tmp_path / "run", *options, "--steps", steps))
    assert len([x for x in metrics(tmp_path / "run") if "loss" in x]) == 2


def test_a_dry_run_may_be_cut_by_its_reader(job, tmp_path):
    """`| head` closes its end of the pipe."""
    command = [sys.executable, "-m", "radazo_llm", *_arguments(job, tmp_path / "run")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT}
    with subprocess.Popen([*command, "--dry-run"], **options) as running:
        running.stdout.close()
        assert (running.stderr.read(), running.wait()) == (b"", 0)


def test_a_diverged_run_has_a_status_of_its_own(job, tmp_path, capsys):
    arguments = _arguments(job, tmp_path, "--steps", 1, "--learning-rate", 1e30)
    line = tiny.refused(capsys, *arguments, status=1)
    assert "train_loss must be finite; got nan at step 1. Give a smaller" in line
    assert not (tmp_path / "adapters").exists()


def test_a_second_run_in_the_same_folder_is_refused(job, tmp_path, capsys):
    with FileLock(tmp_path / ".lock"):
        line = tiny.refused(capsys, *_arguments(job, tmp_path))
    assert f"{tmp_path} is in use by another run" in line
    assert not (tmp_path / "metrics.jsonl").exists()


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
    assert len(modes) > 8
    for path, mode in modes.items():
        assert mode == (0o750 if path.is_dir() else 0o640), path
    config = json.loads((adapters / "adapter_config.json").read_text("utf-8"))
    assert config["base_model_name_or_path"] == str(job)
    arguments = _arguments(job, tmp_path / "next", "--steps", "10")
    tiny.command(*arguments, "--model", merged)
    last, first = (metrics(tmp_path / name) for name in ("run", "next"))
    assert first[0]["train_loss"] == pytest.approx(last[-1]["train_loss"], rel=1e-5)


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
        patch.setattr(of_peft, "save", full)
        tiny.command(*arguments)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    expected = f"{to} cannot be written (OSError: [Errno 28] No space left on device)"
    assert expected in line
    assert not [*to.iterdir()]
    tiny.command(*arguments)
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in to.iterdir()} == names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "no/model"], "--model must be a folder, a GGUF file or a model"),
        (["--model", "a/b/c"], "--model must be a folder, a GGUF file or a model"),
        (["--model", "FILE"], "x.gguf must be a complete GGUF file: it ends within"),
        (["--data", "nowhere.csv"], "nowhere.csv: No such file or directory"),
        (["--learning-rate", "-1"], "--learning-rate must be 0 or more; got -1.0"),
        (["--metric", "f.py:f"], "reward must be one of answer, format"),
        (["--last-layers", "1", "--metric", "answer"], "must be 0 with --metric; got"),
        (["--last-layers", "1", "--workers", "2"], "must be 0 with --workers; got 1"),
        (["--tune", "full", "--export-adapters", "x"], "--export-adapters must not"),
        (["--export-merged", "JOB"], "--export-merged must not be the path of --model"),
        (["--export-adapters", "FILE"], "--export-adapters must be a path that can be"),
        (["--export-merged", "FILE/x"], "--export-merged must be a path that can be"),
        (["--quantize", "file", "--export-merged", "x"], "must not be given with --qu"),
        (["--quantize", "file", "--tune", "full"], "--tune must not be full with"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(job, tmp_path, capsys, given, message):
    """It is found before the first step, and the base model stays as it is."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for name, path in (("JOB", job), ("FILE", tmp_path / "x.gguf")):
        given = [part.replace(name, str(path)) for part in given]
    before, run = contents(job), tmp_path / "run"
    assert message in tiny.refused(capsys, *_arguments(job, run, *given))
    assert contents(job) == before and not (run / "metrics.jsonl").exists()


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
    assert "my.jsonl: train 22, dev 2 examples; at most 16 tokens. Classes: g" in shown
    assert re.search(
        r"A step takes .* for 3 more steps, .*\. Memory: [\d,.]+ MiB", shown
    )
    assert "Accuracy on dev: tuned" in shown
    about = json.loads((folder / "settings.json").read_text("utf-8"))
    assert about["settings"]["labels"] == "good=1,bad=0"
    assert about["settings"]["num_steps"] == 6 and about["settings"]["lora_rank"] == 2
    assert about["measured"] > 0
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
    assert message in tiny.refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "No space left on device. Make room, or choose another folder",
        ),
        (
            KeyboardInterrupt(),
            130,
            "radazo-llm: interrupted; the same command with --resume continues",
        ),
    ],
    ids=["full disk", "interrupted"],
)
def test_the_end_of_a_run_from_outside(
    job, tmp_path, monkeypatch, capsys, error, status, said
):
    def ended(*args, **options):
        raise error

    monkeypatch.setattr(command, "tune", ended)
    assert said in tiny.refused(capsys, *_arguments(job, tmp_path), status=status)


@pytest.mark.parametrize("missing", ["--model", "--data"])
def test_what_is_tuned_must_be_given(missing, job, tmp_path, capsys):
    arguments = _arguments(job, tmp_path)
    at = arguments.index(missing)
    line = tiny.refused(capsys, *arguments[:at], *arguments[at + 2 :])
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
    """Killed and terminated, at so many lines of metrics, wherever it is by then."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    steps = ("--steps", "200", "--tune", "full", "--resume")
    uncut = _start(*_arguments(job, whole, *steps))
    metrics = killed / "metrics.jsonl"
    for lines, ending in ((13, signal.SIGKILL), (49, signal.SIGTERM)):
        process = _start(*_arguments(job, killed, *steps))
        while process.poll() is None and (
            not metrics.exists() or metrics.read_bytes().count(b"\n") < lines
        ):
            time.sleep(0.01)
        process.send_signal(ending)
        _, errors = process.communicate()
        if ending == signal.SIGTERM:
            assert process.returncode == 130 and "interrupted" in errors
    assert uncut.communicate()[0] and uncut.returncode == 0
    resumed = _start(*_arguments(job, killed, *steps))
    _, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    for name in ("metrics.jsonl", "merged/model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_workers_need_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    match = "--workers must be given with distributed installed; it is not. Run"
    with pytest.raises(ValueError, match=match), loop.connected("2"):
        pass


@pytest.mark.slow
def test_processes_of_this_machine_listen_to_it_alone():
    pytest.importorskip("distributed")
    with loop.connected("1") as client:
        about = client.scheduler_info()
        ports = [about["address"], *about["workers"]]
        assert all(address.startswith("tcp://127.0.0.1:") for address in ports)
        assert client.dashboard_link.startswith("http://127.0.0.1:")
        (server,) = {s.http_server for s in [client.cluster.scheduler]}
        bound = {s.getsockname()[0] for s in server._sockets.values()}
        assert bound == {"127.0.0.1"}


METRIC = """
def size(prompts, completions, *, answer, **columns):
    assert set(answer) <= {"great", "terrible"}
    return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_a_metric_of_what_the_model_writes(job, tmp_path):
    (tmp_path / "metric.py").write_text(METRIC, "utf-8")
    name = f"{tmp_path / 'metric.py'}:size"
    metric = ("--metric", name, "--tokens", "4", "--steps", "10")
    tiny.command(*_arguments(job, tmp_path / "run", *metric))
    rows = [row for row in metrics(tmp_path / "run") if "dev_loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row[f"dev_{name}"] > 0 and row["dev_tokens"] <= 4
        assert "dev_reward" not in row
