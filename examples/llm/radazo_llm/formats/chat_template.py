"""Chat templates, and the tokens that end a reply."""

from collections.abc import Callable
from pathlib import Path

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from radazo_llm.formats import gguf_file, gguf_model, gguf_tokenizer, tokenizers
from radazo_llm.formats.files import json_object, model_file


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


def conversation(folder: Path) -> Callable[[list[dict[str, str]]], str]:
    """Returns a function that makes one text of the turns of a chat.

    The template comes with the model, so it is rendered in a sandbox.

    Raises:
      ValueError: If the template cannot be rendered.
    """
    path = model_file(folder, "chat_template.jinja")
    config = model_file(folder, "tokenizer_config.json")
    if gguf_file.is_gguf(folder):
        names = gguf_tokenizer.config(gguf_model.read(folder))
    else:
        names = json_object(config) if config.is_file() else {}
    source = path.read_text("utf-8") if path.is_file() else names.get("chat_template")
    if not isinstance(source, str):
        return lambda turns: "\n".join(turn["content"] for turn in turns)
    special = {
        name: token.get("content") if isinstance(token, dict) else token
        for name in ("bos_token", "eos_token")
        if (token := names.get(name)) is not None
    }

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def render(turns: list[dict[str, str]]) -> str:
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        sandbox.globals["raise_exception"] = refuse
        try:
            return sandbox.from_string(source).render(
                messages=turns, add_generation_prompt=True, **special
            )
        except Exception as error:  # A template can divide by zero, say.
            raise ValueError(
                f"{folder}: the chat template cannot be rendered: "
                f"{' '.join(str(error).split()):.200}"
            ) from None

    return render
