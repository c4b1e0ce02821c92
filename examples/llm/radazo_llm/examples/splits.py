"""A user's data: which rows are for training, for evaluation and for the test.

A file is read twice, a row at a time: once to check all of it and to divide it, and
once to keep the rows that a run reads. So memory grows by 9 bytes per row.
"""

import array
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from radazo_llm.examples import forms, tokens
from radazo_llm.examples.files import SPLITS, Row, rows, split_of
from radazo_llm.examples.tokens import Example, Splits
from radazo_llm.formats import config, tokenizers
from radazo_llm.settings import REWARD, Settings

NAMES = ("train", "dev", "test")
_COLUMN = "split"
_UNKNOWN = 255  # A row whose share decides its split.


class Divided(NamedTuple):
    """The rows of each split.

    Attributes:
      items: The rows that a run reads, by split.
      totals: The number of all rows, by split.
      form: The form of the file.
      words: The word of each class.
      notes: Lines on what is unusual.
    """

    items: dict[str, list[forms.Item]]
    totals: dict[str, int]
    form: str
    words: dict[str, str]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Own:
    """A file or folder of a user.

    Attributes:
      path: The file or folder.
      settings: The settings of a run, which say how the file is read.
      now: The date and the time that a chat template may name; by default the present.
    """

    path: Path
    settings: Settings
    now: str | None = None

    def __post_init__(self) -> None:
        forms.check(self.settings)
        shares = self.settings.dev_share, self.settings.test_share
        if not 0 < sum(shares) < 1:
            raise ValueError(
                "--dev-share and --test-share must leave rows for training and for one "
                f"of them; got {shares[0]:g} and {shares[1]:g}."
            )

    def form(self) -> str:
        """The form of the file, by its first row.

        Raises:
          ValueError: If it has none, or no rows.
        """
        return forms.form_of(self._first(), written=self.settings.command == REWARD)

    def _first(self) -> Row:
        first = next(rows(self.path), None)
        if first is None:
            raise ValueError(f"{self.path} must have rows; got none.")
        return first

    def _column(self) -> str:
        """The column that names splits, or ""."""
        if self.settings.split_column:
            return self.settings.split_column
        return _named_split(self._first())

    def absolute(self) -> "Own":
        """The same data, from any folder."""
        return dataclasses.replace(self, path=self.path.resolve())

    def divided(self) -> Divided:
        """Reads the rows of each split, the same ones for all runs.

        A test split is read whole.

        Raises:
          ValueError: If a row is wrong, or a split that is needed has no rows.
        """
        limits = self.settings.train_examples, self.settings.eval_examples, None
        form = self.form()
        places, words = self._checked(form)
        rng = np.random.default_rng(0)
        chosen = {}
        for code, name in enumerate(NAMES):
            found = np.flatnonzero(places == code)
            chosen[name] = set(rng.permutation(found)[: limits[code]].tolist())
        items: dict[str, list[forms.Item]] = {name: [] for name in NAMES}
        for number, row in enumerate(_shown(rows(self.path), len(places))):
            for name in NAMES:
                if number in chosen[name]:
                    items[name].append(forms.item(row, form, self.settings, words))
        totals = {name: int((places == i).sum()) for i, name in enumerate(NAMES)}
        for name in NAMES[:2]:
            if not items[name]:
                raise ValueError(
                    f"{self.path} must have rows for {name}; got none of "
                    f"{len(places)} (rows with the same prompt stay together). "
                    "Give more rows or another --dev-share, or name the splits in a "
                    "column (--split-column)."
                )
        return Divided(items, totals, form, words, _notes(items, words))

    def _checked(self, form: str) -> tuple[np.ndarray, dict[str, str]]:
        """The split of each row, uint8 [rows], and the word of each class."""
        words, found = forms.words_of(self.settings), set[str]()
        codes, hashes, column = bytearray(), array.array("Q"), self._column()
        for row in _shown(rows(self.path)):
            if form == "label":
                # Without words, a class is its own word until all are known.
                if "label" in row.values:
                    found.add(forms.value_of(row, words))
                known = words or dict.fromkeys(found, "")
            else:
                known = words
            made = forms.item(row, form, self.settings, known)
            codes.append(_code(row, column))
            hashes.append(_hash(made))
            if len(found) > forms.MOST_CLASSES:
                break
        if form == "label":
            forms.check_classes(found)
            words = forms.classes(found, self.settings)
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
        test = 0 if (codes == 2).any() else _number(self.settings.test_share, count)
        dev = 0 if (codes == 1).any() else _number(self.settings.dev_share, count)
        split = np.zeros(count, np.uint8)  # Hashes are in random order.
        split[:test] = 2
        split[test : test + dev] = 1
        codes[free] = split[inverse]
        return codes

    def read(self, model: Path) -> Splits:
        """The examples of the splits, encoded for a model.

        Raises:
          ValueError: If a row is wrong, or an example does not fit the model.
        """
        divided, texts, special = self.texts(model)
        about, tokenizer = config.read(model), tokenizers.load(model)
        longest = about.max_position_embeddings
        batches, parts = [], []
        for name, examples in texts.items():
            _check_numbers(examples)
            batch = tokens.encode(
                tokenizer,
                self._short(tokenizer, examples, longest, special),
                max_length=longest,
                vocab_size=about.vocab_size,
                special=special,
            )
            batches.append(batch)
            number, total = len(batch.label), divided.totals[name]
            some = f"{number:,}" if number == total else f"{number:,} of {total:,}"
            parts.append(f"{name} {some}")
        length = max(batch.tokens.shape[-1] for batch in batches)
        summary = (
            f"{self.path.name}: {', '.join(parts)} examples; at most {length} tokens."
        )
        summary += tokens.classes(texts["train"])
        return Splits(tuple(batches), "\n".join([summary, *divided.notes]))

    def problems(self) -> dict[str, list[forms.Item]]:
        """The rows of each split, whose prompts a model continues."""
        return self.divided().items

    def texts(self, model: Path) -> tuple[Divided, dict[str, list[Example]], bool]:
        """The texts of each split that has rows; see `forms.examples`."""
        divided = self.divided()
        tokenizer = tokenizers.load(model)
        texts, special = {}, True
        for name, items in divided.items.items():
            if items:
                found = forms.examples(
                    items,
                    model,
                    tokenizer,
                    all_turns=self.settings.all_turns,
                    now=self.now,
                )
                texts[name], special = found.examples, found.special
                divided.notes.extend(found.notes)
        return divided, texts, special

    def shown(self, model: Path, number: int = 3) -> str:
        """Returns some examples as a model sees them, with their tokens.

        Args:
          model: The model's folder or file.
          number: The number of examples of each split.
        """
        divided, texts, special = self.texts(model)
        columns = ", ".join(forms.FORMS.get(divided.form, ("prompt",)))
        sizes = tokens.sizes({name: divided.totals[name] for name in texts})
        lines = [f"{self.path}: {columns}; rows: {sizes}."]
        if divided.words:
            words = ", ".join(f"{w!r} ({v})" for v, w in divided.words.items())
            lines.append(f"Classes: {words:.400}.")
        lines += divided.notes
        some = texts["train"][:number]
        found = tokens.shown(tokenizers.load(model), some, special)
        return "\n".join([*lines, *found])

    def _short(
        self, tokenizer: Any, examples: list[Example], most: int, special: bool
    ) -> list[Example]:
        """The examples, without those that are too long if these are left out."""
        if not self.settings.skip_long:
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


def _named_split(row: Row) -> str:
    """The name of a row's column of splits, or ""."""
    names = map(str, row.values)
    return next((name for name in names if name.lower() == _COLUMN), "")


def _code(row: Row, column: str) -> int:
    """The place of a row's split in `NAMES`, if a column or a file says it."""
    name: Any = row.split
    if not column and (other := _named_split(row)):
        raise ValueError(
            f"{row.place}: must have no column {other}, as the first row; got "
            f"{row.values[other]!r:.80}. Give every row one, or rename the column."
        )
    if column:
        if column not in row.values:
            raise ValueError(
                f"{row.place}: must have the column {column} (--split-column); got "
                f"{', '.join(map(str, row.values))!s:.200}."
            )
        value = row.values[column]
        name = split_of(value) if isinstance(value, str) else None
        if name is None:
            raise ValueError(
                f"{row.place}: {column} must be one of {', '.join(SPLITS)}; got "
                f"{value!r:.80}. Correct the row, rename the column, or name another "
                "--split-column."
            )
    return _UNKNOWN if name is None else NAMES.index(name)


def _notes(items: dict[str, list[forms.Item]], words: dict[str, str]) -> list[str]:
    """A line on each class that is measured and not trained on."""
    trained, names = {item.label for item in items["train"]}, list(words)
    return [
        f"No row to train on has the label {names[label]!r:.80}, and rows of {split} "
        "have it."
        for split in NAMES[1:]
        for label in sorted({item.label for item in items[split]} - trained)
        if words
    ]


def _check_numbers(examples: list[Example]) -> None:
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
    text += json.dumps(item.tools) if item.tools else ""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _number(share: float, count: int) -> int:
    """So large a share of some things, one at least if there are several."""
    return max(round(share * count), 1) if share and count > 1 else 0
