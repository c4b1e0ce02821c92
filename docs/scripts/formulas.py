"""Formulas of the pages as MathML, which browsers show without any script."""

import re

import latex2mathml.converter

FENCE = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Typesets the fences `math`; MkDocs calls this for each page."""
    del kwargs
    return FENCE.sub(_typeset, markdown)


def _typeset(fence: re.Match[str]) -> str:
    formula = " ".join(fence[1].split())
    mathml = latex2mathml.converter.convert(formula, display="block")
    return f'<div class="formula">{mathml}</div>'
