"""Makes the test process stricter than a user's; files that several modules read."""

import gc
import json
import os
import pathlib

os.environ["MPLBACKEND"] = "Agg"

import jax
import pytest

from radazo_llm.formats import save
from research import corpus

from . import tiny

# Modules live to the end, so that searching them for garbage is lost time.
gc.disable()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# For programs that run once. XLA ends the process at a flag that it does not know, and
# two of these are not documented: one halves the time of a compilation, and the other
# saves a quarter of the rest, since a small program is not split among threads.
QUICK = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):
    QUICK += (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_runtest_teardown(item, nextitem):
    """Forgets compiled programs between modules if there are many.

    Linux allows a process 65,530 mappings and a program takes dozens of them, so XLA
    ends the process after about 2,000 programs.
    """
    if nextitem is not None and nextitem.path == item.path:
        return
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


def pytest_configure(config):
    """The fast run compiles with little optimization, the slow one as users do."""
    if config.getoption("markexpr") == "not slow":
        os.environ.setdefault("XLA_FLAGS", QUICK)


@pytest.fixture(scope="session")
def tokenizer():
    return corpus.train_tokenizer(corpus.reviews(), vocab_size=700)


@pytest.fixture
def checkpoint(tmp_path):
    """OPT's two files, small enough to tokenize by hand: `Ġ` is a space."""
    vocab = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "Ġ", "Ġa", "Ġb"]
    ids = {token: i for i, token in enumerate(vocab)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    merges = "#version: 0.2\nĠ a\nĠ b\n"
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """A folder with a tiny model, its tokenizer, and sentences with labels."""
    folder = tmp_path_factory.mktemp("job")
    lines = ["a good day. It was great", "a bad day. It was terrible"]
    tokenizer = corpus.train_tokenizer(lines * 10, 300)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == tiny.CONFIG.vocab_size
    save.save(tiny.model(), folder)
    rows = ["sentence\tlabel", *("a good day.\t1", "a bad day.\t0") * 10]
    for name, content in (("train.tsv", rows), ("dev.tsv", rows)):
        (folder / name).write_text("\n".join(content) + "\n", encoding="utf-8")
    return folder
