"""A regularization path: the coefficients of models from dense to sparse."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from proxmo.plot.style import BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, as_label, one_axes, say_empty

Array = NDArray[Any]

NAMED = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW)  # the colours of the largest coefficients; all others are grey
WIDE = 20.0  # shares to keep are drawn on a log axis if the largest is so many times the smallest
TICKS = 6


def path(of: Any, *, ax: Any = None) -> Axes:
    """Draw the coefficients of a regularization path over the strength, on a log axis, or over what to keep.

    The numbers at the top say how many inputs the models use. The six inputs with the largest coefficients have a
    colour and a name, all others are grey. With several classes or targets, the norm of the coefficients of an input
    is drawn. A dashed line marks the best model of a cross-validation.

    Args:
        of: the path of an estimator in ``proxmo.sklearn``, or any object with its attributes ``parameter``, ``values``,
            ``coefs`` and ``nonzeros``, and if known ``feature_names`` and ``best``.
        ax: the Axes to draw on.

    Returns:
        The Axes.

    >>> from types import SimpleNamespace
    >>> ax = path(SimpleNamespace(
    ...     parameter="strength", values=[1.0, 0.1], coefs=[[0.0, 0.0], [0.9, -0.2]], nonzeros=[0, 2]
    ... ))
    >>> [line.get_ydata().tolist() for line in ax.lines]
    [[0.9, 0.0], [-0.2, 0.0]]
    """
    missing = [name for name in ("parameter", "values", "coefs", "nonzeros") if not hasattr(of, name)]
    if missing:
        raise TypeError(f"of must be a path with {', '.join(missing)}, got {type(of).__name__}")
    values, coefs, nonzeros = (np.asarray(given) for given in (of.values, of.coefs, of.nonzeros))
    if not len(values) == len(coefs) == len(nonzeros):
        raise ValueError(
            f"of must have as many coefs and nonzeros as values, got {len(coefs)} and {len(nonzeros)} for {len(values)}"
        )
    axes = one_axes(ax, height=4.2)
    order = np.argsort(values, kind="stable")
    per_input = np.linalg.norm(coefs, axis=1) if coefs.ndim == 3 else coefs
    _draw_coefficients(axes, values[order], per_input[order], getattr(of, "feature_names", None))
    best = getattr(of, "best", None)
    if best is not None:
        axes.axvline(values[best], color=GREY, linestyle="--", linewidth=1.5, label="best in cross-validation")
    kept = "number to keep" if np.issubdtype(values.dtype, np.integer) else "share to keep"
    axes.set_xlabel(kept if of.parameter == "keep" else of.parameter)
    axes.set_ylabel("norm of coefficients" if coefs.ndim == 3 else "coefficient")
    if np.issubdtype(values.dtype, np.integer):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if len(values) and values.min() > 0 and (of.parameter == "strength" or values.max() > WIDE * values.min()):
        axes.set_xscale("log")
    _draw_nonzeros(axes, values[order], nonzeros[order])
    axes.spines["right"].set_visible(False)
    if not coefs.size:
        say_empty(axes, "no models")
    elif axes.get_legend_handles_labels()[0]:
        if ax is None:
            axes.figure.legend(loc="outside lower center", ncols=2, frameon=False)
        else:
            axes.legend(fontsize="small")
    return axes


def _draw_coefficients(ax: Axes, values: Array, coefs: Array, names: Any) -> None:
    """Draw one line per input, those with the largest coefficients first, and in front."""
    marker = "o" if len(values) == 1 else ""
    sizes = np.abs(coefs).max(axis=0, initial=0.0) if coefs.ndim == 2 else np.array([])
    for rank, column in enumerate(np.argsort(-sizes, kind="stable").tolist()):
        known = rank < len(NAMED) and sizes[column] > 0
        ax.plot(
            values,
            coefs[:, column],
            color=NAMED[rank] if known else GREY,
            linewidth=2 if known else 0.8,
            alpha=1.0 if known else 0.6,
            zorder=3 if known else 2,
            marker=marker,
            label=(f"input {column}" if names is None else as_label(str(names[column]))) if known else None,
        )


def _draw_nonzeros(ax: Axes, values: Array, nonzeros: Array) -> None:
    """Say at the top how many inputs the models use."""
    top = ax.secondary_xaxis("top")
    shown = np.unique(np.linspace(0, len(values) - 1, min(TICKS, len(values))).round().astype(int))
    top.xaxis.set_major_locator(FixedLocator(values[shown]))
    top.xaxis.set_minor_locator(NullLocator())
    top.set_xticks(values[shown], [str(count) for count in nonzeros[shown]])
    top.set_xlabel("inputs in use")
