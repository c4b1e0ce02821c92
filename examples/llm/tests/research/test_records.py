"""The records, their commands, and the pages that show them."""

import importlib
import shlex

import click
import pytest
from click.testing import CliRunner

from research import tables
from research.common import RECORDS, read

DOCS = RECORDS.parents[3] / "docs"
PAGES = [RECORDS / "README.md"]
PAGES += [DOCS / "guides" / f"{name}.md" for name in ("language_models", "rewards")]
# Of scripts at revision f58da5e that are no longer here; pages of the project
# `examples/research` have their tables.
EARLIER = {"damage", "decoding", "decoding_gpu", "decoding_tpu", "faults_llm"}
EARLIER |= {"llm_memory", "readers"}
FILES = [path for path in sorted(RECORDS.glob("*.json")) if path.stem not in EARLIER]


def test_there_are_records():
    assert len(FILES) == 6
    assert all((RECORDS / f"{name}.json").is_file() for name in EARLIER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_of_a_record_runs(path):
    """The script that it names takes its options, and it writes this record."""
    python, flag, module, *options = shlex.split(read(path)["command"])
    assert (python, flag) == ("python", "-m")
    script = importlib.import_module(module)
    found = CliRunner().invoke(script.main, [*options, "--help"])
    assert found.exit_code == 0 and "--output" in found.output
    with click.Context(script.main) as context:
        # Raises at an option that the script does not have.
        given, rest, _ = script.main.make_parser(context).parse_args(list(options))
    assert not rest
    assert (RECORDS.parents[1] / given["output"]).resolve() == path.resolve()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_the_tables_of_their_records(page):
    assert page.read_text("utf-8") == tables.rendered(page)
