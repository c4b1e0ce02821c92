"""Readers of files, each with a file to begin with."""

import functools
import json
import pathlib
import shutil
import warnings
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from examples.apps.llm import corpus, data, generate, weights
from examples.common import checkpoint
from examples.research.paper import network
from radazo_jax._src.runs import journal

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
OPT = GOLDEN / "opt" / "norm_before"
DECODER = GOLDEN / "decoders" / "gemma3_text"
ADAPTERS = GOLDEN / "peft" / "lora"
START = np.zeros(6, np.float32)
OPTIMIZER = zo.radazo(3e-2)
ESTIMATOR = zo.forward_difference(num_directions=3, smoothing=0.5)


class Target(NamedTuple):
    """A reader.

    Attributes:
      make: Writes a folder of files that are right.
      files: Those of them to change, as a pattern.
      read: Reads the folder.
      same: Whether what was read may be accepted, given what is right. If files have
        a checksum it is the same; otherwise, whatever was read.
      after: A function of the changed content.
      share: The share of all files that are tried, in percent.
    """

    make: Callable[[pathlib.Path], Any]
    files: str
    read: Callable[[pathlib.Path], Any]
    share: float
    same: Callable[[Any, Any], bool] | None = None
    after: Callable[[bytes], bytes] = lambda content: content


def equal(found: Any, right: Any) -> bool:
    one, two = jax.tree.leaves(found), jax.tree.leaves(right)
    return len(one) == len(two) and all(map(np.array_equal, one, two))


def write_journal(folder: pathlib.Path) -> None:
    zo.minimize_black_box(
        lambda x: float(np.sum((x - 1) ** 2)),
        *(START, OPTIMIZER, ESTIMATOR, 6, 0),
        journal=folder / "run.jsonl",
        progress=False,
    )


def read_journal(folder: pathlib.Path) -> Any:
    with warnings.catch_warnings():  # Of a line that is cut.
        warnings.filterwarnings("ignore", "journal .*: its last line")
        return journal.read(folder / "run.jsonl")


def begins(found: Any, right: Any) -> bool:
    """Whether a journal holds what the first lines of another do."""
    if found is None:
        return True
    steps = right.records[: len(found.records)]
    return found.run == right.run and equal(found.records, steps)


def replay(folder: pathlib.Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "journal .*: its last line")
        path = folder / "run.jsonl"
        return zo.replay(path, START, OPTIMIZER, ESTIMATOR).params


def sealed(content: bytes) -> bytes:
    """With the checksums that the lines should have."""
    checksum, lines = 0, []
    for line in content.removesuffix(b"\n").split(b"\n"):
        body = line.rpartition(b',"crc":"')[0] or line
        checksum = zlib.crc32(body, checksum)
        lines.append(body + b',"crc":"%08x"}\n' % checksum)
    return b"".join(lines)


def write_model(folder: pathlib.Path, source: pathlib.Path = OPT) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder)


write_decoder = functools.partial(write_model, source=DECODER)


def write_adapters(folder: pathlib.Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(ADAPTERS / name, folder)


def read_adapters(folder: pathlib.Path) -> Any:
    model = weights.load(OPT, dtype=jnp.float32)
    weights.load_adapters(model, folder)
    return model


def read_model(folder: pathlib.Path) -> Any:
    return weights.load(folder, dtype=jnp.float32)


@functools.cache
def tokenizer() -> Any:
    lines = ["a good day. It was great", "a bad day. It was terrible"]
    return corpus.train_tokenizer(lines * 10, 300)


def write_tokenizer(folder: pathlib.Path) -> None:
    tokenizer().save(str(folder / "tokenizer.json"))


def write_parts(folder: pathlib.Path) -> None:
    tokenizer().model.save(str(folder))


def read_tokenizer(folder: pathlib.Path) -> Any:
    found = data.load_tokenizer(folder)
    return found.encode("a good day. It was terrible").ids


def write_chat(folder: pathlib.Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    for name, values in {
        "config": {"model_type": "opt", "eos_token_id": 2},
        "generation_config": {"eos_token_id": [1, 2]},
        "tokenizer_config": {
            "bos_token": {"content": "<s>"},
            "chat_template": template,
        },
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(values), "utf-8")


def chat(folder: pathlib.Path) -> Any:
    turns = [{"role": "user", "content": "a good day"}]
    return generate.ends(folder, tokenizer()), generate.conversation(folder)(turns)


def write_sst2(folder: pathlib.Path) -> None:
    rows = ["sentence\tlabel", *("a good day.\t1", "a bad day.\t0") * 5]
    (folder / "train.tsv").write_text("\n".join(rows) + "\n", "utf-8")


def write_copa(folder: pathlib.Path) -> None:
    line = (
        '{"premise": "It ran.", "choice1": "It hid.", "choice2": "I saw.", '
        '"question": "effect", "label": 1}\n'
    )
    (folder / "train.jsonl").write_text(line * 5, "utf-8")


def write_images(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"{part}_{split}": rng.integers(0, 10, (2, 28, 28)[:ndim]).astype(np.uint8)
        for part, ndim in (("x", 3), ("y", 1))
        for split in ("train", "test")
    }
    np.savez_compressed(folder / "mnist.npz", **arrays)


SETTINGS = {"seed": 0, "rate": 0.1}


def placed() -> Any:
    rng = np.random.default_rng(0)
    state = {"w": jnp.asarray(rng.normal(size=(4, 50))), "step": jnp.asarray(7)}
    return jax.device_put(state, jax.devices()[0])


def write_checkpoint(folder: pathlib.Path) -> None:
    with checkpoint.manager(str(folder)) as to:
        notes = [{"step": 1, "loss": 0.25}]
        checkpoint.save(to, 7, placed(), SETTINGS, notes)


def read_checkpoint(folder: pathlib.Path) -> Any:
    with checkpoint.manager(str(folder), create=False) as source:
        found = checkpoint.restore(source, placed(), SETTINGS)
        return found, None if found is None else checkpoint.notes(source)


TARGETS = {
    "journal": Target(write_journal, "*", read_journal, 30, begins),
    "journal with right checksums": Target(write_journal, "*", replay, 5, after=sealed),
    "config.json": Target(write_model, "config.json", weights.read_config, 5),
    "config.json of a decoder": Target(
        write_decoder, "config.json", weights.read_config, 10
    ),
    "safetensors": Target(write_model, "*", read_model, 2),
    "safetensors of a decoder": Target(write_decoder, "*", read_model, 1),
    "adapters": Target(write_adapters, "*", read_adapters, 1),
    "a chat's ends and template": Target(write_chat, "*", chat, 5),
    "tokenizer.json": Target(write_tokenizer, "*", read_tokenizer, 5),
    "vocab.json, merges.txt": Target(write_parts, "*", read_tokenizer, 10),
    "train.tsv": Target(write_sst2, "*", lambda f: data.sst2(f / "train.tsv"), 10),
    "train.jsonl": Target(write_copa, "*", lambda f: data.copa(f / "train.jsonl"), 10),
    "mnist.npz": Target(
        write_images, "*", lambda f: network.load(f / "mnist.npz"), 5.8, equal
    ),
    "checkpoint": Target(write_checkpoint, "**/*", read_checkpoint, 0.2, equal),
}
