"""A user's data: which rows are for training, for evaluation and for the test.

A file is read twice, a row at a time: once to check all of it and to divide it, and
once to keep the rows that a run reads. So memory grows by 9 bytes per row.
"""

import array
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from radazo_llm.examples import forms
from radazo_llm.examples.files import SPLITS, Row, rows
from radazo_llm.formats import tokenizers, weights
from radazo_llm.tune import data

NAMES = ("train", "dev", "test")
# The largest numbers of examples by default. A test split is read whole.
TRAIN, EVAL = 10_000, 500
_COLUMN = "split"
_UNKNOWN = 255  # A row whose share decides its split.


class Divided(NamedTuple):
    """The rows of each split.

    Attributes:
      items: The rows that a run reads, by split.
      totals: The number of all rows, by split.
      form: The form of the file.
      words: The word of each class.
    """

    items: dict[str, list[forms.Item]]
    totals: dict[str, int]
    form: str
    words: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Own:
    """A file or folder of a user, and how it is read.

    Attributes:
      path: The file or folder.
      shape: The rules by which rows become prompts.
      split_column: The column with train, dev or test; "" for the column `split` if
        the first row has the name of a split there.
      dev_share: The share of the rows to evaluate on, if no column or file name
        divides them.
      test_share: The share that only the end of a run is measured on.
      skip_long: Whether to leave out examples that are longer than the model's context.
      written: Whether the model's own text is scored.
    """

    path: Path
    shape: forms.Shape = dataclasses.field(default_factory=forms.Shape)
    split_column: str = ""
    dev_share: float = 0.1
    test_share: float = 0.0
    skip_long: bool = False
    written: bool = False

    @property
    def eval_examples(self) -> int:
        """The number of training examples that an evaluation measures by default."""
        return EVAL

    def __post_init__(self) -> None:
        shares = self.dev_share, self.test_share
        if not (all(0 <= share < 1 for share in shares) and 0 < sum(shares) < 1):
            raise ValueError(
                "--dev-share and --test-share must be from 0 to 1, and leave rows for "
                f"training and for one of them; got {shares[0]:g} and {shares[1]:g}."
            )

    def form(self) -> str:
        """The form of the file, by its first row.

        Raises:
          ValueError: If it has none, or no rows.
        """
        return forms.form_of(self._first(), written=self.written)

    def _first(self) -> Row:
        first = next(rows(self.path), None)
        if first is None:
            raise ValueError(f"{self.path} must have rows; got none.")
        return first

    def _column(self) -> str:
        """The column that names splits, or ""."""
        if self.split_column:
            return self.split_column
        return _COLUMN if str(self._first().values.get(_COLUMN)) in SPLITS else ""

    def objective(self) -> str:
        """The objective that fits the file: of candidates, or of free text."""
        chosen = self.form() in ("label", "choice")
        return "classification" if chosen else "language_model"

    def absolute(self) -> "Own":
        """The same data, from any folder."""
        return dataclasses.replace(self, path=self.path.resolve())

    def divided(self, limits: Mapping[str, int | None]) -> Divided:
        """Reads the rows of each split, at most so many, the same ones for all runs.

        Raises:
          ValueError: If a row is wrong, or a split that is needed has no rows.
        """
        form = self.form()
        places, words = self._checked(form)
        rng = np.random.default_rng(0)
        chosen = {}
        for code, name in enumerate(NAMES):
            found = np.flatnonzero(places == code)
            chosen[name] = set(rng.permutation(found)[: limits[name]].tolist())
        items: dict[str, list[forms.Item]] = {name: [] for name in NAMES}
        for number, row in enumerate(_shown(rows(self.path), len(places))):
            for name in NAMES:
                if number in chosen[name]:
                    items[name].append(forms.item(row, form, self.shape, words))
        totals = {name: int((places == i).sum()) for i, name in enumerate(NAMES)}
        for name in NAMES[:2]:
            if not items[name]:
                raise ValueError(
                    f"{self.path} must have rows for {name}; got none of "
                    f"{len(places)} (rows with the same prompt stay together). "
                    "Give more rows or another --dev-share, or name the splits in a "
                    "column (--split-column)."
                )
        return Divided(items, totals, form, words)

    def _checked(self, form: str) -> tuple[np.ndarray, dict[str, str]]:
        """The split of each row, uint8 [rows], and the word of each class."""
        words, found = self.shape.words(), set[str]()
        codes, hashes, column = bytearray(), array.array("Q"), self._column()
        for row in _shown(rows(self.path)):
            if form == "label":
                # Without words, a class is its own word until all are known.
                if "label" in row.values:
                    found.add(forms.value_of(row, words))
                known = words or dict.fromkeys(found, "")
            else:
                known = words
            made = forms.item(row, form, self.shape, known)
            codes.append(_code(row, column))
            hashes.append(_hash(made))
            if len(found) > forms.MOST_CLASSES:
                break
        if form == "label":
            forms.check_classes(found)
            words = forms.classes(found, self.shape)
        places = np.frombuffer(bytes(codes), np.uint8)
        return self._shared(places, np.frombuffer(hashes, np.uint64)), words

    def _shared(self, codes: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        """Divides by shares the rows that nothing else divides.

        Rows with the same prompt are in one split, so that no prompt of the test is
        trained on. If the named splits have no dev, training rows are divided.
        """
        codes = codes.copy()
        if not (codes == 1).any():
            codes[codes == 0] = _UNKNOWN
        free = codes == _UNKNOWN
        distinct, inverse = np.unique(hashes[free], return_inverse=True)
        count = len(distinct)
        test = 0 if (codes == 2).any() else _number(self.test_share, count)
        dev = 0 if (codes == 1).any() else _number(self.dev_share, count)
        split = np.zeros(count, np.uint8)  # Hashes are in random order.
        split[:test] = 2
        split[test : test + dev] = 1
        codes[free] = split[inverse]
        return codes

    def read(
        self,
        model: Path,
        prompt_length: int = 0,
        train_examples: int | None = None,
        eval_examples: int | None = None,
    ) -> data.Splits:
        """The examples of the splits, encoded for a model.

        Args:
          model: The model's folder or file.
          prompt_length: The tokens of a soft prompt.
          train_examples: The largest number to train on, 10,000 by default.
          eval_examples: The largest number to evaluate on, 500 by default.

        Raises:
          ValueError: If a row is wrong, or an example does not fit the model.
        """
        divided, texts, special = self.texts(model, train_examples, eval_examples)
        config, tokenizer = weights.read_config(model), tokenizers.load(model)
        longest = config.max_position_embeddings - prompt_length
        batches, parts = [], []
        for name, examples in texts.items():
            _check_numbers(examples)
            batch = data.encode(
                tokenizer,
                self._short(tokenizer, examples, longest, special),
                max_length=longest,
                vocab_size=config.vocab_size,
                special=special,
            )
            batches.append(batch)
            number, total = len(batch.label), divided.totals[name]
            some = f"{number:,}" if number == total else f"{number:,} of {total:,}"
            parts.append(f"{name}: {some} examples")
        length = max(batch.tokens.shape[-1] for batch in batches)
        summary = f"{self.path.name}: {'; '.join(parts)}; at most {length} tokens."
        return data.Splits(tuple(batches), summary)

    def texts(
        self,
        model: Path,
        train_examples: int | None = None,
        eval_examples: int | None = None,
    ) -> tuple[Divided, dict[str, list[data.Example]], bool]:
        """The texts of each split that has rows; see `forms.examples`."""
        limits = {"train": train_examples or TRAIN, "dev": eval_examples or EVAL}
        divided = self.divided(limits | {"test": None})
        tokenizer = tokenizers.load(model)
        texts, special = {}, True
        for name, items in divided.items.items():
            if items:
                texts[name], special = forms.examples(items, model, tokenizer)
        return divided, texts, special

    def shown(self, model: Path, number: int = 3) -> str:
        """Returns some examples as a model sees them, with their tokens.

        Args:
          model: The model's folder or file.
          number: The number of examples of each split.
        """
        divided, texts, special = self.texts(model)
        tokenizer = tokenizers.load(model)
        columns = ", ".join(forms.FORMS.get(divided.form, ("prompt",)))
        sizes = [f"{name} {divided.totals[name]:,}" for name in texts]
        lines = [f"{self.path}: {columns}; rows: {', '.join(sizes)}."]
        if divided.words:
            words = ", ".join(f"{w!r} ({v})" for v, w in divided.words.items())
            lines.append(f"Classes: {words:.400}.")
        for example in texts["train"][:number]:
            ids = tokenizer.encode(example.prompt, add_special_tokens=special).ids
            prompt = tokenizer.decode(ids, skip_special_tokens=False)
            lines.append(f"\n{example.place}: {len(ids)} tokens\n{prompt}")
            for place, text in enumerate(example.candidates):
                whole = tokenizer.encode(
                    example.prompt + text, add_special_tokens=special
                )
                mark = "->" if place == example.label else "  "
                count = len(whole.ids) - len(ids)
                lines.append(f"{mark} {text!r}, {count} token{'s' * (count != 1)}")
        return "\n".join(lines)

    def _short(
        self, tokenizer: Any, examples: list[data.Example], most: int, special: bool
    ) -> list[data.Example]:
        """The examples, without those that are too long if these are left out."""
        if not self.skip_long:
            return examples
        longest = [x.prompt + max(x.candidates, key=len) for x in examples]
        encoded = tokenizer.encode_batch(longest, add_special_tokens=special)
        kept = [
            example
            for example, found in zip(examples, encoded, strict=True)
            if len(found.ids) <= most
        ]
        if not kept:
            raise ValueError(
                f"{self.path} must have examples of at most {most} tokens; got none. "
                "Shorten them, or use a model with a longer context."
            )
        return kept


def _code(row: Row, column: str) -> int:
    """The place of a row's split in `NAMES`, if a column or a file says it."""
    name: Any = row.split
    if column:
        if column not in row.values:
            raise ValueError(
                f"{row.place}: must have the column {column} (--split-column); got "
                f"{', '.join(map(str, row.values))!s:.200}."
            )
        value = row.values[column]
        name = SPLITS.get(value) if isinstance(value, str) else None
        if name is None:
            raise ValueError(
                f"{row.place}: {column} must be one of {', '.join(SPLITS)}; got "
                f"{value!r:.80}. Correct the row, or name another --split-column."
            )
    return _UNKNOWN if name is None else NAMES.index(name)


def _check_numbers(examples: list[data.Example]) -> None:
    """Raises a ValueError unless all have equally many candidates."""
    number = len(examples[0].candidates)
    for example in examples:
        if len(example.candidates) != number:
            raise ValueError(
                f"{example.place}: candidates must be {number} texts, as in the first "
                f"row; got {len(example.candidates)}. Divide the file by their number."
            )


def _shown(found: Iterator[Row], total: int | None = None) -> Iterator[Row]:
    """The rows, with a bar if they take more than seconds."""
    return tqdm(found, desc="Rows", total=total, unit="row", delay=2.0, leave=False)


def _hash(item: forms.Item) -> int:
    """A number that is the same for the same prompt."""
    text = json.dumps(item.turns) + item.prompt
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _number(share: float, count: int) -> int:
    """So large a share of some things, one at least if there are several."""
    return max(round(share * count), 1) if share and count > 1 else 0
