"""A metric of a user's own, for `radazo-llm reward --metric`."""


def exact_match(prompts, completions, *, answer, **columns):
    """Returns a reward for each completion."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip() == right) for text, right in pairs]
