"""A run: loss, penalty and sparsity over its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from proxmo.plot.style import BLUE, GREEN, GREY, ORANGE, PINK, AxesArray, say_empty, several_axes, tidy

Array = NDArray[np.float64]

WIDE = 100.0  # a loss whose largest value is so many times its smallest is drawn on a log axis
NOISY = 100  # a loss with at least so many values gets a running mean
WINDOW = 1 / 25  # the part of the run that each mean is over
DRAWN = ("loss", "penalty", "zeros", "kept", "keep")


def history(run: Any, *, ax: Any = None) -> AxesArray:
    """Draw how a run went: the loss, the penalty ψ, and the shares of zeros and of groups left, over the steps.

    A loss of many steps is drawn faintly, and its running mean on top of it.

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
    others = len(top.lines)
    _draw(top, steps, columns, {"loss": ("loss", BLUE, "-")})
    for line in top.lines[others:]:
        _draw_mean(top, line)
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
    """Return the numbers of a run, NaN where they are unknown."""
    recorded = getattr(run, "history", run)
    found = recorded if isinstance(recorded, Mapping) else recorded.arrays() if hasattr(recorded, "arrays") else None
    if found is None:
        takes = "a KeepScheduler, shrink's report, a History, a Monitor or a dictionary of sequences"
        raise TypeError(f"run must be {takes}, got {type(run).__name__}")
    if found and not set(found) & set(DRAWN):
        raise ValueError(f"run must have some of the columns {', '.join(DRAWN)}, got {', '.join(map(str, found))}")
    columns = {name: _as_numbers(name, found[name]) for name in ("step", *DRAWN) if name in found}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"run must have columns of one length, got {lengths}")
    return columns


def _as_numbers(name: str, values: Any) -> Array:
    try:
        numbers = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"run must have a sequence of numbers as {name!r}: {error}") from error
    if numbers.ndim != 1:
        raise ValueError(f"run must have a sequence of numbers as {name!r}, got an array of shape {numbers.shape}")
    return numbers


def _draw(ax: Axes, steps: Array, columns: dict[str, Array], lines: dict[str, tuple[str, str, str]]) -> None:
    """Draw each column that has numbers as (label, colour, style), or say that there are none.

    Unknown values are left out of a line; infinite ones, as outside of a constraint, interrupt it.
    """
    for name, (label, colour, style) in lines.items():
        values = columns.get(name, np.array([]))
        known = ~np.isnan(values)
        finite = np.isfinite(values[known])
        if finite.any():
            alone = finite & ~np.append(False, finite[:-1]) & ~np.append(finite[1:], False)  # points that no line shows
            ax.plot(
                steps[known],
                np.where(finite, values[known], np.nan),
                label=label,
                color=colour,
                linestyle=style,
                linewidth=1.8,
                marker="o" if alone.any() else "",
                markevery=np.flatnonzero(alone).tolist(),
            )
    if not ax.lines:
        recorded = any(not np.isnan(columns[name]).all() for name in lines if name in columns)
        say_empty(ax, "not finite" if recorded else "not recorded")
    elif len(lines) > 1:
        ax.legend(frameon=False, ncols=len(ax.lines), loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0)
    tidy(ax)


def _draw_mean(ax: Axes, line: Line2D) -> None:
    """Draw the running mean of a long line over it."""
    values = np.asarray(line.get_ydata(), dtype=np.float64)
    if len(values) < NOISY or not np.isfinite(values).all():
        return
    half = max(1, round(WINDOW * len(values) / 2))
    padded = np.pad(values, half, mode="reflect", reflect_type="odd")  # so that a trend goes on beyond the ends
    mean = np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")
    ax.plot(line.get_xdata(), mean, label="running mean", color=line.get_color(), linewidth=1.8)
    line.set(alpha=0.3, linewidth=0.8)
    ax.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0)


def _log_if_wide(ax: Axes, values: Array) -> None:
    known = values[np.isfinite(values)]
    if known.size and known.min() > 0 and known.max() > WIDE * known.min():
        ax.set_yscale("log")
