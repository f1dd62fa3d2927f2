"""plot.layers: bars as long as the layers are wide."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from torch import nn

import proxmo
from proxmo import plot

REPORT = proxmo.CompactionReport((1000, 100), (800, 200), {"0": (64, 16), "2": (32, 0), "head": (10, 10)}, 0.0, [])


def bars(ax: Any) -> list[list[float]]:
    return [[bar.get_width() for bar in container] for container in ax.containers]


def names(ax: Any) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


@pytest.mark.parametrize(
    "report", [REPORT, proxmo.ShrinkReport(0.25, (96, 16), REPORT, (1, 1), (1.0, 1.0), None)], ids=["compact", "shrink"]
)
def test_report_has_bars_before_and_after(report: Any) -> None:
    ax = plot.layers(report)
    assert bars(ax) == [[64, 32, 10], [16, 0, 10]]
    assert names(ax) == ["0", "2", "head"]
    assert [text.get_text() for text in ax.texts] == ["64 → 16", "32 → 0", "10"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["before", "after"]
    assert ax.get_xlabel() == "units"
    bottom, top = ax.get_ylim()
    assert bottom > top  # the first layer is on top


def test_model_has_one_bar_per_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))
    ax = plot.layers(model)
    assert bars(ax) == [[8, 4]]
    assert names(ax) == ["0", "3"]
    assert ax.get_legend() is None


def test_long_names_keep_their_numbers_and_their_end() -> None:
    layers = [f"transformer.encoder.layers.{layer}.self_attn.out_proj" for layer in (1, 11)]
    deep = "a.b.c.d.e.f.g.10.h.i.j.k.l.m.out_proj"
    widths = {**dict.fromkeys([*layers, deep], (8, 4)), "a_name_that_is_longer_than_labels": (2, 1)}
    ax = plot.layers(proxmo.CompactionReport((1, 1), (1, 1), widths, 0.0, []))
    assert names(ax) == ["t.e.l.1.s.out_proj", "t.e.l.11.s.out_proj", "10.out_proj", "a_name_that…than_labels"]


@pytest.mark.parametrize("of", [nn.ReLU(), proxmo.CompactionReport((1, 1), (1, 1), {}, 0.0, [])])
def test_model_without_layers_is_drawn(of: Any) -> None:
    ax = plot.layers(of)
    ax.figure.canvas.draw()
    assert [text.get_text() for text in ax.texts] == ["no layers with units"]


def test_layer_without_units_is_drawn() -> None:
    ax = plot.layers(proxmo.CompactionReport((1, 1), (1, 1), {"0": (0, 0)}, 0.0, []))
    ax.figure.canvas.draw()
    assert bars(ax) == [[0], [0]]


def test_draws_on_the_axes_that_it_is_given() -> None:
    ax = Figure().subplots()
    assert plot.layers(REPORT, ax=ax) is ax
    assert plt.get_fignums() == []
    plot.layers(REPORT)
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize(
    ("of", "ax", "message"),
    [
        ({"0": (8, 4)}, None, "of must be a report of compact or shrink, or a model, got dict"),
        (REPORT, Figure(), "ax must be an Axes of matplotlib, got Figure"),
    ],
)
def test_bad_arguments_are_refused(of: Any, ax: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        plot.layers(of, ax=ax)
    assert plt.get_fignums() == []
