"""Tables that benchmarks write have no heading; as pages they need one."""

from pathlib import PurePosixPath

from sphinx.application import Sphinx


def _add_heading(app: Sphinx, page: str, source: list[str]) -> None:
    if page.startswith("results/") and source[0].startswith("|"):
        source[0] = f"# All numbers: {PurePosixPath(page).name}\n\n{source[0]}"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _add_heading)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
