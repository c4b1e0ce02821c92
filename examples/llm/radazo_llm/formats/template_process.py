"""Renders a chat template in a process of its own, of bounded memory.

A template comes with a model, from anywhere. The sandbox of Jinja keeps it away from
Python, and not from memory: `'a' * 10**10` is a template. This file is run as a
script, which imports nothing but Jinja.

The environment has what templates find in transformers' `apply_chat_template`: loop
controls, `{% generation %}`, `tojson`, `raise_exception` and `strftime_now`.
"""

import datetime
import itertools
import json
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

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
    source: str, chats: list[dict[str, Any]], special: dict[str, Any], now: str
) -> list[tuple[str, list[tuple[int, int]]]]:
    """The text of each chat, and the parts that the template marks as replies.

    Args:
      source: The template.
      chats: The messages, the tools, and whether the begin of the next reply follows.
      special: The special tokens that the template may name.
      now: The date and the time, in the format of ISO 8601.
    """
    sandbox = environment(datetime.datetime.fromisoformat(now))
    template, texts = sandbox.from_string(source), []
    for chat in chats:
        given = {"documents": None} | chat | special
        text, parts = template.render(**given), []
        if sandbox.has_marks:
            sandbox.mark = f"\0{secrets.token_hex(8)}\0"
            parts = _parts(template.render(**given), sandbox.mark, text)
            sandbox.mark = ""
        texts.append((text, parts))
    if sum(len(text) for text, _ in texts) > LONGEST * len(chats):
        raise TemplateError(f"a text has more than {LONGEST} characters")
    return texts


def _parts(marked: str, mark: str, text: str) -> list[tuple[int, int]]:
    """The places in a text between its marks."""
    pieces = marked.split(mark)
    if "".join(pieces) != text or len(pieces) % 2 == 0:
        raise TemplateError("its text must not depend on {% generation %}")
    ends = list(itertools.accumulate(map(len, pieces)))
    return list(zip(ends[:-1:2], ends[1::2], strict=True))


class _Sandbox(ImmutableSandboxedEnvironment):
    """An environment that knows whether and how to mark replies."""

    has_marks, mark = False, ""


def environment(now: datetime.datetime) -> _Sandbox:
    """A sandbox with the names that chat templates use."""
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _json
    sandbox.globals |= {
        "raise_exception": _refuse,
        "strftime_now": now.strftime,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return sandbox


class Generation(Extension):
    """`{% generation %}`, which marks the text of a reply."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Node:
        """Reads the block."""
        self.environment.has_marks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{self.environment.mark}{caller()}{self.environment.mark}"


class _Dict:
    """`dict` without its attributes, by which a template leaves the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Sequence[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """A namespace without private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in given.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace must have no private names; got {name!r}")
        Namespace.__setitem__(self, name, value)


def _json(value: Any, **options: Any) -> str:
    """Not Jinja's, which escapes the characters of HTML."""
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _refuse(message: Any) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
