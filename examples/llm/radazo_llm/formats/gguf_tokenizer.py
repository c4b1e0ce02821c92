"""Tokenizers in GGUF, made with the tokenizers library.

Two kinds are known: byte-level BPE ("gpt2"), whose way to split text has a name, and
SentencePiece's BPE ("llama"), whose merges follow from the scores of its pieces.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from radazo_llm.exits import reason
from radazo_llm.formats import gguf_splits
from radazo_llm.formats.gguf_file import File

_CONTROL, _USER_DEFINED = 3, 4  # Kinds of tokens.
_SPACE = "▁"
# Special tokens, as transformers and as llama.cpp name them.
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def tokenizer(file: File) -> Tokenizer:
    """Returns the tokenizer of a model.

    Raises:
      ValueError: If it is of another kind, or its lists do not fit together.
    """
    kind, add_bos = _get(file, "model"), _get(file, "add_bos_token")
    tokens, types = _texts(file, "tokens"), _get(file, "token_type")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] < len(tokens):
        rows = embedding.shape[0]
        expected = f"at most {rows} texts, the rows of token_embd.weight"
        raise _error(file, "tokens", expected, len(tokens))
    if len(set(tokens)) < len(tokens) or not _is_list_of(len(tokens), types, "i"):
        raise _error(
            file, "token_type", "a number for each of the tokens, all distinct"
        )
    if kind == "gpt2":
        made, begins = _byte_level(file, tokens)
    elif kind == "llama":
        made, begins = _sentence_piece(file, tokens), True
    else:
        raise _error(file, "model", "gpt2 or llama", kind)
    made.add_special_tokens(
        [
            AddedToken(tokens[i], special=True, normalized=False)
            for i in np.flatnonzero(types == _CONTROL)
        ]
    )
    made.add_tokens(
        [
            AddedToken(tokens[i], normalized=False)
            for i in np.flatnonzero(types == _USER_DEFINED)
        ]
    )
    bos = special(file, "bos")
    if bos is not None and (begins if add_bos is None else add_bos):
        made.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    return made


def config(file: File) -> dict[str, Any]:
    """Returns the entries of the model's `tokenizer_config.json`."""
    values = {"tokenizer_class": "PreTrainedTokenizerFast"}
    values |= {f"{name}_token": special(file, name) for name in SPECIAL}
    template = file.metadata.get("tokenizer.chat_template")
    values["chat_template"] = template if isinstance(template, str) else None
    return {name: value for name, value in values.items() if value is not None}


def special(file: File, name: str) -> str | None:
    """Returns the text of a special token, or None if the model has none."""
    key = SPECIAL.get(name, name)
    number, tokens = _get(file, f"{key}_token_id"), _texts(file, "tokens")
    if number is None:
        return None
    if type(number) is not int or number >= len(tokens):
        raise _error(file, f"{name}_token_id", "the number of a token", number)
    return tokens[number]


def _byte_level(file: File, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in gguf_splits.SPLITS:
        known = ", ".join(gguf_splits.SPLITS)
        raise _error(file, "pre", f"one of {known}", name)
    split = gguf_splits.SPLITS[name]
    merges = [tuple(line.split(" ")) for line in _texts(file, "merges")]
    made = _bpe(file, tokens, merges, ignore_merges=split.whole_tokens)
    made.pre_tokenizer = split.pre_tokenizer()
    if split.composed:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made, split.begins


def _sentence_piece(file: File, tokens: list[str]) -> Tokenizer:
    scores = _get(file, "scores")
    if not _is_list_of(len(tokens), scores, "f"):
        raise _error(file, "scores", "a number for each of the tokens")
    merges = sorted(
        _pairs(tokens), key=lambda pair: (-scores[pair[0]], pair[0], pair[1])
    )
    unknown = special(file, "unknown")
    made = _bpe(
        file,
        tokens,
        [(left, right) for _, _, left, right in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = _get(file, "add_space_prefix") is not False
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(parts)
    return made


def _pairs(tokens: list[str]) -> Iterator[tuple[int, int, str, str]]:
    """Yields the ways to make tokens of two: their numbers, and the two parts."""
    numbers = {token: i for i, token in enumerate(tokens)}
    for i, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in numbers and right in numbers:
                yield i, numbers[left], left, right


def _bpe(file: File, tokens: list[str], merges: list[Any], **options: Any) -> Tokenizer:
    try:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # The library raises nothing narrower.
        raise _error(file, "merges", f"pairs of tokens: {reason(error)}") from None


def _get(file: File, name: str) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{name}")


def _texts(file: File, name: str) -> list[str]:
    found = _get(file, name)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise _error(file, name, "a list of texts")
    return found


def _is_list_of(number: int, found: Any, kind: str) -> bool:
    array = isinstance(found, np.ndarray) and found.dtype.kind == kind
    return array and len(found) == number


def _error(file: File, name: str, expected: str, *got: Any) -> ValueError:
    rest = f"; got {got[0]!r:.80}" if got else ""
    return ValueError(f"{file.path}: tokenizer.ggml.{name} must be {expected}{rest}.")
