"""Formulas as MathML, which every browser draws by itself: no scripts, no fonts, no network."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(translator: HTML5Translator, node: nodes.math_block) -> None:
    for equation in _equations(node.astext()):
        translator.body.append(f'<div class="math">{convert(equation, display="block")}</div>')
    raise nodes.SkipNode


def _equations(formula: str) -> list[str]:
    """Split at line breaks outside of environments, which the converter ignores; drop marks of alignment there."""
    if r"\begin" in formula:
        return [formula]
    return [equation.replace("&", "") for equation in re.split(r"\\\\\n", formula)]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
