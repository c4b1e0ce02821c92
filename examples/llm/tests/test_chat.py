"""Chats: templates, ends of a text, and the command line."""

import datetime
import io
import json
import re
import subprocess
import sys

import pytest
from flax import nnx

from radazo_llm.formats import adapters, chat_template, tokenizers
from radazo_llm.models import lora

from . import tiny

GOLDEN = tiny.GOLDEN
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def texts(folder, *chats):
    """Each chat in the template, up to the begin of the next reply."""
    given = [
        chat_template.Chat(turns, None, turns[-1]["role"] != "assistant")
        for turns in chats
    ]
    return [text for text, _ in chat_template.load(folder).render(given)]


def test_chats_are_put_into_the_template_of_the_model(tmp_path):
    assert texts(tmp_path, TURNS) == ["hi\nyes"]
    expected = "<s>[user] hi\n[assistant] yes\n"
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    assert texts(tmp_path, TURNS, TURNS) == [expected] * 2
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}", "utf-8")
    assert texts(tmp_path, TURNS) == ["2"]


def test_many_chats_are_rendered_in_parts(tmp_path, monkeypatch):
    """A process for a template has too little memory for all chats of a file."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    chats = [[{"role": "user", "content": str(i) * 9}] for i in range(5)]
    whole, rendered, calls = texts(tmp_path, *chats), chat_template._rendered, []

    def counted(given, seconds):
        calls.append(len(json.loads(given)["chats"]))
        return rendered(given, seconds)

    monkeypatch.setattr(chat_template, "_rendered", counted)
    monkeypatch.setattr(chat_template, "_PART", 150)
    assert texts(tmp_path, *chats) == whole and calls == [2, 2, 1]


RENDERINGS = json.loads((GOLDEN / "templates/templates.json").read_text("utf-8"))


@pytest.mark.parametrize("name", RENDERINGS["templates"])
def test_templates_are_rendered_as_by_transformers(name, tmp_path):
    about = RENDERINGS["templates"][name]
    config = RENDERINGS["special"] | {"chat_template": about["template"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    found = texts(tmp_path, *RENDERINGS["chats"])
    now = datetime.datetime.now().strftime(RENDERINGS["format"])
    assert [text.replace(now, RENDERINGS["mark"]) for text in found] == about["texts"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__class__.__mro__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ raise_exception('x') }}",
    ],
)
def test_templates_that_cannot_be_rendered(template, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    with pytest.raises(ValueError, match="chat template cannot be rendered"):
        texts(tmp_path, TURNS)


LARGE = {
    "product": "{{ 'a' * 2000000000 }}",
    "format": "{{ '%2000000000d' % 1 }}",
    "filter": "{{ 'a' | center(2000000000) }}",
    "list": "{{ [0] * 1000000000 }}",
    "doubled": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "number": "{{ 10 ** (10 ** 10) }}",
    "text": "{{ 'a' * 5000000 }}",
}


# In another process, which has no children but the template's.
RENDERED = """
import pathlib, resource, sys
from radazo_llm.formats import chat_template

chat_template.SECONDS = 2.0
try:
    chat = chat_template.Chat(TURNS, add_generation_prompt=False)
    chat_template.load(pathlib.Path(sys.argv[1])).render([chat])
except ValueError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_a_template_takes_bounded_memory_and_time(template, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    command = [sys.executable, "-c", RENDERED.replace("TURNS", repr(TURNS)), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    error, kibibytes = done.stdout.splitlines()
    match = "cannot be rendered: (MemoryError|.* more than|OverflowError)"
    assert re.search(match, error)
    assert int(kibibytes) < 2**20


def test_a_template_takes_bounded_time(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    loop = "{% for i in range(99999) %}"
    template = loop * 3 + "{% endfor %}" * 3
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    with pytest.raises(ValueError, match=r"rendered: it takes more than 0\.51 s"):
        texts(tmp_path, TURNS)


def test_the_ends_of_a_text(job, tmp_path):
    tokenizer = tokenizers.load(job)
    bos = tokenizer.token_to_id(tokenizers.BOS)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}', "utf-8")
    assert chat_template.ends(tmp_path, tokenizer) == {bos, 7}
    ids = '{"eos_token_id": [8, 9]}'
    (tmp_path / "generation_config.json").write_text(ids, "utf-8")
    assert chat_template.ends(tmp_path, tokenizer) == {bos, 7, 8, 9}
    template = "{% for m in messages %}{{ m.content }}<unk>\n{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    tokenizer.add_special_tokens(["<unk>"])
    unknown = tokenizer.token_to_id("<unk>")
    assert chat_template.ends(tmp_path, tokenizer) == {bos, 7, 8, 9, unknown}


ARGUMENTS = ("--max-tokens", "9", "--temperature", "1")


def test_command_line(job, capsys, monkeypatch):
    arguments = ["--model", str(job), *ARGUMENTS]
    tiny.command("chat", *arguments, "--prompt", "a good")
    plain = capsys.readouterr().out
    assert plain.startswith("a good") and len(plain) > len("a good\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a good\n\n"))
    tiny.command("chat", *arguments)
    assert "a good" + capsys.readouterr().out == plain
    # A system's turn stands before the first; a model without a template gets lines.
    monkeypatch.setattr(sys, "stdin", io.StringIO("good\n"))
    tiny.command("chat", *arguments, "--system", "a")
    reply = capsys.readouterr().out
    tiny.command("chat", *arguments, "--prompt", "a\ngood")
    assert "a\ngood" + reply == capsys.readouterr().out


@pytest.mark.slow
def test_adapters_on_the_command_line(job, tmp_path, capsys):
    def said(*options):
        tiny.command(
            *("chat", "--model", job, *ARGUMENTS, "--prompt", "a good", *options)
        )
        return capsys.readouterr().out

    model = tiny.model()
    lora.add_lora(model, rank=2, rngs=nnx.Rngs(0))
    options = ["--adapters", str(tmp_path)]
    adapters.save(model, tmp_path, base=str(job))
    plain = said()
    assert said(*options) == plain, "they change nothing yet"
    for name in lora.ADAPTED:
        getattr(model.layers, name).lora.lora_b[...] += 5.0
    adapters.save(model, tmp_path, base=str(job))
    assert said(*options) != plain


def test_errors_of_the_command_line(job, tmp_path, capsys):
    for arguments in (
        ["--model", tmp_path / "none"],
        ["--model", job, "--prompt", "a", "--adapters", tmp_path],
    ):
        tiny.refused(capsys, "chat", *arguments)
