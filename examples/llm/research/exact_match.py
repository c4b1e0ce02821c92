"""Metrics of a user's own, for `radazo-llm reward --metric`."""


def exact_match(prompts, completions, *, answer, **columns):
    """Returns a reward for each completion."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip() == right) for text, right in pairs]


def first_line(prompts, completions, *, answer, **columns):
    """Returns a reward for each completion, by its first line."""
    lines = [text.partition("\n")[0] for text in completions]
    return exact_match(prompts, lines, answer=answer)
