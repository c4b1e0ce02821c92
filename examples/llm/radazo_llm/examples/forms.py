"""A row's prompt, and what may follow it: the forms of data that a model is tuned on.

| Columns | A prompt, and what may follow |
|---|---|
| `prompt`, `completion` | the completion |
| `messages`, and `tools` if there are any | the last reply, after the turns before it |
| `text`, `label` | a word for each class |
| `prompt`, `candidates`, `answer` | each candidate |
| `prompt`, `chosen`, `rejected` | both of them |
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from radazo_llm.examples.files import Row
from radazo_llm.examples.replies import Asked, spans
from radazo_llm.examples.tokens import Example
from radazo_llm.formats import chat_template
from radazo_llm.formats.chat_template import Chat, Turn
from radazo_llm.settings import Settings

FORMS = {
    "messages": ("messages",),
    "choice": ("prompt", "candidates", "answer"),
    "preference": ("prompt", "chosen", "rejected"),
    "completion": ("prompt", "completion"),
    "label": ("text", "label"),
}
_PROMPT = ("prompt",)  # Enough for text that a model writes.
_ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_CLASSES = 100
_TEXT = "{text}"
# Texts that tables hold if there is no label.
_NO_LABELS = ("", "nan", "none", "null", "<na>")
_PUNCTUATION = ".,:;?!"  # A space follows it.
_REASONING = "reasoning_content", "thinking"


class Item(NamedTuple):
    """A row as a prompt and what may follow it.

    Attributes:
      place: The file and the line, for messages.
      turns: The turns of a conversation before the reply; () for plain text.
      prompt: The plain text; "" for a conversation.
      candidates: The texts that may follow, () if there are none.
      label: The place of the right candidate.
      columns: The values of the row.
      is_chat: Whether a plain prompt was made the turn of a user.
      reply: The turn of the reply, in a conversation.
      tools: The tools that the model may call, in a conversation.
    """

    place: str
    turns: tuple[Turn, ...]
    prompt: str
    candidates: tuple[str, ...]
    label: int
    columns: Mapping[str, Any]
    is_chat: bool = False
    reply: Turn | None = None
    tools: Any = None


def check(settings: Settings) -> None:
    """Raises a ValueError if the rules by which rows become prompts are not valid."""
    if _TEXT not in settings.template:
        raise ValueError(
            f"--template must contain {_TEXT}; got {settings.template!r:.80}."
        )
    words_of(settings)


def words_of(settings: Settings) -> dict[str, str]:
    """The word of each value of the column `label`, as `--labels` says."""
    labels, found = settings.labels, dict[str, str]()
    for part in filter(None, labels.split(",")):
        word, _, value = part.rpartition("=")
        value, word = value.strip(), (word or value).strip()
        if not word or not value or value in found or word in found.values():
            raise ValueError(
                "--labels must be WORD=VALUE for each class, all different, such as "
                f"great=1,terrible=0; got {labels!r:.80}."
            )
        found[value] = word
    if labels and len(found) < 2:
        raise ValueError(f"--labels must have two words; got {labels!r:.80}.")
    return found


def form_of(row: Row, *, written: bool = False) -> str:
    """The form of a file, by the columns of its first row.

    Args:
      row: The row.
      written: Whether the model's own text is scored, so that a prompt is enough.

    Raises:
      ValueError: If no form has these columns.
    """
    for form, columns in FORMS.items():
        if row.values.keys() >= set(columns):
            return form
    if written and "prompt" in row.values:
        return "prompt"
    forms = [" + ".join(columns) for columns in FORMS.values()]
    if written:
        forms.append("prompt")
    raise ValueError(
        f"{row.place}: must have the columns {', or '.join(forms)}; got "
        f"{', '.join(map(str, row.values)) or 'none'!s:.200}. Rename the columns."
    )


def classes(values: Sequence[str], settings: Settings) -> dict[str, str]:
    """The word of each class, by the values of a file if the settings name none."""
    return words_of(settings) or {value: value for value in sorted(values)}


def value_of(row: Row, words: Mapping[str, str]) -> str:
    """The class of a row, which is one of `words` unless these are empty."""
    value = row.values["label"]
    found = str(value).strip()
    valid = isinstance(value, str | int) and found.lower() not in _NO_LABELS
    if not valid or (words and found not in words):
        expected = f"one of {', '.join(words)}" if words else "a text or an integer"
        raise ValueError(
            f"{row.place}: label must be {expected:.200}; got {value!r:.80}. Correct "
            "the row, or give --labels."
        )
    return found


def check_classes(found: set[str]) -> None:
    """Raises a ValueError if there are too few or too many classes."""
    if not 2 <= len(found) <= MOST_CLASSES:
        some = ", ".join(sorted(found)[:3])
        count = "more" if len(found) > MOST_CLASSES else len(found)
        raise ValueError(
            f"label must have 2 to {MOST_CLASSES} values; got {count}: {some!s:.80}. "
            "Use prompt + completion for free text."
        )


def item(row: Row, form: str, settings: Settings, words: Mapping[str, str]) -> Item:
    """The prompt of a row, and what may follow it.

    Args:
      row: The row.
      form: The form of its file.
      settings: The rules.
      words: The word of each class, if the form is "label".

    Raises:
      ValueError: If a column is missing or has no valid value; it names the line.
    """
    columns = FORMS.get(form, _PROMPT)
    missing = [name for name in columns if name not in row.values]
    if missing:
        raise ValueError(
            f"{row.place}: must have {', '.join(columns)}, as the first row; got no "
            f"{missing[0]}."
        )
    if form == "messages":
        return _conversation(row)
    if form == "label":
        value = value_of(row, words)
        prompt = settings.template.replace(r"\n", "\n").replace(
            _TEXT, _text(row, "text")
        )
        found = tuple(words.values()), list(words).index(value)
    elif form == "choice":
        prompt, found = _text(row, "prompt"), _choice(row)
    elif form == "preference":
        if isinstance(_parsed(row.values["prompt"]), list):
            return _preferred(row)
        prompt = _text(row, "prompt")
        found = (_text(row, "chosen"), _text(row, "rejected")), 0
    else:
        prompt = _text(row, "prompt")
        completion = form == "completion"
        found = ((_text(row, "completion"),) if completion else ()), 0
    turns = ({"role": "user", "content": prompt},) if settings.chat else ()
    plain = "" if turns else prompt
    return Item(row.place, turns, plain, *found, row.values, settings.chat)


def _text(row: Row, name: str) -> str:
    value = row.values[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{row.place}: {name} must be a text that is not empty; got {value!r:.80}."
        )
    return value


def _choice(row: Row) -> tuple[tuple[str, ...], int]:
    given, answer = _parsed(row.values["candidates"]), row.values["answer"]
    valid = isinstance(given, list) and len(given) > 1 and len(set(map(str, given)))
    if not valid or not all(isinstance(x, str) and x.strip() for x in given):
        raise ValueError(
            f"{row.place}: candidates must be a list of two texts or more (in a table, "
            f"as JSON); got {given!r:.80}."
        )
    if answer in given:
        return tuple(given), given.index(answer)
    number = str(answer)
    if number.isdecimal() and int(number[:9]) < len(given):
        return tuple(given), int(number)
    raise ValueError(
        f"{row.place}: answer must be one of the candidates, or its place from 0; got "
        f"{answer!r:.80}."
    )


def _parsed(value: Any) -> Any:
    """A list in the cell of a table, as JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _conversation(row: Row) -> Item:
    *before, last = _turns(row, "messages", reply=True)
    tools = _parsed(row.values.get("tools") or None)
    if not isinstance(tools, list | None):
        raise ValueError(f"{row.place}: tools must be a list; got {tools!r:.80}.")
    found = (last.get("content") or "",), 0, row.values
    return Item(row.place, tuple(before), "", *found, reply=last, tools=tools)


def _preferred(row: Row) -> Item:
    """A conversation with a better and a worse reply, each a list of one turn."""
    before = _turns(row, "prompt", reply=False)
    found = [_turns(row, name, reply=True) for name in ("chosen", "rejected")]
    if any(len(turns) != 1 or not turns[0].get("content") for turns in found):
        raise ValueError(
            f"{row.place}: chosen and rejected must each be a list of one reply with "
            f"text, as prompt is a list; got {row.values['chosen']!r:.80}."
        )
    texts = tuple(turns[0]["content"] for turns in found)
    return Item(row.place, tuple(before), "", texts, 0, row.values)


def _turns(row: Row, name: str, *, reply: bool) -> list[Turn]:
    """The turns of a conversation, of which a reply is the last, or is not.

    Entries that are null are left out: a table has them for keys of other rows.
    """
    turns = _parsed(row.values[name])
    valid = isinstance(turns, list) and all(map(_is_turn, turns))
    ends = valid and bool(turns) and (turns[-1]["role"] == "assistant") == reply
    if not ends or (name == "messages" and len(turns) < 2):
        kind = "with" if reply else "without"
        raise ValueError(
            f"{row.place}: {name} must be a list of objects with role (one of "
            f"{', '.join(_ROLES)}) and content, and end {kind} a reply of the "
            f"assistant; got {turns!r:.80}."
        )
    return [
        {k: v for k, v in turn.items() if v is not None or k == "content"}
        for turn in turns
    ]


def _is_turn(turn: Any) -> bool:
    """Whether it has a role and text; a reply may have calls instead of text."""
    if not isinstance(turn, dict) or turn.get("role") not in _ROLES:
        return False
    content, calls = turn.get("content"), turn.get("tool_calls")
    if turn["role"] == "tool":
        return isinstance(content, str)
    if turn["role"] == "assistant" and isinstance(calls, list) and calls:
        return content is None or isinstance(content, str)
    return not calls and isinstance(content, str) and bool(content.strip())


# --- Texts ------------------------------------------------------------------------


class Texts(NamedTuple):
    """The texts of some items.

    Attributes:
      examples: The texts.
      special: Whether the tokenizer must add its special tokens.
      notes: Lines on what a template leaves out.
    """

    examples: list[Example]
    special: bool = True
    notes: Sequence[str] = ()


def examples(
    items: Sequence[Item],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    all_turns: bool = False,
    now: str | None = None,
) -> Texts:
    """The texts of some items of one form, for a model.

    A conversation is rendered by the model's chat template. A completion ends with a
    token that ends the model's texts, and a reply as the template ends it.

    Args:
      items: The items.
      folder: The model's folder or file.
      tokenizer: The model's.
      all_turns: Whether all replies of a conversation are scored, and not the last.
      now: The date and the time that a template may name; by default the present.

    Raises:
      ValueError: If the template cannot render them, or the reply cannot be found in
        what it renders.
    """
    if items and items[0].turns:
        return _rendered(items, folder, tokenizer, all_turns, now)
    ends = _texts_of(chat_template.of_config(folder, tokenizer), tokenizer)
    return Texts([_joined(item, ends) for item in items])


def _joined(item: Item, ends: Sequence[str]) -> Example:
    """Plain texts. White space between a prompt and what follows goes to the latter."""
    prompt = item.prompt.rstrip()
    between = item.prompt[len(prompt) :]
    found = [_space(prompt, between, text) + text for text in item.candidates]
    if len(found) == 1 and ends and not found[0].endswith(tuple(ends)):
        found = [found[0] + ends[0]]
    return Example(prompt, tuple(found), item.label, item.place)


def _space(prompt: str, between: str, text: str) -> str:
    """The white space between two texts; words are kept apart."""
    words = prompt[-1:].isalnum() or prompt[-1:] in _PUNCTUATION
    starts = text[0].isascii() and text[0].isalnum()
    return between or (" " if words and starts else "")


def _rendered(
    items: Sequence[Item],
    folder: Path,
    tokenizer: Tokenizer,
    all_turns: bool,
    now: str | None,
) -> Texts:
    template = chat_template.load(folder, now)
    plain = template.source is None  # A template has special tokens itself.
    if plain and items[0].is_chat:
        raise ValueError(f"--chat must be given with a model for chats; got {folder}.")
    if len(items[0].candidates) != 1:
        found = template.render([Chat(item.turns, item.tools) for item in items])
        return Texts(
            [
                Example(text, tuple(map(str.strip, x.candidates)), x.label, x.place)
                for x, (text, _) in zip(items, found, strict=True)
            ],
            plain,
        )
    ends = _texts_of(chat_template.ends(folder, tokenizer), tokenizer)
    asked = [
        Asked(
            item.place,
            [*item.turns, item.reply or _reply(item.candidates[0])],
            item.tools,
        )
        for item in items
    ]
    special = chat_template.special_texts(tokenizer)
    made, dropped = [], 0
    for one, (text, parts) in zip(
        asked, spans(template, asked, ends, special, all_turns), strict=True
    ):
        (begin, _), end = parts[0], parts[-1][1]
        whole = len(parts) > 1 or all_turns
        example = Example(text[:begin], (text[begin:end],), 0, one.place)
        made.append(example._replace(spans=tuple(parts)) if whole else example)
        dropped += _leaves_out(one.turns[-1], text[begin:end])
    note = (
        f"The chat template leaves out the reasoning of {dropped:,} of {len(items):,} "
        "replies."
    )
    return Texts(made, plain, [note] if dropped else [])


def _reply(content: str) -> Turn:
    return {"role": "assistant", "content": content}


def _leaves_out(turn: Turn, text: str) -> bool:
    """Whether a reply has reasoning that its text lacks."""
    inline = (turn.get("content") or "").rpartition("</think>")[0]
    found = [inline.rpartition("<think>")[2], *(turn.get(k) for k in _REASONING)]
    some = [each.strip() for each in found if isinstance(each, str) and each.strip()]
    return bool(some) and not any(each in text for each in some)


def _texts_of(tokens: set[int], tokenizer: Tokenizer) -> list[str]:
    """The texts of the tokens that end a text, the base model's first."""
    found = [tokenizer.id_to_token(token) for token in sorted(tokens)]
    return [text for text in found if text]
