"""What all figures share: colours, and axes to draw on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
ORANGE, BLUE, GREEN, PINK, SKY, YELLOW = "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
GREY = "#808080"  # as visible on white as on black
WIDTH = 4.8  # inches of a new figure: text of 10 points is still legible when it is shown 360 pixels wide

LONGEST = 24  # characters of a name

AxesArray: TypeAlias = "NDArray[Any]"
"""An array of matplotlib's ``Axes``."""


def one_axes(ax: Any, height: float) -> Axes:
    """Return ``ax``, or the axes of a new figure."""
    found = new_axes(1, 1, height)[0] if ax is None else ax
    if not isinstance(found, Axes):
        raise TypeError(f"ax must be an Axes of matplotlib, got {type(ax).__name__}")
    return found


def several_axes(ax: Any, names: Sequence[str], *, rows: int, height: float) -> AxesArray:
    """Return ``ax`` as an array with one Axes for each name, or the axes of a new figure."""
    if ax is None:
        return new_axes(rows, len(names) // rows, height)
    found = np.array(ax, dtype=object).ravel()
    if len(found) != len(names) or not all(isinstance(one, Axes) for one in found):
        got = [type(one).__name__ for one in found]
        raise TypeError(f"ax must be {len(names)} Axes of matplotlib, for {', '.join(names)}, got {got}")
    return found


def new_axes(rows: int, columns: int, height: float) -> AxesArray:
    """Return the axes of a new figure of pyplot."""
    import matplotlib.pyplot as plt  # here, since it chooses a backend

    figure = plt.figure(figsize=(WIDTH, height), layout="constrained")
    return np.array(figure.subplots(rows, columns, squeeze=False, sharex=rows > 1), dtype=object).ravel()


def as_label(name: str) -> str:
    """Return a name as text that matplotlib shows as it is, shortened in the middle if it is long.

    >>> as_label("price_$"), as_label("a_feature_with_a_very_long_name")
    ('price_\\\\$', 'a_feature_w…y_long_name')
    """
    short = name if len(name) <= LONGEST else f"{name[: LONGEST // 2 - 1]}…{name[1 - LONGEST // 2 :]}"
    literal = short.replace("$", r"\$")  # otherwise a formula
    return f"\u200b{literal}" if literal.startswith("_") else literal  # legends leave out names that begin with _


def say_empty(ax: Axes, text: str) -> None:
    """Write in the middle of axes why they are empty."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=GREY)


def tidy(ax: Axes) -> None:
    """Remove the frame above and on the right."""
    ax.spines[["top", "right"]].set_visible(False)
