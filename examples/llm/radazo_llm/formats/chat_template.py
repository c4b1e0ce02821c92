"""Chat templates, and the tokens that end a reply."""

import dataclasses
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from radazo_llm.formats import (
    gguf_file,
    gguf_model,
    gguf_tokenizer,
    template_process,
    tokenizers,
)
from radazo_llm.formats.files import json_object, model_file

# The special tokens that a template may name.
SPECIAL = [f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
SECONDS = 30.0  # In which a template must be rendered, on a busy machine too.
_PART = 1 << 23  # Characters of JSON that a process gets.
# Conditions by which Qwen 3 leaves out the reasoning of earlier replies. To train on
# all replies, each is rendered with it, empty or not, as TRL does.
_LATEST = re.compile(
    r"loop\.index0 > ns\.last_query_index"
    r"|loop\.last or \(not loop\.last and reasoning_content\)"
)
_PROBE = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
Turn = dict[str, Any]


class Chat(NamedTuple):
    """A conversation to render.

    Attributes:
      messages: The turns.
      tools: The tools that the model may call.
      add_generation_prompt: Whether the begin of the next reply follows.
    """

    messages: Sequence[Turn]
    tools: Any = None
    add_generation_prompt: bool = True


class Text(NamedTuple):
    """A conversation as text.

    Attributes:
      text: The text.
      replies: The parts that the template marks by `{% generation %}`.
    """

    text: str
    replies: Sequence[Sequence[int]] = ()


@dataclasses.dataclass(frozen=True)
class Template:
    """The chat template of a model.

    Attributes:
      folder: The model's folder or file.
      source: The template; None if the model has none.
      special: The special tokens by name.
      now: The date and the time that it may name, in the format of ISO 8601.
    """

    folder: Path
    source: str | None
    special: dict[str, Any]
    now: str

    def render(self, chats: Sequence[Chat], *, all_replies: bool = False) -> list[Text]:
        """Renders chats as transformers does; without a template, in plain lines.

        Args:
          chats: The chats.
          all_replies: Whether earlier replies keep their reasoning, as the last one.

        Raises:
          ValueError: If the template cannot be rendered, or takes too much memory or
            time.
        """
        if self.source is None:
            return [Text(_lines(chat.messages)) for chat in chats]
        source = _LATEST.sub("true", self.source) if all_replies else self.source
        given = {"source": source, "special": self.special, "now": self.now}
        found = []
        try:
            for part in _parts(chats):
                asked = given | {"chats": [chat._asdict() for chat in part]}
                found += _rendered(json.dumps(asked), SECONDS + 0.01 * len(part))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.folder}: the chat template cannot be rendered: {error}"
            ) from None
        return [Text(*each) for each in found]


def load(folder: Path, now: str | None = None) -> Template:
    """The chat template of a model.

    Args:
      folder: Its folder or file.
      now: The date and the time that the template may name; by default the present.
    """
    path = model_file(folder, "chat_template.jinja")
    config = model_file(folder, "tokenizer_config.json")
    if gguf_file.is_gguf(folder):
        names = gguf_tokenizer.config(gguf_model.read(folder))
    else:
        names = json_object(config) if config.is_file() else {}
    source = path.read_text("utf-8") if path.is_file() else names.get("chat_template")
    if isinstance(source, list):  # Several of them, by name.
        named = {one.get("name"): one for one in source if isinstance(one, dict)}
        source = named.get("default", {}).get("template")
    special = {
        name: token.get("content") if isinstance(token, dict) else token
        for name in SPECIAL
        if (token := names.get(name)) is not None
    }
    known = source if isinstance(source, str) else None
    return Template(folder, known, special, now or present())


def present() -> str:
    """The present date and time, in the format of ISO 8601."""
    return datetime.datetime.now().isoformat(timespec="seconds")


def ends(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text, by the configuration and by the chat template."""
    found = of_config(folder, tokenizer)
    try:
        [probe] = load(folder).render([Chat(_PROBE, add_generation_prompt=False)])
    except ValueError:
        return found  # Whoever renders with the template reports it.
    last = special_end(probe.text, special_texts(tokenizer))
    return found | ({tokenizer.token_to_id(last)} - {None})


def of_config(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text by the configuration."""
    if gguf_file.is_gguf(folder):
        return set(gguf_model.config(gguf_model.read(folder))["eos_token_id"])
    found = {tokenizer.token_to_id(tokenizers.BOS)}  # OPT's, which is its end as well.
    for name in ("config.json", "generation_config.json"):
        path = model_file(folder, name)
        if path.is_file():
            ids = json_object(path).get("eos_token_id")
            ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
            if any(type(token) is not int for token in ids):
                raise ValueError(f"{path}: eos_token_id must be ids; got {ids!r:.80}.")
            found |= set(ids)
    return found - {None}


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The texts of the special tokens, longer ones first."""
    added = tokenizer.get_added_tokens_decoder().values()
    found = [token.content for token in added if token.special and token.content]
    return tuple(sorted(found, key=len, reverse=True))


def special_end(text: str, special: Sequence[str]) -> str:
    """The special token by which a text ends, or ""."""
    text = text.rstrip()
    return next((token for token in special if text.endswith(token)), "")


def _lines(turns: Sequence[Turn]) -> str:
    texts = [turn.get("content") for turn in turns]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            "--model must have a chat template for messages with tool_calls; it has "
            "none."
        )
    return "\n".join(texts)


def _parts(chats: Sequence[Chat]) -> Iterator[list[Chat]]:
    """Yields chats that fit together into the memory of a process."""
    part, size = list[Chat](), 0
    for chat in chats:
        length = len(json.dumps(chat))
        if part and size + length > _PART:
            yield part
            part, size = [], 0
        part.append(chat)
        size += length
    yield part


def _rendered(given: str, seconds: float) -> list[Any]:
    """The texts from another process, which may take so long."""
    # Some modules of its folder have the names of libraries.
    command = [sys.executable, "-P", template_process.__file__]
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, encoding="utf-8", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes more than {seconds:g} s") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ValueError(f"its process ended with {done.returncode}") from None
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["texts"]
