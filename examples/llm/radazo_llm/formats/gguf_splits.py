"""Ways to split text before byte-level BPE, by llama.cpp's names for them.

A GGUF file has no pattern, but a name in `tokenizer.ggml.pre`, which llama.cpp's
`llama-vocab.cpp` lists. The patterns are as in the `tokenizer.json` of the models.
llama.cpp approximates some of them.
"""

from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import (
    ByteLevel,
    Digits,
    PreTokenizer,
    Sequence,
    Split,
)


class Splits(NamedTuple):
    """A way to split text, and what comes with it.

    Attributes:
      patterns: Regular expressions, each applied to the pieces that the last one left.
        Without any, text is split as for GPT-2.
      digits: Whether each digit is split off before GPT-2's pattern.
      whole_tokens: Whether a piece that is a token is not merged from its bytes.
      begins: Whether a text begins with a special token if the file does not say so.
      composed: Whether characters are composed first (NFC).
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    whole_tokens: bool = False
    begins: bool = False
    composed: bool = False

    def pre_tokenizer(self) -> PreTokenizer:
        if not self.patterns:
            level = ByteLevel(add_prefix_space=False)
            digits = Digits(individual_digits=True)
            return Sequence([digits, level]) if self.digits else level
        splits = [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        level = ByteLevel(add_prefix_space=False, use_regex=False)
        return Sequence([*splits, level])


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# A word with one character before it, numbers of some digits, punctuation, spaces.
_WORDS = (
    _SUFFIX
    + r"|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+|\p{{N}}{digits}"
    + r"| ?[^\s{letter}\p{{N}}]+[\r\n]*|"
    + _SPACES
)
# Words are split before a capital letter that follows a small one.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}"
    r"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}"
    r"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
) + _SPACES


def _words(digits: str, letter: str = r"\p{L}") -> tuple[str, ...]:
    return (_WORDS.format(letter=letter, digits=digits),)


def _cased(digits: str, suffix: str) -> tuple[str, ...]:
    cased = _CASED.format(upper=_UPPER, lower=_LOWER, digits=digits, suffix=suffix)
    return (cased,)


# Numbers of up to three digits, and the characters of Chinese and Japanese, first.
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)
# Of files that name no way: punctuation, GPT-2's pattern, numbers by three digits.
_DEFAULT = (
    r"[\p{P}$+<=>^~|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\p{N}+",
    r"[0-9]{3}",
)
_GPT_2, _DIGITS = Splits(), Splits(digits=True)
_LLAMA_3 = Splits(_words("{1,3}"), whole_tokens=True, begins=True)
_DBRX = Splits(_words("{1,3}"))
_QWEN_2 = Splits(_words(""), composed=True)
_GPT_4O = Splits(_cased("{1,3}", f"{_SUFFIX}?"))
_TEKKEN = Splits(_cased("", ""), whole_tokens=True, begins=True)

SPLITS: dict[str, Splits] = {
    "default": Splits(_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "gigachat"), _GPT_2),
    **dict.fromkeys(("mellum", "exaone4", "trillion", "granite-docling"), _GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA_3),
    **dict.fromkeys(("falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA_3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _DBRX),
    "glm4": _DBRX._replace(whole_tokens=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"), _QWEN_2),
    **dict.fromkeys(
        ("stablelm2", "megrez", "hunyuan", "solar-open"), Splits(_words(""))
    ),
    "grok-2": Splits(_words("")),
    "qwen35": Splits(_words("", r"\p{L}\p{M}"), composed=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT_4O),
    "tekken": _TEKKEN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Splits(_DEEPSEEK_V3)),
}
