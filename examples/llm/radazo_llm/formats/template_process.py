"""Renders a chat template in a process of its own, of bounded memory.

A template comes with a model, from anywhere. The sandbox of Jinja keeps it away from
Python, and not from memory: `'a' * 10**10` is a template. This file is run as a
script, which imports nothing but Jinja.
"""

import json
import sys
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 29  # Bytes of addresses; the interpreter needs a tenth of it.
LONGEST = 1 << 22  # Characters of a text.


def main() -> None:
    """Reads a template and chats as JSON, and writes the texts, or an error."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # The system has no such limit.
    given = json.load(sys.stdin)
    try:
        answer = {"texts": rendered(**given)}
    except Exception as error:  # A template can divide by zero, say.
        text = " ".join(f"{type(error).__name__}: {error}".split())
        answer = {"error": f"{text:.200}"}
    json.dump(answer, sys.stdout)


def rendered(
    source: str, chats: list[list[dict[str, str]]], special: dict[str, str]
) -> list[str]:
    """The text of each chat."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.globals["raise_exception"] = _refuse
    template = sandbox.from_string(source)
    texts = [
        template.render(messages=turns, add_generation_prompt=True, **special)
        for turns in chats
    ]
    if sum(map(len, texts)) > LONGEST * len(chats):
        raise TemplateError(f"a text has more than {LONGEST} characters")
    return texts


def _refuse(message: Any) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
