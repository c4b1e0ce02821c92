"""A row's prompt, and what may follow it: the forms of data that a model is tuned on.

| Columns | A prompt, and what may follow |
|---|---|
| `prompt`, `completion` | the completion |
| `messages` | the last reply, after the turns before it |
| `text`, `label` | a word for each class |
| `prompt`, `candidates`, `answer` | each candidate |
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from radazo_llm.examples.files import Row
from radazo_llm.examples.tokens import Example
from radazo_llm.formats import chat_template
from radazo_llm.settings import Settings

FORMS = {
    "messages": ("messages",),
    "choice": ("prompt", "candidates", "answer"),
    "completion": ("prompt", "completion"),
    "label": ("text", "label"),
}
_PROMPT = ("prompt",)  # Enough for text that a model writes.
_ROLES = ("system", "user", "assistant")
MOST_CLASSES = 100
_TEXT = "{text}"
# Texts that tables hold if there is no label.
_NO_LABELS = ("", "nan", "none", "null", "<na>")
_PUNCTUATION = ".,:;?!"  # A space follows it.
Turn = dict[str, str]


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
    """

    place: str
    turns: tuple[Turn, ...]
    prompt: str
    candidates: tuple[str, ...]
    label: int
    columns: Mapping[str, Any]
    is_chat: bool = False


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
    turns = _parsed(row.values["messages"])
    valid = isinstance(turns, list) and all(
        isinstance(turn, dict)
        and turn.get("role") in _ROLES
        and isinstance(turn.get("content"), str)
        and turn["content"].strip()
        for turn in turns
    )
    if not valid or len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise ValueError(
            f"{row.place}: messages must be a list of objects with role (one of "
            f"{', '.join(_ROLES)}) and content, and end with a reply of the assistant; "
            f"got {turns!r:.80}."
        )
    plain = [{name: turn[name] for name in ("role", "content")} for turn in turns]
    *before, last = plain
    return Item(row.place, tuple(before), "", (last["content"],), 0, row.values)


# --- Texts ------------------------------------------------------------------------


def examples(
    items: Sequence[Item],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    all_turns: bool = False,
) -> tuple[list[Example], bool]:
    """The texts of some items of one form, for a model.

    A conversation is rendered by the model's chat template. A completion and a reply
    end with a token that ends the model's texts.

    Args:
      items: The items.
      folder: The model's folder or file.
      tokenizer: The model's.
      all_turns: Whether all replies of a conversation are scored, and not the last.

    Returns:
      The examples, and whether the tokenizer must add its special tokens.

    Raises:
      ValueError: If the template cannot render them, or renders a conversation other
        than as a continuation of its prompt.
    """
    ends = _end_texts(chat_template.ends(folder, tokenizer), tokenizer)
    if items and items[0].turns:
        return _rendered(items, folder, ends, all_turns)
    return [_joined(item, ends) for item in items], True


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
    items: Sequence[Item], folder: Path, ends: Sequence[str], all_turns: bool
) -> tuple[list[Example], bool]:
    render = chat_template.conversation(folder)
    prompts = render([list(item.turns) for item in items])
    # A template has special tokens itself.
    plain = "\n".join(turn["content"] for turn in items[0].turns) == prompts[0]
    if plain and items[0].is_chat:
        raise ValueError(f"--chat must be given with a model for chats; got {folder}.")
    pairs = list(zip(items, prompts, strict=True))
    if len(items[0].candidates) != 1:
        return [
            Example(prompt, tuple(map(str.strip, x.candidates)), x.label, x.place)
            for x, prompt in pairs
        ], plain
    # Each reply that is scored, as the row, the turns up to it, and its text.
    asked = []
    for row, item in enumerate(items):
        turns = [*item.turns, {"role": "assistant", "content": item.candidates[0]}]
        first = 0 if all_turns else len(turns) - 1
        asked += [
            (row, turns[: k + 1])
            for k in range(first, len(turns))
            if turns[k]["role"] == "assistant"
        ]
    before = render([turns[:-1] for _, turns in asked])
    after = render([turns for _, turns in asked])
    found: list[Example] = []
    for (row, turns), prompt, text in zip(asked, before, after, strict=True):
        reply = _reply(items[row].place, turns[-1], prompt, text, ends)
        span = len(prompt), len(prompt) + len(reply)
        if len(found) == row:
            found.append(Example(prompt, (reply,), 0, items[row].place, (span,)))
            continue
        # Another reply of the conversation: the text is extended to its end.
        whole, last = prompt + reply, found[row]
        if not whole.startswith(last.prompt + last.candidates[0]):
            raise ValueError(_other_text(last.place))
        rest = whole[len(last.prompt) :]
        found[row] = last._replace(candidates=(rest,), spans=(*last.spans, span))
    if not all_turns:  # Its tokens follow the prompt.
        found = [example._replace(spans=()) for example in found]
    return found, plain


def _reply(place: str, turn: Turn, prompt: str, whole: str, ends: Sequence[str]) -> str:
    """The reply as the template renders it, up to the token that ends it."""
    rest = whole.removeprefix(prompt)
    content = turn["content"].strip()
    at = rest.find(content)
    if len(rest) == len(whole) or at < 0:
        raise ValueError(_other_text(place))
    after = at + len(content)
    found = [x + len(end) for end in ends if (x := rest.find(end, after)) >= 0]
    return rest[: min(found)] if found else rest[:after] + "".join(ends[:1])


def _other_text(place: str) -> str:
    return (
        f"{place}: the model's chat template must render a conversation as its prompt "
        "and the reply; it does not. Give prompt + completion, or leave out "
        "--all-turns."
    )


def _end_texts(tokens: set[int], tokenizer: Tokenizer) -> list[str]:
    """The texts of the tokens that end a text, the base model's first."""
    found = [tokenizer.id_to_token(token) for token in sorted(tokens)]
    return [text for text in found if text]
