"""Make docstrings and signatures fit for reStructuredText.

Docstrings are written to be read in a terminal: |x| is a magnitude there, not a substitution. Fields of penalties have
types that carry their check, of which a reader wants to see the type alone.
"""

import re

from sphinx.application import Sphinx

_CHECKED_TYPE = re.compile(
    r"~?(?:typing\.)?Annotated\[(.+?), (?:functools\.partial\()?<function [^>]*>(?:, [^\])]*\))?\]"
)
_LITERAL_OR_BAR = re.compile(r"(``.*?``|`.*?`)|\|")


def escape_bars(line: str) -> str:
    """Escape bars outside of backticks."""
    return _LITERAL_OR_BAR.sub(lambda found: found[1] or r"\|", line)


def _escape(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    in_example = False
    for number, line in enumerate(lines):
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        if not in_example:
            lines[number] = escape_bars(line)


def _shorten(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returns: str | None
):
    return (_CHECKED_TYPE.sub(r"\1", signature) if signature else signature), returns


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _escape)
    app.connect("autodoc-process-signature", _shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
