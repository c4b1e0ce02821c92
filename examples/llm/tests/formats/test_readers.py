"""Files that somebody else may have written: read right, or refused in one line."""

import ast
import pathlib

import pytest

from radazo_llm.formats import tokenizers, weights
from radazo_llm.tune import data
from research import common
from research.readers import fuzz
from research.readers.mutate import PICKLE
from research.readers.targets import TARGETS

from ..refusals import DEEP, DEEP_OBJECT, refused

ROOT = pathlib.Path(__file__).parents[2]
# Reading them takes a part of a second each.
LONG = {
    *("safetensors", "safetensors of a decoder", "adapters", "checkpoint"),
    *("a chat's ends and template", "gguf of a model"),
    "journal with right checksums",
}


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in LONG])
def test_changed_files_are_read_right_or_refused(name):
    """`python -m research.readers --files 100000` tries more."""
    counts, _ = fuzz.run(name, 40)
    assert sum(counts.values()) == 40
    assert not [found for found in counts if found.startswith("failed")]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_more_changed_files_are_read_right_or_refused(name):
    counts, _ = fuzz.run(name, 20 if name in LONG else 300, seed=1)
    assert not [found for found in counts if found.startswith("failed")]


# Pickles.


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n == "checkpoint" else n
        for n in TARGETS
    ],
)
def test_no_reader_reads_a_pickle(name, tmp_path):
    """A planted one would end this process."""
    target = TARGETS[name]
    target.make(tmp_path)
    right = target.read(tmp_path)
    for path in sorted(tmp_path.glob(target.files)):
        if path.is_file():
            content = path.read_bytes()
            path.write_bytes(PICKLE)
            found = fuzz.outcome(name, tmp_path, right)
            # Some of the files next to a checkpoint are not needed to read it.
            assert found == "refused" or (name, found) == ("checkpoint", "same")
            path.write_bytes(content)


_PICKLES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch"}


def unpickles(path):
    """The calls in a file that may read a pickle."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr="load" | "loads"):
                if module in _PICKLES:
                    yield module
            case ast.ImportFrom(module=module) if module in _PICKLES:
                yield module
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "allow_pickle"


def test_no_code_reads_a_pickle():
    files = [
        p for name in ("radazo_llm", "research") for p in (ROOT / name).rglob("*.py")
    ]
    assert not {str(path): [*unpickles(path)] for path in files if [*unpickles(path)]}


# JSON.


@pytest.mark.parametrize("content", [DEEP, DEEP_OBJECT], ids=["lists", "objects"])
def test_deep_json_is_refused(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    refused(common.read, path, match="config.json must be a JSON object: maximum recur")
    refused(weights.read_config, tmp_path, match="must be a JSON object: maximum recur")
    refused(data.copa, path, match="config.json:1: must be a JSON object with the text")
    for name in ("tokenizer.json", "vocab.json"):
        (tmp_path / "merges.txt").touch()
        path.rename(tmp_path / name)
        refused(tokenizers.load, tmp_path, match="merges.txt, that can be read")
        (tmp_path / name).rename(path)


def test_a_file_of_json_is_read_up_to_a_size(tmp_path):
    path = tmp_path / "record.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # The file is sparse, so it takes no space on the disk.
    refused(common.read, path, match="it has more than 67108864 bytes")
