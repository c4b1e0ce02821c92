"""Chat templates, and the tokens that end a reply."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
Turn = dict[str, str]


def ends(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text."""
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


def conversation(folder: Path) -> Callable[[Sequence[list[Turn]]], list[str]]:
    """Returns a function that makes a text of the turns of each chat.

    The function raises a ValueError if the template cannot be rendered, or takes too
    much memory or time.
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
    if not isinstance(source, str):
        return lambda chats: [
            "\n".join(turn["content"] for turn in turns) for turns in chats
        ]
    special = {
        name: token.get("content") if isinstance(token, dict) else token
        for name in SPECIAL
        if (token := names.get(name)) is not None
    }

    def render(chats: Sequence[list[Turn]]) -> list[str]:
        given = {"source": source, "chats": list(chats), "special": special}
        try:
            return _rendered(json.dumps(given), SECONDS + 0.01 * len(chats))
        except ValueError as error:
            raise ValueError(
                f"{folder}: the chat template cannot be rendered: {error}"
            ) from None

    return render


def _rendered(given: str, seconds: float) -> list[str]:
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
