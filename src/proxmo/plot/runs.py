"""A run: loss, penalty and sparsity over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from proxmo.plot.style import BLUE, GREEN, GREY, ORANGE, PINK, AxesArray, say_empty, several_axes, tidy

Array = NDArray[np.float64]

WIDE = 100.0  # a loss whose largest value is so many times its smallest is drawn on a log axis


def history(run: Any, *, ax: Any = None) -> AxesArray:
    """Draw how a run went: the loss, the penalty ψ, and the shares of zeros and of groups left, over the steps.

    Args:
        run: a `KeepScheduler`, the report of `shrink`, a `History`, a ``criteria.Monitor``, or a dictionary of
            sequences with some of the keys "step", "loss", "penalty", "zeros", "kept" and "keep".
        ax: three Axes to draw on.

    Returns:
        An array of three Axes.

    >>> loss, penalty, shares = history({"loss": [0.9, 0.5, 0.4], "zeros": [0.0, 0.2, 0.5]})
    >>> loss.lines[0].get_ydata()
    array([0.9, 0.5, 0.4])
    """
    columns = _columns(run)
    length = max(map(len, columns.values()), default=0)
    steps = columns.get("step", np.arange(length, dtype=np.float64))
    top, middle, bottom = axes = several_axes(ax, ("loss", "penalty", "shares"), rows=3, height=5.4)
    _draw(top, steps, columns, {"loss": ("loss", BLUE, "-")})
    _draw(middle, steps, columns, {"penalty": ("ψ", ORANGE, "-")})
    _draw(
        bottom,
        steps,
        columns,
        {"keep": ("to keep", GREY, "--"), "kept": ("groups left", PINK, "-"), "zeros": ("zeros", GREEN, "-")},
    )
    top.set_ylabel("loss")
    middle.set_ylabel("penalty ψ")
    bottom.set(xlabel="step", ylabel="share", ylim=(-0.03, 1.03))
    bottom.yaxis.set_major_formatter(PercentFormatter(1.0))
    _log_if_wide(top, columns.get("loss", np.array([])))
    return axes


def _columns(run: Any) -> dict[str, Array]:
    """Return the numbers of a run; infinite ones, as outside of a constraint, become NaN."""
    recorded = getattr(run, "history", run)
    found = recorded if isinstance(recorded, Mapping) else recorded.arrays() if hasattr(recorded, "arrays") else None
    if found is None:
        takes = "a KeepScheduler, a report of shrink, a History, a Monitor or a dictionary of sequences"
        raise TypeError(f"run must be {takes}, got {type(run).__name__}")
    columns = {name: np.array(values, dtype=np.float64) for name, values in found.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"run must have columns of one length, got {lengths}")
    return {name: np.where(np.isfinite(values), values, np.nan) for name, values in columns.items()}


def _draw(ax: Axes, steps: Array, columns: dict[str, Array], lines: dict[str, tuple[str, str, str]]) -> None:
    """Draw each column that has numbers as (label, colour, style), or say that there are none."""
    for name, (label, colour, style) in lines.items():
        values = columns.get(name, np.array([]))
        if not np.isnan(values).all():
            marker = "o" if np.isfinite(values).sum() == 1 else ""
            ax.plot(steps, values, label=label, color=colour, linestyle=style, linewidth=1.8, marker=marker)
    if not ax.lines:
        say_empty(ax, "not recorded")
    elif len(lines) > 1:
        ax.legend(frameon=False, ncols=len(ax.lines), loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0)
    tidy(ax)


def _log_if_wide(ax: Axes, values: Array) -> None:
    known = values[np.isfinite(values)]
    if known.size and known.min() > 0 and known.max() > WIDE * known.min():
        ax.set_yscale("log")
