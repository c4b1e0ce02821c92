"""Renders the chats of `templates.json` by its templates, as transformers does.

Each template has the constructions of a family's, in other words. A date is replaced by
a mark. The tests need no transformers; to render anew:

    pip install transformers
    python tests/golden/templates/make_templates.py
"""

import datetime
import json
import pathlib

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

FILE = pathlib.Path(__file__).with_name("templates.json")


def main() -> None:
    content = json.loads(FILE.read_text("utf-8"))
    words = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **content["special"])
    now = datetime.datetime.now().strftime(content["format"])
    for about in content["templates"].values():
        about["texts"] = [
            tokenizer.apply_chat_template(
                chat,
                chat_template=about["template"],
                tokenize=False,
                add_generation_prompt=chat[-1]["role"] != "assistant",
            ).replace(now, content["mark"])
            for chat in content["chats"]
        ]
    text = json.dumps(content, indent=1, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
