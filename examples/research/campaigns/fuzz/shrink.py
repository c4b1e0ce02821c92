"""Makes a failing program short."""

import dataclasses
from collections.abc import Callable, Iterator

import jax.numpy as jnp

from .program import Block, Program, Statement, Value, typename

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, tries: int = 400) -> Program:
    """A program that still fails, of which nothing more can be taken away.

    Args:
      program: A program that fails.
      fails: Whether a program does.
      tries: The largest number of programs to try.
    """
    tried: set[str] = set()
    found = True
    while found:
        found = False
        for smaller in _smaller(program):
            text = "\n".join([*smaller.lines(), str(smaller.params)])
            if text in tried or len(tried) >= tries:
                continue
            tried.add(text)
            if fails(smaller):
                program, found = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Smaller programs, the smallest first."""
    for name in program.results:
        if len(program.results) > 1:
            yield _cleaned(dataclasses.replace(program, results=(name,)))
    made = [value.name for s in program.statements for value in s.outs]
    for name in made:
        if program.results != (name,):
            yield _cleaned(dataclasses.replace(program, results=(name,)))
    for statements in _less(program.statements):
        yield _cleaned(dataclasses.replace(program, statements=statements))


def _less(statements: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    """Statements of which one computes nothing, or reads less, or has less inside."""
    for i, statement in enumerate(statements):
        before, after = statements[:i], statements[i + 1 :]
        if not statement.text.startswith(("jnp.full", "jnp.array")):
            constants = tuple(_constant(value) for value in statement.outs)
            yield (*before, *constants, *after)
        for j, block in enumerate(statement.blocks):
            for inner in _less(block.statements):
                blocks = list(statement.blocks)
                blocks[j] = _without_unused(block, inner)
                new = dataclasses.replace(statement, blocks=tuple(blocks))
                yield (*before, new, *after)


def _constant(value: Value) -> Statement:
    text = f"jnp.full({value.shape}, 1, {typename(value.dtype)})"
    if value.dtype == bool:
        text = f"jnp.full({value.shape}, True)"
    if not jnp.issubdtype(value.dtype, jnp.number) and value.dtype != bool:
        text = value.name  # A key: nothing to put in its place.
    return Statement((value,), text)


def _without_unused(block: Block, statements: tuple[Statement, ...]) -> Block:
    kept = _needed(statements, block.results)
    return dataclasses.replace(block, statements=kept)


def _cleaned(program: Program) -> Program:
    """The program without what its results do not depend on."""
    statements = _needed(program.statements, program.results)
    read = set(program.results).union(*(s.reads() for s in statements))
    params = tuple(p for p in program.params if p[0].name in read)
    return dataclasses.replace(
        program, statements=statements, params=params or program.params[:1]
    )


def _needed(
    statements: tuple[Statement, ...], results: tuple[str, ...]
) -> tuple[Statement, ...]:
    read, kept = set(results), []
    for statement in reversed(statements):
        outs = {value.name for value in statement.outs}
        if outs & read:
            kept.append(statement)
            read |= statement.reads()
    return tuple(reversed(kept))
