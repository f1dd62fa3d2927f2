"""The layers of a model: how many units they have, before and after."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from torch import nn

from proxmo.compaction.report import CompactionReport, layer_widths
from proxmo.plot.style import BLUE, GREY, LONGEST, as_label, one_axes, say_empty, tidy
from proxmo.shrinking import ShrinkReport

ROW = 0.3  # inches of a layer


def layers(of: CompactionReport | ShrinkReport | nn.Module, *, ax: Any = None) -> Axes:
    """Draw the units of each layer as bars: before in grey, after in blue.

    Args:
        of: the report of `compact` or `shrink`, or a model, of which the units of each layer are drawn.
        ax: the Axes to draw on.

    Returns:
        The Axes.

    >>> import torch
    >>> ax = layers(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    >>> [int(bar.get_width()) for bar in ax.patches]
    [8, 2]
    """
    before, after = _widths(of)
    axes = one_axes(ax, height=1.2 + ROW * max(len(after), 3))
    rows = np.arange(len(after))
    if before:
        axes.barh(rows, list(before.values()), height=0.8, color=GREY, alpha=0.5, label="before")
    axes.barh(
        rows, list(after.values()), height=0.5 if before else 0.8, color=BLUE, label="after" if before else "units"
    )
    for row, name in enumerate(after):
        text = f"{before[name]} → {after[name]}" if before and before[name] != after[name] else f"{after[name]}"
        axes.annotate(
            text, (max(before.get(name, 0), after[name]), row), xytext=(3, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(rows, [_short(name) for name in after])
    axes.set_ylim(max(len(after), 1) - 0.5, -0.5)  # the first layer on top
    axes.set_xlim(0, 1.35 * max([*before.values(), *after.values()], default=1) or 1)
    axes.set_xlabel("units")
    axes.set_ylabel("layer")
    if not after:
        say_empty(axes, "no layers with units")
    if before:
        axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0)
    tidy(axes)
    return axes


def _widths(of: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the units of each layer before, empty if that is not known, and after."""
    report = of.compaction if isinstance(of, ShrinkReport) else of
    if isinstance(report, CompactionReport):
        return {name: before for name, (before, _) in report.widths.items()}, {
            name: after for name, (_, after) in report.widths.items()
        }
    if isinstance(report, nn.Module):
        return {}, layer_widths(report)
    raise TypeError(f"of must be a report of compact or shrink, or a model, got {type(of).__name__}")


def _short(name: str) -> str:
    """Return the name; if it is long, with the first letters of modules, as far as needed, or their numbers only.

    >>> _short("bert.encoder.layer.0.attention.output.dense")
    'b.e.l.0.a.output.dense'
    """
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= LONGEST:
            break
        if not part.isdigit():
            parts[index] = part[:1]
    if len(".".join(parts)) > LONGEST:
        parts = [*filter(str.isdigit, parts[:-1]), parts[-1]]
    return as_label(".".join(parts))
