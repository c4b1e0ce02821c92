"""Tokenizers of models, as `tokenizers` reads them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from radazo_llm.exits import reason
from radazo_llm.formats import gguf_file, gguf_model, gguf_tokenizer
from radazo_llm.formats.files import json_object, model_file

BOS = "</s>"  # The first token of every sequence, in OPT.
PAD = "<pad>"
OPT = "opt"  # As `config.json` names it.


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    OPT's puts `</s>` first, which its file does not say; the files of others describe
    their own special tokens.

    Args:
      folder: Holds `tokenizer.json`, or `vocab.json` and `merges.txt`; or a GGUF file.
    """
    if gguf_file.is_gguf(folder):
        return gguf_tokenizer.tokenizer(gguf_model.read(folder))
    names = "tokenizer.json", "vocab.json", "merges.txt"
    whole, *parts = (model_file(folder, name) for name in names)
    try:
        if whole.is_file():
            tokenizer = Tokenizer.from_file(str(whole))
        else:
            tokenizer = byte_level(models.BPE.from_file(*map(str, parts)))
    except BaseException as error:
        # The library raises Exception itself and, if it panics, another class.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(
            f"{folder} must have tokenizer.json, or vocab.json and merges.txt, that "
            f"can be read: {reason(error)}"
        ) from None
    tokenizer.no_truncation()  # The file may have either switched on.
    tokenizer.no_padding()
    return start_with_bos(tokenizer, folder) if _is_opt(folder) else tokenizer


def _is_opt(folder: Path) -> bool:
    config = model_file(folder, "config.json")
    return not config.is_file() or json_object(config).get("model_type") == OPT


def byte_level(model: models.BPE) -> Tokenizer:
    """GPT-2's way to split text, which is OPT's too."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def start_with_bos(tokenizer: Tokenizer, source: Path | str) -> Tokenizer:
    """Makes `</s>` and padding special, and puts `</s>` first and nothing last."""
    for name in (BOS, PAD):
        if tokenizer.token_to_id(name) is None:
            raise ValueError(f"{source}: the tokenizer must have the token {name!r}")
    tokenizer.add_special_tokens([BOS, PAD])
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[bos]
    )
    return tokenizer
