"""Links to the gallery: on a forge to the scripts, on the site to the pages that are made of them."""

import re

from sphinx.application import Sphinx


def _to_pages(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = re.sub(r"\]\(\.\./examples/gallery/(\w+)\.py\)", r"](gallery/\1)", source[0])
    source[0] = source[0].replace("](../examples/gallery)", "](gallery/index)")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
