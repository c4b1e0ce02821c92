"""A user's files: their forms, their splits, and what is wrong with them in a line."""

import json
import shutil

import numpy as np
import pytest

from radazo_llm.examples import files, splits
from radazo_llm.formats import tokenizers
from radazo_llm.settings import Settings

from .. import tiny
from ..refusals import DEEP_OBJECT

TEXT = [{"text": f"day {i}", "label": i % 2} for i in range(20)]
GREAT = {"labels": "great=1,terrible=0", "template": "{text}. It was"}
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
WORSE = {"role": "assistant", "content": "c"}
BETTER = {"prompt": "a:", "chosen": "b", "rejected": "c"}
CHOICE = {"prompt": "a:", "candidates": ["b", "c"], "answer": "c"}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(folder, content, name="my.jsonl"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(scope="module")
def chatting(job, tmp_path_factory):
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(job / name, folder)
    about = json.dumps({"chat_template": TEMPLATE})
    (folder / "tokenizer_config.json").write_text(about, "utf-8")
    return folder


def Own(path, **settings):
    """A file with the settings of a run."""
    return splits.Own(path, Settings(**settings))


def pair(prompt, completion):
    return {"prompt": prompt, "completion": completion}


@pytest.mark.parametrize(
    ("row", "shape", "prompt", "candidates", "label"),
    [
        (TEXT[1], GREAT, "day 1. It was", (" great", " terrible"), 0),
        (TEXT[1], {}, "day 1\nAnswer:", (" 0", " 1"), 1),
        (TEXT[1], {"chat": True}, "u:day 1\nAnswer:</s>a:", ("0", "1"), 1),
        (pair("a=", "b"), {}, "a=", ("b</s>",), 0),
        (pair("It was", "b"), {}, "It was", (" b</s>",), 0),
        (pair("It was ", "b"), {}, "It was", (" b</s>",), 0),
        (pair("a", "\nb</s>"), {}, "a", ("\nb</s>",), 0),
        (pair("a", "b"), {"chat": True}, "u:a</s>a:", ("b</s>",), 0),
        ({"messages": CHAT}, {}, "u:a</s>a:", ("b</s>",), 0),
        ({"messages": json.dumps(CHAT)}, {}, "u:a</s>a:", ("b</s>",), 0),
        ({"messages": CHAT * 2}, {}, "u:a</s>a:b</s>u:a</s>a:", ("b</s>",), 0),
        (CHOICE, {}, "a:", (" b", " c"), 1),
        (BETTER, {}, "a:", (" b", " c"), 0),
        (BETTER, {"chat": True}, "u:a:</s>a:", ("b", "c"), 0),
        (
            {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [WORSE]},
            {},
            "u:a</s>a:",
            ("b", "c"),
            0,
        ),
        (CHOICE | {"answer": 0}, {}, "a:", (" b", " c"), 0),
        (
            CHOICE | {"candidates": '["0", "1"]', "answer": "1"},
            {},
            "a:",
            (" 0", " 1"),
            1,
        ),
    ],
)
def test_rows_become_prompts(row, shape, prompt, candidates, label, chatting, tmp_path):
    """A conversation is a prompt in the template, and the reply up to its end."""
    rows = (row, TEXT[0]) if "label" in row else (row,)
    for name in ("train.jsonl", "valid.jsonl"):
        written(tmp_path, lines(*rows), name)
    _, texts, special = Own(tmp_path, **shape).texts(chatting)
    example = texts["train"][0]
    place = f"{tmp_path / 'train.jsonl'}:1"
    assert example == (prompt, candidates, label, place, ())
    assert special == ("</s>a:" not in prompt)


def test_tables_have_quotes_marks_and_other_separators(tmp_path):
    content = 'text,label\r\n"a, ""b""\nc",1\r\n\r\nd,0\r\n'
    expected = [('a, "b"\nc', "1", 2), ("d", "0", 5)]
    for name, separator in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):
        changed = content.replace("text,label", f"text{separator}label")
        for end in (",1", ",0"):
            changed = changed.replace(end, separator + end[1])
        path = written(tmp_path, b"\xef\xbb\xbf" + changed.encode(), name)
        found = list(files.rows(path))
        assert [(*row.values.values(), int(row.place[-1])) for row in found] == expected
        assert [*found[0].values] == ["text", "label"]


def test_an_array_has_the_lines_of_its_rows(tmp_path):
    rows = [{"text": "a\n", "label": i} for i in range(3)]
    for content, places in (
        (json.dumps(rows), [1, 1, 1]),
        ("\ufeff\n" + json.dumps(rows, indent=1), [3, 7, 11]),
        ("[]\n", []),
    ):
        path = written(tmp_path, content, "my.json")
        found = list(files.rows(path))
        assert [row.values for row in found] == rows[: len(places)]
        assert [row.place for row in found] == [f"{path}:{n}" for n in places]
    assert (
        list(files.rows(written(tmp_path, lines(*rows), "my.json")))[2].place[-1] == "3"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1},\n 2]', "my.json:2: must be a JSON object, in an array of them; g"),
        ('[{"a": 1}\n{"a": 1}]', "my.json:1: must be a JSON object"),
        ('[{"a": 1}', "my.json:1: must be a JSON object"),
        ('[{"a": 1}] 3', "my.json:1: must be a JSON object"),
        ('[{"a": "\n', "my.json:1: must be a JSON object"),
        (f"[{DEEP_OBJECT.decode()}]", "my.json:1: must be a JSON object"),
        (b"[\xff]", "my.json must be UTF-8"),
    ],
)
def test_what_is_wrong_with_an_array(content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        list(files.rows(written(tmp_path, content, "my.json")))


def test_a_label_that_no_row_to_train_on_has_is_said(tmp_path, job):
    rows = [r | {"split": ("train", "dev", "test")[i % 3]} for i, r in enumerate(TEXT)]
    rows[5] |= {"label": 2}
    summary = Own(written(tmp_path, lines(*rows))).read(job).summary
    assert summary.endswith(
        "\nNo row to train on has the label '2', and rows of test have it."
    )


def split_of(own):
    """The texts of each split."""
    found = own.divided().items
    return {name: [x.columns["text"] for x in part] for name, part in found.items()}


def test_shares_divide_prompts_and_not_rows(tmp_path):
    rows = [{"text": f"day {i % 40}", "label": i % 2} for i in range(120)]
    own = Own(written(tmp_path, lines(*rows)), dev_share=0.2, test_share=0.1)
    found = split_of(own)
    assert [len(found[name]) for name in ("train", "dev", "test")] == [84, 24, 12]
    sets = [set(part) for part in found.values()]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 40
    # The order of the rows does not matter.
    written(tmp_path, lines(*rows[::-1]))
    assert {n: set(part) for n, part in split_of(own).items()} == {
        n: set(part) for n, part in found.items()
    }


def test_a_column_or_the_names_of_files_divide(tmp_path):
    names = ["Train", "train", "val", " TEST"]
    expected = {"train": ["day 0", "day 1"], "dev": ["day 2"], "test": ["day 3"]}
    for column, given in (("s", "s"), ("split", ""), ("Split", "")):
        rows = [r | {column: n} for r, n in zip(TEXT[:4], names, strict=True)]
        own = Own(written(tmp_path, lines(*rows)), split_column=given)
        assert split_of(own) == expected
    written(tmp_path, lines(*TEXT[:2]), "Train.jsonl")
    written(tmp_path, "text,label\nday 2,0\n", "dev.csv")
    written(tmp_path, "text,label\nday 3,1\n", "test.csv")
    assert split_of(Own(tmp_path)) == expected


def test_the_rows_of_a_run_are_limited_and_the_same_ones(tmp_path, job):
    path = written(tmp_path, lines(*TEXT))
    own = Own(path, dev_share=0.5, train_examples=4, eval_examples=3)
    found = own.read(job)
    assert [len(batch.label) for batch in found.batches] == [4, 3]
    assert "train 4 of 10, dev 3 of 10 examples; at most" in found.summary
    for one, two in zip(found.batches, own.read(job).batches, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)


def test_classes_of_unequal_size_are_said(tmp_path, job):
    rows = [{"text": f"day {i}", "label": int(i == 7)} for i in range(100)]
    rows = [row | {"split": ("train", "dev")[i > 79]} for i, row in enumerate(rows)]
    found = Own(written(tmp_path, lines(*rows)), labels="rare=1,usual=0").read(job)
    assert found.summary.endswith("Classes: rare 1, usual 79.")


def test_all_replies_of_a_conversation_are_scored(chatting, tmp_path):
    """The spans hold the tokens of the replies, and their ends."""
    turns = [{"role": "system", "content": "s"}, *CHAT, CHAT[0]]
    turns.append({"role": "assistant", "content": "cd"})
    for name in ("train.jsonl", "valid.jsonl"):
        written(tmp_path, lines({"messages": turns}), name)
    found = Own(tmp_path, all_turns=True)
    (example,) = found.texts(chatting)[1]["train"]
    text = example.prompt + example.candidates[0]
    assert text == "s:s</s>u:a</s>a:b</s>u:a</s>a:cd</s>"
    assert [text[a:b] for a, b in example.spans] == ["b</s>", "cd</s>"]
    batch, tokenizer = found.read(chatting).batches[0], tokenizers.load(chatting)
    targets = batch.targets[0, 0][batch.mask[0, 0] > 0]
    assert tokenizer.decode(targets, skip_special_tokens=False) == "b</s>cd</s>"
    fed = [batch.tokens[0, 0, at] for at in batch.positions[0, 0]]
    assert tokenizer.decode(fed[:1]) == ":" and batch.mask[0, 0].sum() == len(targets)
    last = Own(tmp_path).read(chatting).batches[0]
    assert last.mask.sum() < batch.mask.sum()


def test_long_examples_can_be_left_out(tmp_path, job):
    rows = [r | {"text": r["text"] * (40 if i < 4 else 1)} for i, r in enumerate(TEXT)]
    own = Own(written(tmp_path, lines(*rows)), skip_long=True)
    assert sum(len(batch.label) for batch in own.read(job).batches) == 16


def changed(**values):
    """Good rows with a wrong one."""
    return lines(*TEXT, TEXT[0] | values)


BAD = {
    "columns": (lines({"review": "a"}), {}, "my.jsonl:1: must have the columns mess"),
    "carriage returns": (
        lines(*TEXT).replace("\n", "\r"),
        {},
        "my.jsonl:1: must end with \\n; got \\r alone",
    ),
    "nan": (changed(label="nan"), {}, "label must be a text or an integer; got 'nan'"),
    "no rows": ("\n\n", {}, "my.jsonl must have rows; got none"),
    "missing": (lines(*TEXT, {"text": "a"}), {}, "my.jsonl:21: must have text, label"),
    "empty": (changed(text=" "), {}, "my.jsonl:21: text must be a text that is not em"),
    "number": (changed(text=3), {}, "my.jsonl:21: text must be a text that is not"),
    "label": (changed(label=2), GREAT, "my.jsonl:21: label must be one of 1, 0; got 2"),
    "no label": (
        changed(label=None),
        {},
        "my.jsonl:21: label must be a text or an int",
    ),
    "one class": (lines(*TEXT[::2]), {}, "label must have 2 to 100 values; got 1: 0"),
    "classes": (
        lines(*({"text": "a", "label": i} for i in range(101))),
        {},
        "label must have 2 to 100 values; got more",
    ),
    "labels": (changed(), {"labels": "a=1,a=0"}, "--labels must be WORD=VALUE for"),
    "one label": (changed(), {"labels": "a=1"}, "--labels must have two words"),
    "template": (changed(), {"template": "It was"}, "--template must contain {text}"),
    "split": (
        lines(*(row | {"split": "holdout"} for row in TEXT)),
        {},
        "my.jsonl:1: split must be one of train, dev, val, valid, validation, test; go",
    ),
    "late split": (changed(split="test"), {}, "my.jsonl:21: must have no column spl"),
    "encoding": (
        changed().encode() + b"\xff\n",
        {},
        ":22: must be UTF-8; got byte 0xff",
    ),
    "utf-16": (changed().encode("utf-16"), {}, "my.jsonl:1: must be UTF-8; got byte"),
    "json": (changed() + "{'a'}\n", {}, ":22: must be a JSON object on one line; got"),
    "array": ("[1]\n", {}, "must be a JSON object on one line; got '[1]'. Save"),
    "deep": (DEEP_OBJECT, {}, "my.jsonl:1: must be a JSON object on one line"),
    "long": (
        changed(text="a good day. " * 40),
        {},
        "Shorten it, or leave out long",
    ),
    "roles": (
        lines({"messages": [{"role": "me", "content": "a"}]}),
        {},
        "my.jsonl:1: messages must be a list of objects with role",
    ),
    "no reply": (
        lines({"messages": CHAT[:1] * 2}),
        {},
        "end with a reply of the assis",
    ),
    "rejected": (
        lines({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT}),
        {},
        "chosen and rejected must each be a list of one reply",
    ),
    "candidates": (lines(CHOICE | {"candidates": ["b"]}), {}, "must be a list of two"),
    "answer": (lines(CHOICE | {"answer": 2}), {}, "answer must be one of the candidat"),
    "numbers": (
        lines(
            CHOICE,
            *(
                CHOICE | {"prompt": str(i), "candidates": ["a", "b", "c"]}
                for i in range(9)
            ),
        ),
        {},
        "candidates must be 2 texts, as in the first row; got 3",
    ),
    "one prompt": (
        lines(TEXT[0], TEXT[0] | {"label": 1}),
        {},
        "must have rows for dev",
    ),
    "completion": (
        lines(*[pair("a", " b" * 50), pair("b", "a")] * 2),
        {},
        "at most 32",
    ),
    "no template": (lines(*TEXT), {"chat": True}, "--chat must be given with a model"),
}


@pytest.mark.parametrize(("content", "shape", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_one_line(content, shape, message, job, tmp_path, capsys):
    path = written(tmp_path, content)
    options = ["--chat" if n == "chat" else f"--{n}={v}" for n, v in shape.items()]
    refused(capsys, message, job, tmp_path, "--data", path, *options)


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        (
            "a.csv",
            "text,text\na,1\n",
            (),
            "a.csv:1: must be a header of distinct names",
        ),
        ("a.csv", "text,label\na,b,1\n", (), "a.csv:2: must have 2 columns, as the he"),
        ("a.csv", 'text,label\n"a,1\n', (), "a.csv:2: must be a row of a table"),
        ("a.csv", "text\tlabel\na\t1\n", (), "a.csv:2: must have the columns"),
        ("a.txt", "a", (), "--data must be a file of .jsonl"),
        (
            "a.csv",
            "text,label\na,1\n",
            ("--split-column", "s"),
            "a.csv:2: must have th",
        ),
        ("a.csv", "text,label,s\na,1,x\n", ("--split-column", "s"), "s must be one of"),
        ("a.csv", "text,label\na,1\n", ("--dev-share", "1"), "--dev-share must be in"),
        ("a.csv", "text,label\na,1\n", ("--dev-share", "0"), "--dev-share and --test"),
        ("none.csv", None, (), "none.csv: No such file"),
        ("a.csv", "text,label\ra,1\r", (), "a.csv:1: must end with"),
    ],
)
def test_what_is_wrong_with_a_table(
    name, content, options, message, job, tmp_path, capsys
):
    path = tmp_path / name if content is None else written(tmp_path, content, name)
    refused(capsys, message, job, tmp_path, "--data", path, *options)


def refused(capsys, message, model, folder, *options):
    """The command ends in one line, and has written nothing."""
    before = tiny.contents(folder)
    given = ("--output", folder / "run", "--steps", 2, *options)
    line = tiny.refused(capsys, "tune", "--model", model, *given)
    assert message in line and len(line) < 700, line
    assert tiny.contents(folder) == before


def test_a_dry_run_prints_what_a_model_sees(chatting, tmp_path, capsys):
    path = written(tmp_path, lines(*TEXT))
    options = ("--labels", "a=1,b=0", "--template", "{text}. It was", "--dry-run")
    tiny.command("tune", "--model", chatting, "--data", path, *options)
    shown = capsys.readouterr().out
    assert "rows: train 18, dev 2." in shown and "'a' (1), 'b' (0)" in shown
    assert shown.count("</s>day ") == shown.count("-> ' ") == 3
    assert "day 3. It was\n-> ' a', 2 tokens\n   ' b', 2 tokens\n" in shown
