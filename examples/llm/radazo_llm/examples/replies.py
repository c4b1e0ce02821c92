"""The replies in what a chat template renders.

If a template marks replies by `{% generation %}`, its marks count. Otherwise a reply
begins at the end of the prompt that the template makes for the model. If that prompt
goes further than the conversation does (some open `<think>`), the reply begins at the
first difference between both.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from radazo_llm.formats.chat_template import (
    Chat,
    Template,
    Text,
    Turn,
    special_end,
)

Span = tuple[int, int]
_OTHER = {"role": "assistant", "content": "~"}  # A reply without reasoning.


class Asked(NamedTuple):
    """A conversation whose replies are scored.

    Attributes:
      place: The file and the line, for messages.
      turns: The turns, of which a reply is the last.
      tools: The tools that the model may call.
    """

    place: str
    turns: Sequence[Turn]
    tools: Any


class _Reply(NamedTuple):
    """A reply, and what the template renders around it.

    Attributes:
      turn: The reply.
      prompt: The turns before it, and the begin of a reply.
      base: The turns before it.
      other: The turns before it, and another reply.
      last: The conversation up to it.
    """

    turn: Turn
    prompt: str
    base: str
    other: str
    last: str


def spans(
    template: Template,
    asked: Sequence[Asked],
    ends: Sequence[str],
    special: Sequence[str],
    all_turns: bool,
) -> list[tuple[str, list[Span]]]:
    """The text of each conversation, and the places of the replies that are scored.

    Args:
      template: The template.
      asked: The conversations.
      ends: The texts of the tokens that end a reply.
      special: The texts of all special tokens.
      all_turns: Whether all replies are scored, and not the last.

    Raises:
      ValueError: If a reply cannot be found.
    """
    chats, places = [], []
    for each in asked:
        numbers = [
            k
            for k, turn in enumerate(each.turns)
            if turn["role"] == "assistant" and (all_turns or k == len(each.turns) - 1)
        ]
        places.append(numbers)
        chats.append(Chat(each.turns, each.tools, False))
        for k in numbers:
            before = each.turns[:k]
            chats += [
                Chat(before, each.tools),
                Chat(before, each.tools, False),
                Chat([*before, _OTHER], each.tools, False),
                Chat(each.turns[: k + 1], each.tools, False),
            ]
    texts = iter(template.render(chats, all_replies=all_turns))
    found = []
    for each, numbers in zip(asked, places, strict=True):
        whole = next(texts)
        replies = [
            _Reply(each.turns[k], *(next(texts).text for _ in range(4)))
            for k in numbers
        ]
        try:
            found.append(_found(whole, replies, ends, special))
            _check_tools(each, whole.text)
        except ValueError as error:
            raise ValueError(
                f"{each.place}: the model's chat template must render a conversation "
                f"as prompts and replies; {error}. Give prompt + completion, or "
                "another model."
            ) from None
    return found


def _found(
    whole: Text, replies: Sequence[_Reply], ends: Sequence[str], special: Sequence[str]
) -> tuple[str, list[Span]]:
    text = whole.text
    if whole.replies:
        first = _common(replies[0].base, replies[0].prompt)
        marked = [(a, b) for a, b in whole.replies if a >= first and a < b]
        if not marked:
            raise ValueError("it marks no reply by {% generation %}")
        return text, marked
    begins = [_begin(text, reply) for reply in replies]
    stops = [*begins[1:], len(text)]
    found = []
    for reply, begin, stop in zip(replies, begins, stops, strict=True):
        end = _end(text, begin, stop, reply, ends, special)
        if end is None and stop < len(text):
            raise ValueError("it does not end a reply before the next turn")
        if end is None:  # As a text without a template ends.
            text = text.rstrip() + "".join(ends[:1])
            end = len(text)
        found.append((begin, end))
    return text, found


def _begin(whole: str, reply: _Reply) -> int:
    """Returns the place at which a reply begins in a conversation."""
    if whole.startswith(reply.prompt):
        return len(reply.prompt)
    begin = _common(whole, reply.prompt, reply.other)
    if begin < _common(reply.base, reply.prompt):
        raise ValueError("it renders turns another way if a reply follows")
    return begin


def _common(*texts: str) -> int:
    """The number of characters by which all texts begin alike."""
    columns = enumerate(zip(*texts, strict=False))
    return next((i for i, x in columns if len(set(x)) > 1), min(map(len, texts)))


def _end(
    whole: str,
    begin: int,
    stop: int,
    reply: _Reply,
    ends: Sequence[str],
    special: Sequence[str],
) -> int | None:
    """Returns the place after the token that ends a reply; None without one."""
    content = (reply.turn.get("content") or "").strip()
    calls = reply.turn.get("tool_calls")
    at = whole.find(content, begin, stop)
    if at < 0:  # Without the reasoning.
        content = content.rpartition("</think>")[2].strip()
        at = whole.find(content, begin, stop)
    if at < 0:
        raise ValueError("it does not render the content of a reply as it is")
    after = at + len(content)
    for call in calls or ():  # After the text, or before it.
        after = max(after, whole.find(_name(call), begin, stop) + 1)
    places = [(whole.find(end, after, stop), end) for end in ends]
    if found := [place + len(end) for place, end in places if place >= 0]:
        return min(found)
    # The end of the conversation up to it, and the same before another token: some
    # templates end the last reply by one of its own, or put one after the end.
    last = reply.last.rstrip()
    cut = len(last) - len(special_end(last, special))
    before = last[:cut].rstrip()
    if cut < len(last) and whole.startswith(last):
        return len(last)
    if special_end(before, special) and whole.startswith(before):
        return len(before)
    found = [token for token in special if whole.startswith(token, cut)]
    return cut + len(found[0]) if found and whole.startswith(last[:cut]) else None


def _check_tools(asked: Asked, text: str) -> None:
    """Raises a ValueError if the template leaves out tools or calls of them."""
    for turn in asked.turns:
        text = text.replace((turn.get("content") or "").strip() or "\0", "", 1)
    calls = [call for turn in asked.turns for call in turn.get("tool_calls") or ()]
    names = Counter(map(_name, [*(asked.tools or ()), *calls]))
    for name, number in names.items():
        if text.count(name) < number:
            raise ValueError(f"it leaves out tools or tool_calls named {name:.80}")


def _name(tool: Any) -> str:
    """The name of a tool, or of the tool that is called."""
    about = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = about.get("name") if isinstance(about, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"tools and tool_calls must have names; got {json.dumps(tool)[:80]}"
        )
    return name
