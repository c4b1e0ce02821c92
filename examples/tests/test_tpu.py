"""The example for pods runs on simulated devices and on several processes."""

import hashlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
from typing import NamedTuple

import click
import jax
import numpy as np
import pytest

from examples.tpu import checkpoint, cluster, decoder, drift, train
from tests.conftest import QUICK

# Runs of one process compile the same few programs, for other numbers of devices.
pytestmark = pytest.mark.usefixtures("compiled_once")

_ROOT = pathlib.Path(__file__).parents[2]
_SCRIPTS = _ROOT / "examples" / "tpu"
_SMALL = (
    *("--layers", "1", "--width", "16", "--vocabulary", "16", "--length", "8"),
    *("--batch-size", "8", "--log-every", "1"),
)
# Gloo writes into the standard output, also within a line.
_STEP = re.compile(r"step +(\d+) loss (\S+)$", re.MULTILINE)
_MINUTES = 240
_LONG = 1200  # Only a machine that does much else needs it.
_FLAGS = (
    "--xla_force_host_platform_device_count={} "
    f"--xla_cpu_collective_timeout_seconds={_LONG} "
    f"--xla_cpu_collective_call_terminate_timeout_seconds={_LONG} "
)
_QUICK = QUICK  # No bits are compared with programs as users compile them.


def _start(arguments, *, devices, processes=1, flags="", own=lambda process: ()):
    """Starts the script in processes of `devices` simulated devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": path.rstrip(os.pathsep),
        "XLA_FLAGS": _FLAGS.format(devices) + flags,
    }
    if processes > 1:
        # A program from the cache ends in a traceback if it loses a process.
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, _SCRIPTS / "train.py", *_SMALL, *arguments]
    started = []
    for process in range(processes):
        cluster = ("--coordinator", address, "--num-processes", processes)
        cluster = (*cluster, "--process-id", process) if processes > 1 else ()
        started.append(
            subprocess.Popen(
                [str(part) for part in (*command, *cluster, *own(process))],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
        )
    return started


def _finish(started, timeout=_LONG):
    """Exit code, stdout and stderr of each process."""
    try:
        outputs = [one.communicate(timeout=timeout) for one in started]
    finally:
        for one in started:
            if one.poll() is None:
                one.kill()
                one.communicate()
    return [(one.returncode, *out) for one, out in zip(started, outputs, strict=True)]


def _run(arguments, **layout):
    """The losses of the steps, as printed."""
    ended = _finish(_start(arguments, **layout))
    for code, _, stderr in ended:
        assert code == 0, stderr
    for _, stdout, _ in ended[1:]:
        assert not _STEP.search(stdout)  # Process 0 speaks for all.
    return {int(step): loss for step, loss in _STEP.findall(ended[0][1])}


def _digest(folder):
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path).encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


# What is wrong is said in one line.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "pipeline=2"], "as data=2,model=4; got pipeline=2"),
        (["--mesh", "data=2,data=4"], "as data=2,model=4; got data=2,data=4"),
        (["--mesh", "data"], "(perturbation, data, model) their numbers of devices"),
        (["--mesh", "data=0"], "as data=2,model=4; got data=0"),
        (["--mesh", "data=3,model=5"], "data=3 × model=5 are 15, and there are"),
        (["--num-directions", "0"], "'--num-directions': 0 is not in the range x>=1"),
        (["--num-directions", "two"], "'two' is not a valid integer range"),
        (["--smoothing", "-1"], "'--smoothing': must be a number above 0; got -1"),
        (["--learning-rate", "inf"], "a number above 0; got inf"),
        (["--heads", "3"], "--heads must divide --width 32; got 3"),
        (["--shard-params", "some"], "'some' is not one of 'no', 'tensor', 'fsdp'"),
        (["--coordinator", "127.0.0.1:1234"], "go together"),
        (["--pod", "--process-id", "0"], "go together"),
        (["--coordinator", "host"], "as 10.0.0.1:1234; got 'host'"),
        (
            [*("--coordinator", "h:1", "--num-processes", "2"), "--process-id", "2"],
            "--process-id must be from 0 to 1; got 2",
        ),
        (
            ["--checkpoint", __file__],
            "test_tpu.py must be a folder; got a file",
        ),
        (["--checkpoint", "/proc/none/run"], "No such file or directory: '/proc/none"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line(capsys, arguments, message):
    try:
        code = train.main(arguments)
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert captured.err.count("\n") == 1 and "error: " in captured.err
    assert "step" not in captured.out


def test_a_batch_that_cannot_be_cut():
    arguments = ["--batch-size", "6", "--shard-params"]
    mesh = jax.sharding.AbstractMesh((1, 2, 4), cluster.AXES)
    assert train.rows(train.parse([*arguments, "no"]), mesh) == jax.P(("data",))
    with pytest.raises(click.ClickException, match=r"a multiple of 8, .*got 6"):
        train.rows(train.parse([*arguments, "fsdp"]), mesh)


# Processes that end.

_SILENT = "The following tasks are unhealthy (stopped sending heartbeats):\n"
_SAID = {  # By jaxlib 0.10.2, with other lines before and after.
    f"{_SILENT}1\nThe tasks have crashed.": "process 1 has ended or says nothing",
    f"{_SILENT}3\n12\nThe tasks have": "process 3, 12 has ended or says nothing",
    "absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. Either "
    "the leader task was preempted/died": "process 0 has ended or says nothing",
    "INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 1 "
    "heartbeat timeout. This indicates": "process 1 has ended or says nothing",
    "process 0: UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/"
    "pair.cc:538] Read error [127.0.0.1]:31129: Connection reset by peer": (
        "another process has ended"
    ),
    "RESOURCE_EXHAUSTED: Out of memory": "",
}


@pytest.mark.parametrize(("said", "expected"), _SAID.items())
def test_who_is_missing(said, expected):
    said = f"E1121 22:30:02.5 1 a.cc:1] {said}\n"
    assert cluster.missing(said) == expected


@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [
        ("pass", 0, ""),
        ("print('why', file=sys.stderr); sys.exit(2)", 2, "why\n"),
        ("print('Traceback ', file=sys.stderr); sys.exit(1)", 1, "Traceback \n"),
        (
            "print('note\\nE1121 22:30:02.5 1 a] Failed to send RPC to coordination "
            "service.', file=sys.stderr, flush=True); os.abort()",
            3,
            "note\ntrain.py: error: process 0 has ended or says nothing; AGAIN\n",
        ),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "train.py: error: ended by signal 9; AGAIN\n",
        ),
    ],
)
def test_what_a_parent_makes_of_the_end(capsys, code, expected, message):
    command = [sys.executable, "-c", f"import os, sys; {code}"]
    assert cluster.supervise(command, "AGAIN") == expected
    assert capsys.readouterr().err == message


def test_a_folder_is_one_run_s(tmp_path):
    folder = str(tmp_path)
    refused = pytest.raises(
        click.ClickException, match=r"is in use by another run; wait"
    )
    with checkpoint.locked(folder), refused, checkpoint.locked(folder):
        pass
    with checkpoint.locked(folder):
        pass


# The model and its data.


def _sizes(**changes):
    sizes = {"layers": 2, "width": 8, "heads": 2, "vocabulary": 12, "length": 6}
    return decoder.Sizes(**(sizes | {"dtype": "float32"} | changes))


def test_shardings_of_the_parameters():
    size = 4
    sizes = _sizes()
    shapes = jax.eval_shape(lambda key: decoder.init(key, sizes), jax.random.key(0))
    replicated, tensor, fsdp = (
        decoder.specs(shapes, how, size) for how in ("no", "tensor", "fsdp")
    )
    assert set(replicated.values()) == {jax.P()}
    assert tensor["embedding"] == jax.P("model")
    assert tensor["up"] == tensor["query"] == jax.P(None, None, "model")
    assert tensor["down"] == tensor["out"] == jax.P(None, "model")
    assert tensor["positions"] == tensor["norm_1"] == jax.P()
    assert fsdp["down"] == fsdp["out"] == jax.P(None, "model")
    assert fsdp["up"] == jax.P(None, None, "model")
    assert fsdp["positions"] == fsdp["norm_1"] == jax.P(None, "model")
    assert fsdp["norm"] == jax.P("model")
    with pytest.raises(
        click.ClickException, match=r"axis 1 of down \[2, 32, 8\] for 5 dev"
    ):
        decoder.specs(shapes, "tensor", 5)


def test_data_are_a_function_of_seed_and_step():
    sizes = _sizes()
    tokens = decoder.batch(7, 3, 5, sizes)
    assert tokens.shape == (5, sizes.length) and tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, decoder.batch(7, 3, 5, sizes))
    assert (tokens != decoder.batch(7, 4, 5, sizes)).any()
    assert (tokens != decoder.batch(8, 3, 5, sizes)).any()


# Runs.


@pytest.mark.slow
def test_a_few_steps(tmp_path):
    folder = tmp_path / "made"
    losses = _run(
        ["--steps", "3", "--checkpoint", folder],
        devices=2,
        flags=_QUICK,
    )
    assert list(losses) == [1, 2, 3]
    # Guessing costs log(16) = 2.77, and the start is not much worse.
    assert all(2 < float(loss) < 4 for loss in losses.values())
    assert {path.name for path in folder.iterdir()} <= {"3", ".lock"}


@pytest.mark.slow
def test_settings_that_differ_between_processes_are_named():
    values = ("sphere", "gaussian")
    started = _start(
        [],
        devices=2,
        processes=2,
        own=lambda process: ["--distribution", values[process]],
    )
    for code, _, stderr in _finish(started):
        assert code == 2
        assert (
            "--distribution must be the same in all processes; got 'sphere' in process "
            "0 and 'gaussian' in process 1"
        ) in stderr


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The checkpoint of two steps."""
    folder = tmp_path_factory.mktemp("short")
    _run(["--steps", "2", "--checkpoint", folder], devices=1, flags=_QUICK)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--width", "32"], "width must be 16, as in the checkpoint"),
        (
            ["--distribution", "sphere"],
            "distribution must be 'rademacher', as in the checkpoint",
        ),
        (["--seed", "1"], "/2; got 1"),
    ],
    ids=["tree", "distribution", "seed"],
)
def test_checkpoint_of_another_run_is_refused_and_kept(short, change, message):
    before = _digest(short)
    ((code, _, stderr),) = _finish(_start(["--checkpoint", short, *change], devices=1))
    assert code == 2
    assert message in stderr and stderr.count("\n") == 1
    assert _digest(short) == before


@pytest.mark.slow
def test_damaged_checkpoint_is_refused_in_one_line(short, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(short, folder)
    (folder / "2" / "settings" / "metadata").write_text('{"sett')
    ((code, _, stderr),) = _finish(_start(["--checkpoint", folder], devices=1))
    assert code == 2
    assert f"the checkpoint {folder / '2'} cannot be read (" in stderr
    assert stderr.count("\n") == 1


# Bit for bit: 100 steps of R-AdaZO, 11 evaluations on 8 devices.

_RUN = ("--steps", "100", "--num-directions", "10", "--checkpoint-every", "25")


class _Whole(NamedTuple):
    """A run that never stopped."""

    folder: pathlib.Path
    losses: dict[int, str]


def _uncut(folder, flags=""):
    losses = _run([*_RUN, "--checkpoint", folder], devices=8, flags=flags)
    assert list(losses) == list(range(1, 101))
    return _Whole(folder, losses)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return _uncut(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The same run, and all that is compared with it, compiled in less time."""
    return _uncut(tmp_path_factory.mktemp("quick"), _QUICK)


def _assert_same_end(whole, losses, folder):
    assert losses == {step: whole.losses[step] for step in losses}
    compared = checkpoint.compare(str(whole.folder), str(folder))
    assert compared == "step 100: equal, bit for bit"


@pytest.mark.slow
def test_two_processes_are_as_one(whole, tmp_path):
    losses = _run([*_RUN, "--checkpoint", tmp_path], devices=4, processes=2)
    assert len(losses) == 100
    _assert_same_end(whole, losses, tmp_path)


def _without_end(folder, copy):
    """Copies the folder as a run stopped after step 75 leaves it."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "100")
    assert {path.name for path in copy.iterdir()} <= {"75", ".lock"}
    return copy


@pytest.mark.slow
def test_a_run_resumes_elsewhere(whole, tmp_path):
    folder = _without_end(whole.folder, tmp_path / "copy")
    losses = _run([*_RUN, "--checkpoint", folder], devices=3)
    assert list(losses) == list(range(76, 101))
    _assert_same_end(whole, losses, folder)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_by_the_others_and_the_run_resumes(
    quick, tmp_path, victim
):
    arguments = [*_RUN, "--checkpoint-every", "10", "--checkpoint", tmp_path]
    endless = [*arguments, "--steps", "100000"]
    started = _start(endless, devices=4, processes=3, flags=_QUICK)
    for line in started[0].stdout:
        step = _STEP.search(line)
        if step and int(step[1]) >= 40:
            break
    started[victim].send_signal(signal.SIGKILL)
    for i, (code, _, stderr) in enumerate(_finish(started, _MINUTES)):
        if i != victim:
            assert code == cluster.LOST
            assert stderr == (
                f"train.py: error: process {victim} has ended or says nothing; start "
                "all processes again with the same commands to resume from the latest "
                f"checkpoint in {tmp_path}\n"
            )
    losses = _run(arguments, devices=8, flags=_QUICK)
    assert min(losses) > 1 and max(losses) == 100
    _assert_same_end(quick, losses, tmp_path)


@pytest.mark.slow
def test_a_second_run_in_one_folder_is_refused(tmp_path):
    arguments = ["--checkpoint", tmp_path, "--checkpoint-every", "100000", "--steps"]
    first = _start([*arguments, "100000"], devices=1, flags=_QUICK)
    for line in first[0].stdout:
        if _STEP.search(line):
            break
    second = _start([*arguments, "2"], devices=1, processes=2, flags=_QUICK)
    for code, _, stderr in _finish(second):
        assert code == 2
        assert f"{tmp_path} is in use by another run" in stderr
    first[0].kill()
    _finish(first)
    # The lock went with its process, and there is no checkpoint yet.
    assert list(_run([*arguments, "2"], devices=1, flags=_QUICK)) == [1, 2]


# The first layout is what the others are compared with. The command has all.
_DRIFT = """
import drift
drift.LAYOUTS = drift.LAYOUTS[::2]
drift.main()
"""


@pytest.mark.slow
def test_sums_in_another_order_drift_little():
    """The README names these bounds."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _FLAGS.format(8)}
    done = subprocess.run(
        [sys.executable, "-c", _DRIFT, "--seeds", "1"],
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _SCRIPTS)))},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split("|") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == len(drift.LAYOUTS[::2]) - 1
    for row in rows:
        assert 0 < float(row[2]) < drift.PARAMS_BOUND
        assert 0 < float(row[3]) < drift.LOSS_BOUND


def _assert_close(whole, losses):
    for step, loss in losses.items():
        expected = pytest.approx(float(whole.losses[step]), rel=drift.LOSS_BOUND)
        assert float(loss) == expected


_CUT = ("--mesh", "perturbation=2,data=2,model=2", "--shard-params")


@pytest.mark.slow
def test_a_cut_model_resumes_whole(quick, tmp_path):
    cut, copy = tmp_path / "cut", tmp_path / "copy"
    arguments = [*_RUN, *_CUT, "tensor", "--checkpoint", cut]
    losses = _run(arguments, devices=4, processes=2, flags=_QUICK)
    assert len(losses) == 100
    _assert_close(quick, losses)
    resumed = [*_RUN, "--checkpoint", _without_end(cut, copy)]
    losses = _run(resumed, devices=2, flags=_QUICK)
    assert list(losses) == list(range(76, 101))
    _assert_close(quick, losses)
