"""What the figures share: colours, panels, a legend, and SVG in the colours of the page around it."""

from __future__ import annotations

import io
import re

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from proxmo.plot.style import BLUE, GREEN, ORANGE, PINK, SKY, YELLOW

METHOD_COLOURS = {
    "momentum": ORANGE, "vanilla": BLUE, "annealed": PINK, "plan": SKY, "decreasing": YELLOW, "auto": GREEN
}  # fmt: skip
INK = "#010203"  # placeholder for the text colour of the page; `to_svg` replaces it
FAINT = 0.2
in_ink = mpl.rc_context(
    {"text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
)


def panels(count: int, *, share_y: bool) -> tuple[Figure, list[Axes]]:
    """Return a figure with at most three panels per row, which stays readable on a narrow page."""
    rows = 1 if count <= 3 else 2
    columns = -(-count // rows)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows + 0.5), layout="constrained")
    return figure, list(figure.subplots(rows, columns, sharey=share_y, squeeze=False).flatten())


def with_legend(figure: Figure, axes: Axes) -> Figure:
    """Add one legend below all panels, with the labels of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, labelcolor=INK)
    return figure


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an SVG element; ``name`` makes its ids unique on the page."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    width, height = (72 * inches for inches in figure.get_size_inches())
    # Never narrower than drawn, so that the text stays legible: on a phone the figure scrolls.
    opening = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" style="min-width: {width:.0f}px">'
    return re.sub(r"^<svg [^>]*>", opening, svg, flags=re.DOTALL)
