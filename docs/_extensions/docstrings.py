"""Docstrings are written to be read in a terminal: |x| is a magnitude there, not a substitution of reStructuredText."""

import re

from sphinx.application import Sphinx

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


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _escape)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
