"""plot.path: the coefficients that it is given, over what changes along the path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes, load_iris

from proxmo import plot
from proxmo.sklearn import ProxClassifier, ProxRegressor, RegularizationPath

STRENGTHS = np.array([1.0, 0.1, 0.01])
COEFS = np.array([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.9, 0.0, -2.0]])


@pytest.fixture(scope="module")
def lasso() -> RegularizationPath:
    X, y = load_diabetes(return_X_y=True, as_frame=True)
    return ProxRegressor().path(X, y, strengths=8, cv=3)


def make(**changes: Any) -> SimpleNamespace:
    counts = (np.asarray(changes.get("coefs", COEFS)) != 0).sum(-1)
    return SimpleNamespace(
        **{"parameter": "strength", "values": STRENGTHS, "coefs": COEFS, "nonzeros": counts, **changes}
    )


def drawn(ax: Any) -> dict[str, list[float]]:
    return {line.get_label(): line.get_ydata().tolist() for line in ax.lines if not line.get_label().startswith("_")}


def test_path_of_an_estimator_is_drawn_with_its_names_counts_and_best_model(lasso: RegularizationPath) -> None:
    ax = plot.path(lasso)
    ax.figure.canvas.draw()
    assert lasso.strengths is not None
    assert lasso.feature_names is not None
    assert lasso.best is not None
    *lines, best = ax.lines
    columns = {tuple(column) for column in lasso.coefs[::-1].T.tolist()}
    assert {tuple(line.get_ydata().tolist()) for line in lines} == columns
    assert all(line.get_xdata().tolist() == lasso.strengths[::-1].tolist() for line in lines)
    assert best.get_xdata() == [lasso.strengths[lasso.best]] * 2
    largest = np.argsort(-np.abs(lasso.coefs).max(0), kind="stable")[:6]
    assert [line.get_label() for line in lines][:6] == lasso.feature_names[largest].tolist()
    top = [int(label.get_text()) for label in ax.child_axes[0].get_xticklabels()]
    assert (top[0], top[-1]) == (lasso.nonzeros[-1], 0)


def test_path_over_keeps_of_several_classes_is_drawn_over_numbers_or_shares() -> None:
    X, y = load_iris(return_X_y=True)
    path = ProxClassifier().path(X, y, keeps=[3, 1])
    ax = plot.path(path)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("number to keep", "norm of coefficients")
    assert sum(any(line.get_ydata()) for line in ax.lines) == 3
    assert plot.path(ProxClassifier().path(X, y, keeps=[0.75, 0.25])).get_xlabel() == "share to keep"


def test_draws_coefficients_over_rising_strengths() -> None:
    ax = plot.path(make())
    assert all(line.get_xdata().tolist() == [0.01, 0.1, 1.0] for line in ax.lines)
    assert drawn(ax) == {"input 0": [0.9, 0.5, 0.0], "input 2": [-2.0, 0.0, 0.0]}
    assert len(ax.lines) == 3  # with the one that stays at zero
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "strength", "coefficient")


def test_top_says_how_many_inputs_are_in_use() -> None:
    ax = plot.path(make())
    ax.figure.canvas.draw()
    (top,) = ax.child_axes
    assert [label.get_text() for label in top.get_xticklabels()] == ["2", "1", "0"]
    assert top.get_xticks().tolist() == [0.01, 0.1, 1.0]
    assert top.get_xlabel() == "inputs in use"


def test_long_path_has_few_numbers_at_the_top() -> None:
    values = np.geomspace(1, 0.001, 100)
    ax = plot.path(make(values=values, coefs=np.ones((100, 2)), nonzeros=np.arange(100)))
    labels = [label.get_text() for label in ax.child_axes[0].get_xticklabels()]
    assert (len(labels), labels[0], labels[-1]) == (6, "99", "0")


def test_names_and_best_are_in_the_legend() -> None:
    ax = plot.path(make(feature_names=["age", "sex", "bmi"], best=1))
    (legend,) = ax.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["bmi", "age", "best in cross-validation"]
    (line,) = (line for line in ax.lines if line.get_linestyle() == "--")
    assert line.get_xdata() == [0.1, 0.1]


def test_names_are_shown_literally_and_short() -> None:
    names = ["from_$_to_$", "_private", "a_feature_with_a_very_long_name"]
    ax = plot.path(make(coefs=np.array([[1.0, 2.0, 3.0]] * 3), feature_names=names))
    ax.figure.canvas.draw()
    (legend,) = ax.figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["a_feature_w…y_long_name", "\u200b_private", r"from_\$_to_\$"]


def test_counts_have_whole_ticks() -> None:
    ax = plot.path(make(parameter="keep", values=np.array([3, 2, 1])))
    assert all(tick == round(tick) for tick in ax.get_xticks())


def test_share_to_keep_has_a_linear_axis_unless_it_is_wide() -> None:
    near = plot.path(make(parameter="keep", values=[0.5, 0.25, 0.1]))
    assert (near.get_xscale(), near.get_xlabel()) == ("linear", "share to keep")
    assert plot.path(make(parameter="keep", values=[1.0, 0.1, 0.01])).get_xscale() == "log"


def test_strength_of_zero_has_a_linear_axis() -> None:
    assert plot.path(make(values=[1.0, 0.5, 0.0])).get_xscale() == "linear"


def test_several_outputs_are_drawn_as_norms() -> None:
    coefs = np.array([[[3.0, 0.0], [4.0, 1.0]]])
    ax = plot.path(make(values=[0.1], coefs=coefs, nonzeros=[2]))
    assert drawn(ax) == {"input 0": [5.0], "input 1": [1.0]}
    assert ax.get_ylabel() == "norm of coefficients"
    assert ax.lines[0].get_marker() == "o"


def test_only_the_largest_coefficients_have_colours() -> None:
    coefs = np.outer([0.0, 1.0], np.arange(1.0, 11.0))
    ax = plot.path(make(values=[1.0, 0.1], coefs=coefs))
    assert list(drawn(ax)) == [f"input {column}" for column in (9, 8, 7, 6, 5, 4)]
    assert len({line.get_color() for line in ax.lines}) == 7


@pytest.mark.parametrize(
    "path",
    [
        make(values=[], coefs=np.zeros((0, 3)), nonzeros=[]),
        make(values=[1.0, 0.5], coefs=np.zeros((2, 0)), nonzeros=[0, 0]),
        make(coefs=np.zeros((3, 4)), best=0),
        make(values=[0.1, 0.1, 0.1]),
    ],
    ids=["no models", "no inputs", "all zero", "one strength"],
)
def test_empty_and_constant_paths_are_drawn(path: Any) -> None:
    for ax in (None, Figure().subplots()):
        plot.path(path, ax=ax).figure.canvas.draw()


def test_draws_on_the_axes_that_it_is_given() -> None:
    figure = Figure()
    ax = figure.subplots()
    assert plot.path(make(), ax=ax) is ax
    assert figure.legends == []
    assert plt.get_fignums() == []
    plot.path(make())
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize(
    ("of", "ax", "error", "message"),
    [
        ([0.1], None, TypeError, "of must be a path with parameter, values, coefs, nonzeros, got list"),
        (make(values=[1.0]), None, ValueError, "of must have as many coefs and nonzeros as values, got 3 and 3 for 1"),
        (make(), "ax", TypeError, "ax must be an Axes of matplotlib, got str"),
    ],
)
def test_bad_arguments_are_refused(of: Any, ax: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plot.path(of, ax=ax)
    assert plt.get_fignums() == []
