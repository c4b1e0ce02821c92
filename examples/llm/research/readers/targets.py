"""Readers of files, each with a file to begin with."""

import functools
import json
import pathlib
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import radazo_jax as zo
from radazo_llm.formats import chat_template, tokenizers, weights
from radazo_llm.tune import checkpoint, data
from research import corpus

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden"
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
        *(START, OPTIMIZER, ESTIMATOR),
        num_steps=6,
        key=0,
        journal=folder / "run.jsonl",
        progress=False,
    )


def replay(folder: pathlib.Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "journal .*: its last line")
        path = folder / "run.jsonl"
        return zo.replay(path, START, OPTIMIZER, ESTIMATOR).params


@functools.cache
def prefixes() -> list[Any]:
    """The parameters after each step of the run that `write_journal` writes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        write_journal(folder)
        path = folder / "run.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        found = []
        for number in range(1, len(lines) + 1):
            path.write_bytes(b"".join(lines[:number]))
            found.append(replay(folder))
    return found


def begins(found: Any, right: Any) -> bool:
    """Whether a journal was read as one of its beginnings."""
    del right
    return any(equal(found, one) for one in prefixes())


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


def write_gguf(folder: pathlib.Path) -> None:
    shutil.copy(GOLDEN / "gguf" / "llama.gguf", folder / "model.gguf")


def read_header(folder: pathlib.Path) -> Any:
    path = folder / "model.gguf"
    ids = tokenizers.load(path).encode("a good day. It was terrible").ids
    return weights.read_config(path), ids


def read_gguf(folder: pathlib.Path) -> Any:
    return weights.load(folder / "model.gguf", dtype=jnp.float32)


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
    found = tokenizers.load(folder)
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
    return chat_template.ends(folder, tokenizer()), chat_template.conversation(folder)(
        turns
    )


def write_sst2(folder: pathlib.Path) -> None:
    rows = ["sentence\tlabel", *("a good day.\t1", "a bad day.\t0") * 5]
    (folder / "train.tsv").write_text("\n".join(rows) + "\n", "utf-8")


def write_copa(folder: pathlib.Path) -> None:
    line = (
        '{"premise": "It ran.", "choice1": "It hid.", "choice2": "I saw.", '
        '"question": "effect", "label": 1}\n'
    )
    (folder / "train.jsonl").write_text(line * 5, "utf-8")


SETTINGS = {"seed": 0, "rate": 0.1}


def placed() -> Any:
    rng = np.random.default_rng(0)
    state = {"w": jnp.asarray(rng.normal(size=(4, 50))), "step": jnp.asarray(7)}
    return jax.device_put(state, jax.devices()[0])


def write_checkpoint(folder: pathlib.Path) -> None:
    with checkpoint.opened(folder) as to:
        notes = [{"step": 1, "loss": 0.25}]
        checkpoint.save(to, 7, placed(), SETTINGS, notes)


def read_checkpoint(folder: pathlib.Path) -> Any:
    with checkpoint.opened(folder, create=False) as source:
        return checkpoint.restore(source, placed(), SETTINGS)


TARGETS = {
    "journal": Target(write_journal, "*", replay, 30, begins),
    "journal with right checksums": Target(write_journal, "*", replay, 5, after=sealed),
    "config.json": Target(write_model, "config.json", weights.read_config, 5),
    "config.json of a decoder": Target(
        write_decoder, "config.json", weights.read_config, 10
    ),
    "safetensors": Target(write_model, "*", read_model, 2),
    "safetensors of a decoder": Target(write_decoder, "*", read_model, 1),
    "gguf": Target(write_gguf, "*", read_header, 5),
    "gguf of a model": Target(write_gguf, "*", read_gguf, 1),
    "adapters": Target(write_adapters, "*", read_adapters, 1),
    "a chat's ends and template": Target(write_chat, "*", chat, 5),
    "tokenizer.json": Target(write_tokenizer, "*", read_tokenizer, 5),
    "vocab.json, merges.txt": Target(write_parts, "*", read_tokenizer, 10),
    "train.tsv": Target(write_sst2, "*", lambda f: data.sst2(f / "train.tsv"), 10),
    "train.jsonl": Target(write_copa, "*", lambda f: data.copa(f / "train.jsonl"), 10),
    "checkpoint": Target(write_checkpoint, "**/*", read_checkpoint, 0.2, equal),
}
