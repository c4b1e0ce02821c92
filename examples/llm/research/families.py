"""Families and quantizations: how far logits are from the authorities', and memory.

    python -m research.families --model gemma-3-270m-q4_k_m.gguf \
        --output research/records/families.json

The families are compared with `transformers`, whose logits of tiny random models lie in
`tests/golden/decoders`: of a text, of prompts that it got padded on the left, and the
likeliest replies. For each quantization there is a random file: the logits with its
matrices in blocks are compared with the logits of the dequantized matrices, and the
size of the parameters with the file's. The model is a file from elsewhere, loaded by a
process of its own.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from radazo_llm.formats import gguf_file, weights
from radazo_llm.models import blocks, decode
from research import block_files, common, on_disk
from research.common import Table, collect

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "decoders"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
LENGTHS = 5, 3, 8  # Of the prompts in the files, as `make_decoders.py` has them.
WIDTH, VOCABULARY = 512, 1000
MIXED = "Q4_K_M"  # A mix of kinds.
KINDS = {kind: {"": kind} for kind in blocks.LAYOUTS} | {
    MIXED: {"token_embd": "Q6_K", "1.ffn_down": "Q6_K", "1.attn_v": "Q6_K", "": "Q4_K"}
}


def family(name: str) -> dict[str, Any]:
    """The largest differences from the logits of transformers, and its replies."""
    expected = np.load(GOLDEN / name / "logits.npz")
    model = weights.load(GOLDEN / name, dtype=jnp.float32)
    tokens, replies = expected["tokens"], expected["replies"]
    prompts = np.zeros((len(LENGTHS), max(LENGTHS)), np.int32)
    for i, length in enumerate(LENGTHS):
        prompts[i, :length] = tokens[0, i : i + length]

    @jax.jit
    def found(tokens: jax.Array, prompts: jax.Array) -> Any:
        lengths = jnp.asarray(LENGTHS, jnp.int32)
        key, number = jax.random.key(0), replies.shape[1]
        made = decode.generate_tokens(model, prompts, lengths, number, key, 0)
        return model(tokens), model(prompts), made.tokens

    logits, padded, own = map(np.asarray, found(tokens, prompts))
    differences = [
        np.abs(padded[i, :length] - expected["padded_logits"][i, -length:]).max()
        for i, length in enumerate(LENGTHS)
    ]
    return {
        "logits": float(np.abs(logits - expected["logits"]).max()),
        "padding": float(max(differences)),
        "replies": bool((own == replies).all()),
    }


def num_bytes(model: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def quantization(kind: str) -> dict[str, Any]:
    """The logits and the memory of a random model in blocks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        block_files.write(path, KINDS[kind], WIDTH, VOCABULARY)
        data = sum(t.data.nbytes for t in gguf_file.read(path).tensors.values())
        models = [
            weights.load(path, dtype=jnp.float32, keep_blocks=keep)
            for keep in (True, False)
        ]
        tokens = np.arange(32, dtype=np.int32)[None]
        kept, dense = (np.asarray(nnx.jit(model)(tokens)) for model in models)
    return {
        "logits": float(np.abs(kept - dense).max()),
        "largest_logit": float(np.abs(dense).max()),
        "bits": 8 * data / sum(leaf.size for leaf in _leaves(models[1])),
        "memory": num_bytes(models[0]) / data,
    }


def _leaves(model: Any) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(model))


def loaded(path: Path, keep_blocks: bool) -> dict[str, Any]:
    """The memory that a process takes more when it has loaded a file."""
    command = [sys.executable, "-m", "research.families", "--load", str(path.resolve())]
    kept = ["--keep-blocks"] if keep_blocks else []
    found = on_disk.spent([*command, *kept], Path(__file__).parents[1])
    size = {"file_MiB": path.stat().st_size / 2**20}
    return size | json.loads(found.output.splitlines()[-1])


def load(path: Path, keep_blocks: bool) -> None:
    """Loads a file, and prints what that takes."""
    import gguf  # noqa: F401  (Not a part of what is measured.)

    jnp.zeros(3).block_until_ready()
    before, start = _memory("VmRSS"), time.process_time()
    model = weights.load(path, dtype=jnp.float32, keep_blocks=keep_blocks)
    found = {
        "parameters_MiB": num_bytes(model) / 2**20,
        "peak_MiB": _memory("VmHWM") - before,
        "cpu_s": time.process_time() - start,
    }
    print(json.dumps(found))


def _memory(name: str) -> float:
    """MiB of this process, by Linux: resident now, or at most so far."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 2**10


# --- The record -------------------------------------------------------------------


def tables(content: dict[str, Any]) -> list[Table]:
    of: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        of.setdefault(row["table"], []).append(row)
    return [
        Table(
            "Largest differences from the logits of transformers, of tiny random "
            "models in float32",
            ["family", "logits", "padded prompts", "same replies"],
            [
                [
                    row["case"],
                    f"{row['logits']:.0e}",
                    f"{row['padding']:.0e}",
                    "yes" if row["replies"] else "**no**",
                ]
                for row in of.get("family", [])
            ],
        ),
        Table(
            "Matrices in the blocks of random files, and dequantized",
            [
                "blocks",
                "bits per parameter",
                "memory, × file",
                "difference of logits",
                "largest logit",
            ],
            [
                [
                    row["case"],
                    f"{row['bits']:.2f}",
                    f"{row['memory']:.2f}",
                    f"{row['logits']:.0e}",
                    f"{row['largest_logit']:.1f}",
                ]
                for row in of.get("quantization", [])
            ],
        ),
        Table(
            "Loading Gemma 3 270M in Q4_K_M",
            ["parameters", "file, MiB", "parameters, MiB", "peak, MiB", "CPU s"],
            [
                [
                    row["case"],
                    f"{row['file_MiB']:,.0f}",
                    f"{row['parameters_MiB']:,.0f}",
                    f"{row['peak_MiB']:,.0f}",
                    f"{row['cpu_s']:.1f}",
                ]
                for row in of.get("loading", [])
            ],
        ),
    ]


@click.command(help=__doc__)
@common.output
@common.resume
@click.option("--model", type=click.Path(path_type=Path), help="A GGUF file.")
@click.option("--load", "to_load", type=click.Path(path_type=Path), hidden=True)
@click.option("--keep-blocks", is_flag=True, hidden=True)
def main(
    output: Path | None,
    resume: bool,
    model: Path | None,
    to_load: Path | None,
    keep_blocks: bool,
) -> None:
    if to_load is not None:
        load(to_load, keep_blocks)
        return
    cases: list[Any] = [
        ({"table": "family", "case": name}, lambda name=name: family(name))
        for name in FAMILIES
    ]
    cases += [
        ({"table": "quantization", "case": kind}, lambda kind=kind: quantization(kind))
        for kind in KINDS
    ]
    if model is not None:
        for name, keep in (("in blocks", True), ("dequantized to float32", False)):
            case = {"table": "loading", "case": name}
            cases.append((case, lambda keep=keep: loaded(model, keep)))
    collect(output, resume, cases, lambda rows: rows)


if __name__ == "__main__":
    main()
