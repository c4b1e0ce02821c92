"""The replies of conversations in what chat templates render."""

import json

import pytest
from tokenizers import Tokenizer, models

from radazo_llm.examples import splits
from radazo_llm.settings import Settings

SPECIAL = ["</s>", "<end>", "<return>", "<user>", "<bot>", "<call>", "<next>"]
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
USER, REPLY = (
    {"role": r, "content": c} for r, c in (("user", "Hi"), ("assistant", "x"))
)
BYE = {"role": "assistant", "content": "<b>y</b>"}
THINK = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nx"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"role": "tool", "content": "3"}
TOOLS = [{"function": {"name": "add"}}]

# Each has the constructions of a family, in other words.
ONE_LINE = (
    "{% for m in messages %}<{{ 'bot' if m.role == 'assistant' else 'user' }}>"
    "{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
OPENS = ONE_LINE.replace("<bot>{% endif", "<bot><think>\n{% endif").replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"
)
LATEST = (
    "{% set ns = namespace(last_query_index=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last_query_index = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<bot>"
    "{% set parts = m.content.split('</think>') %}"
    "{% if loop.index0 > ns.last_query_index %}"
    "{% if loop.last or (not loop.last and reasoning_content) %}<think>"
    "{{ parts[0].split('<think>')[-1] if parts | length > 1 }}</think>"
    "{% endif %}{% endif %}{{ parts[-1].strip() }}<end>{% else %}"
    "<user>{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}<bot>to={{ m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}<call>{% else %}"
    "<bot>final:{{ m.content }}{{ '<return>' if loop.last and not add_generation_prompt"
    " else '<end>' }}{% endif %}{% else %}"
    "<user>{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
AFTER = ONE_LINE.replace("<bot>{% endif %}", "<bot>{% else %}<next>{% endif %}")
NO_END = "{% for m in messages %}{{ '\n' ~ m.role }}: {{ m.content }}{% endfor %}"
NO_END += "{% if add_generation_prompt %}{{ '\nassistant:' }}{% endif %}"
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot>"
    "{% generation %}{{ m.content }}{% endgeneration %}!"
    "{% generation %}<end>\n{% endgeneration %}"
    "{% else %}<user>{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot><think>{% endif %}"
)
# The begin of a reply follows whatever is asked.
ALWAYS = CHANNELS.replace("{% if add_generation_prompt %}<bot>{% endif %}", "<bot>")
LISTED = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + ONE_LINE
TWO = [USER, REPLY, USER, BYE]


def texts(folder, template, turns, tools=None, end="</s>", **settings):
    """The text of a conversation, and the parts of it that are scored."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "llama", "eos_token_id": tokenizer.token_to_id(end)}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    row = {"messages": turns} | ({} if tools is None else {"tools": tools})
    for name in ("train", "dev"):
        (folder / f"{name}.jsonl").write_text(json.dumps(row), "utf-8")
    own = splits.Own(folder, Settings(**settings))
    divided, found, _ = own.texts(folder)
    [example] = found["train"]
    text = example.prompt + example.candidates[0]
    places = example.spans or ((len(example.prompt), len(text)),)
    return text, [text[a:b] for a, b in places], divided.notes


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        # The template's end, and not the configuration's, which it never renders.
        (ONE_LINE, [USER, REPLY], ("<user>Hi<end>\n<bot>x<end>", "x<end>")),
        (ONE_LINE, TWO, ("<user>Hi<end>\n<bot>x<end>\n" * 2, "<b>y</b><end>")),
        (NO_END, [USER, REPLY], ("\nuser: Hi\nassistant: x</s>", " x</s>")),
        # The prompt opens <think>, and the text does not.
        (OPENS, [USER, REPLY], ("<user>Hi<end>\n<bot>x<end>", "x<end>")),
        (OPENS, [USER, BYE], ("<user>Hi<end>\n<bot><b>y</b><end>", "<b>y</b><end>")),
        (LATEST, [USER, REPLY], ("", "<think></think>x<end>")),
        (LATEST, [USER, THINK], ("", "<think>\nhm\n</think>x<end>")),
        (
            CHANNELS,
            [USER, REPLY],
            ("<user>Hi<end><bot>final:x<return>", "final:x<return>"),
        ),
        (CHANNELS, [USER, CALLS], ("", 'to=add{"a": 1}<call>')),
        (CHANNELS, [USER, CALLS, TOOL, REPLY], ("", "final:x<return>")),
        (AFTER, [USER, REPLY], ("", "x<end>\n<next>")),
        (MARKED, [USER, REPLY], ("<user>Hi<end><bot>x!<end>\n", "x", "<end>\n")),
    ],
)
def test_the_last_reply_and_its_end(template, turns, expected, tmp_path):
    text, parts, _ = texts(tmp_path, template, turns)
    assert parts == list(expected[1:])
    if turns == TWO:
        assert text == "<user>Hi<end>\n<bot>x<end>\n<user>Hi<end>\n<bot><b>y</b><end>"
    elif expected[0]:
        assert text == expected[0]


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (ONE_LINE, TWO, ["x<end>", "<b>y</b><end>"]),
        (OPENS, TWO, ["x<end>", "<b>y</b><end>"]),
        # Earlier replies have their reasoning, too.
        (LATEST, TWO, ["<think></think>x<end>", "<think></think><b>y</b><end>"]),
        (
            LATEST,
            [USER, THINK, *TWO],
            [
                "<think>\nhm\n</think>x<end>",
                "<think></think>x<end>",
                "<think></think><b>y</b><end>",
            ],
        ),
        (CHANNELS, TWO, ["final:x<end>", "final:<b>y</b><return>"]),
        (
            CHANNELS,
            [USER, CALLS, TOOL, REPLY],
            ['to=add{"a": 1}<call>', "final:x<return>"],
        ),
        (AFTER, TWO, ["x<end>", "<b>y</b><end>\n<next>"]),
        (MARKED, TWO, ["x", "<end>\n", "<b>y</b>", "<end>\n"]),
    ],
)
def test_all_replies(template, turns, expected, tmp_path):
    assert texts(tmp_path, template, turns, all_turns=True)[1] == expected


def test_the_end_of_the_configuration_comes_first(tmp_path):
    """Some templates have a token of their own between the text and the end."""
    template = ONE_LINE.replace("<end>", "<next><end>")
    assert texts(tmp_path, template, [USER, REPLY])[1] == ["x<next><end>"]
    assert texts(tmp_path, template, [USER, REPLY], end="<next>")[1] == ["x<next>"]


def test_the_begin_of_the_next_reply_is_no_end(tmp_path):
    found = texts(tmp_path, ALWAYS, [USER, REPLY], end="<return>")[1]
    assert found == ["final:x<return>"]
    found = texts(tmp_path, ALWAYS, [USER, CALLS], end="<call>")[1]
    assert found == ['to=add{"a": 1}<call>']


def test_a_text_that_contains_an_end_is_whole(tmp_path):
    reply = {"role": "assistant", "content": "a<end>b"}
    assert texts(tmp_path, ONE_LINE, [USER, reply])[1] == ["a<end>b<end>"]


def test_reasoning_that_the_template_leaves_out_is_said(tmp_path):
    text, parts, notes = texts(tmp_path, OPENS, [USER, THINK])
    assert parts == ["\n\nx<end>"] and "hm" not in text
    assert notes[0] == "The chat template leaves out the reasoning of 1 of 1 replies."
    assert not texts(tmp_path, LATEST, [USER, THINK])[2]


@pytest.mark.parametrize(
    ("template", "turns", "tools", "options", "message"),
    [
        (NO_END, TWO, None, {"all_turns": True}, "does not end a reply before the ne"),
        (ONE_LINE, [USER, CALLS], None, {}, "leaves out tools or tool_calls na"),
        (LISTED, [USER, CALLS], TOOLS, {}, "leaves out tools or tool_calls na"),
        (
            CHANNELS,
            [USER, REPLY],
            TOOLS,
            {},
            "leaves out tools or tool_calls na",
        ),
        (ONE_LINE, [USER, REPLY], {"a": 1}, {}, "tools must be a list; got {'a': 1}"),
        (
            ONE_LINE,
            [USER, REPLY],
            [{}],
            {},
            "must have names; got {}",
        ),
        ("{{ messages | length }}", [USER, REPLY], None, {}, "another way if a reply"),
        (
            MARKED.replace("{% generation", "{% if 0 %}{% generation").replace(
                "{% endgeneration %}", "{% endgeneration %}{% endif %}"
            ),
            [USER, REPLY],
            None,
            {},
            "the content of a reply",
        ),
        (
            "{% set t %}{% generation %}x{% endgeneration %}{% endset %}"
            "{{ t | length }}",
            [USER, REPLY],
            None,
            {},
            "its text must not depend on",
        ),
        (
            "{{ messages | length }}{{ messages[-1].content }}",
            TWO,
            None,
            {"all_turns": True},
            "renders turns another way if a reply follows",
        ),
    ],
)
def test_what_is_refused(template, turns, tools, options, message, tmp_path):
    with pytest.raises(ValueError, match=r"chat template|tools") as error:
        texts(tmp_path, template, turns, tools, **options)
    assert message in str(error.value) and "\n" not in str(error.value)
