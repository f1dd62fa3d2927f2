"""plot.history: it draws the numbers that a run recorded, whatever run it is."""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import proxmo
from proxmo import plot

RUN = {
    "step": [10, 20, 30],
    "loss": [0.9, 0.5, 0.4],
    "penalty": [1.0, 2.0, 0.5],
    "zeros": [0.0, 0.1, 0.2],
    "kept": [1.0, 0.5, 0.25],
    "keep": [1.0, 0.4, 0.25],
}


def drawn(ax: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.lines}


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_draws_every_column_over_the_steps() -> None:
    loss, penalty, shares = plot.history(RUN)
    steps = [10.0, 20.0, 30.0]
    assert drawn(loss) == {"loss": (steps, RUN["loss"])}
    assert drawn(penalty) == {"ψ": (steps, RUN["penalty"])}
    assert drawn(shares) == {
        "to keep": (steps, RUN["keep"]),
        "groups left": (steps, RUN["kept"]),
        "zeros": (steps, RUN["zeros"]),
    }
    assert [ax.get_ylabel() for ax in (loss, penalty, shares)] == ["loss", "penalty ψ", "share"]
    assert shares.get_xlabel() == "step"
    colours = {line.get_color() for ax in (loss, penalty, shares) for line in ax.lines}
    assert len(colours) == 5


def make_run(steps: int) -> tuple[proxmo.KeepScheduler, proxmo.criteria.Monitor]:
    x = torch.arange(1.0, 9.0)[:, None].requires_grad_()
    optimizer = proxmo.ProxSGD([x], lr=0.1, penalty=proxmo.Trimmed(proxmo.GroupL2(0.0), keep=1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = x.square().sum() / 2
        value.backward()
        return value

    scheduler = proxmo.KeepScheduler(optimizer, 0.25, 20)
    monitor = proxmo.criteria.Monitor(optimizer, closure)
    for step in range(steps):
        if step % 4 == 0:
            monitor.record()
        value = closure()
        optimizer.step()
        scheduler.step(value)
    return scheduler, monitor


def test_schedulers_histories_monitors_and_reports_are_runs() -> None:
    scheduler, monitor = make_run(20)
    report = proxmo.ShrinkReport(
        0.25, (8, 2), proxmo.CompactionReport((1, 1), (1, 1), {}, 0.0, []), (1, 1), (1.0, 1.0), None, scheduler.history
    )
    of_scheduler, of_history, of_report = map(plot.history, (scheduler, scheduler.history, report))
    for one, another, third in zip(of_scheduler, of_history, of_report, strict=True):
        assert drawn(one) == drawn(another) == drawn(third)
    loss, _, shares = plot.history(monitor)
    assert drawn(loss)["loss"] == ([0, 4, 8, 12, 16], monitor.arrays()["loss"].tolist())
    assert set(drawn(shares)) == {"groups left", "zeros"}
    assert drawn(shares)["groups left"][1] == monitor.arrays()["kept"].tolist()
    assert drawn(shares)["groups left"][1][-1] == 0.25


def test_runs_without_finite_numbers_say_so() -> None:
    loss, penalty, _ = plot.history({"loss": [math.nan, math.inf]})
    assert (texts(loss), texts(penalty)) == (["not finite"], ["not recorded"])


@pytest.mark.parametrize("run", [{}, {"loss": []}, proxmo.History(), {"loss": [math.nan]}])
def test_empty_run_is_drawn(run: Any) -> None:
    axes = plot.history(run)
    axes[0].figure.canvas.draw()
    assert [texts(ax) for ax in axes] == [["not recorded"]] * 3


def test_constant_run_and_single_point_are_drawn() -> None:
    for run in ({"loss": [0.5] * 9, "penalty": [0.0] * 9, "kept": [1.0] * 9}, {"loss": [0.5], "zeros": [1.0]}):
        axes = plot.history(run)
        axes[0].figure.canvas.draw()
        assert drawn(axes[0])["loss"][1] == run["loss"]
        assert axes[0].get_yscale() == "linear"
    assert axes[0].lines[0].get_marker() == "o"  # a line of one point would not be seen


def test_infinite_penalty_is_left_out() -> None:
    _, penalty, _ = plot.history({"penalty": [math.inf, 0.0, 1.0]})
    assert str(drawn(penalty)["ψ"][1]) == "[nan, 0.0, 1.0]"


def test_unknown_values_are_skipped_and_single_points_are_marked() -> None:
    loss, penalty, _ = plot.history({"loss": [1.0, math.nan, 0.5, math.nan], "penalty": [1.0, math.inf, 2.0, 3.0]})
    assert drawn(loss)["loss"] == ([0.0, 2.0], [1.0, 0.5])
    assert not loss.lines[0].get_marker()
    assert (penalty.lines[0].get_marker(), penalty.lines[0].get_markevery()) == ("o", [0])


def test_long_noisy_loss_has_a_running_mean() -> None:
    values = 1 + np.random.default_rng(0).normal(size=1000)
    raw, mean = plot.history({"loss": values})[0].lines
    assert raw.get_ydata().tolist() == values.tolist()
    assert raw.get_alpha() < 1
    assert mean.get_xdata().tolist() == raw.get_xdata().tolist()
    np.testing.assert_allclose(mean.get_ydata()[500], values[480:521].mean())
    assert np.ptp(mean.get_ydata()) < 0.3 * np.ptp(values)


def test_running_mean_of_a_line_is_that_line_and_leaves_other_runs_alone() -> None:
    falling = np.linspace(1, 0.5, 500)
    axes = plot.history({"loss": falling, "phase": ["warm-up"] * 500})
    np.testing.assert_allclose(axes[0].lines[1].get_ydata(), falling)
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["loss", "running mean"]
    plot.history({"loss": falling + 1}, ax=axes)
    assert [line.get_label() for line in axes[0].lines] == ["loss", "running mean"] * 2


@pytest.mark.parametrize(
    ("losses", "scale"), [([100.0, 10.0, 0.5], "log"), ([1.0, 0.5, 0.0], "linear"), ([2.0, 1.0], "linear")]
)
def test_wide_losses_have_a_log_axis(losses: list[float], scale: str) -> None:
    assert plot.history({"loss": losses})[0].get_yscale() == scale


def test_draws_on_the_axes_that_it_is_given() -> None:
    axes = Figure().subplots(1, 3)
    assert list(plot.history(RUN, ax=axes)) == list(axes)
    assert plt.get_fignums() == []


def test_opens_one_figure_without_axes() -> None:
    plot.history(RUN)
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize(
    ("run", "ax", "error", "message"),
    [
        ([0.5, 0.4], None, TypeError, "run must be a KeepScheduler, .*, got list"),
        ({"Loss": [1.0]}, None, ValueError, "run must have some of the columns loss, .*, got Loss"),
        ({"loss": 3.0}, None, ValueError, r"run must have a sequence of numbers as 'loss', got an array of shape \(\)"),
        ({"loss": ["a"]}, None, ValueError, "run must have a sequence of numbers as 'loss': could not convert"),
        ({"loss": [1.0], "step": [1, 2]}, None, ValueError, "run must have columns of one length, got {'step': 2, "),
        (RUN, Figure().subplots(), TypeError, "ax must be 3 Axes of matplotlib, for loss, penalty, shares, got"),
    ],
)
def test_bad_arguments_are_refused(run: Any, ax: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plot.history(run, ax=ax)
    assert plt.get_fignums() == []


def test_numbers_are_not_changed() -> None:
    losses = np.array([1.0, math.inf])
    plot.history({"loss": losses})
    assert losses.tolist() == [1.0, math.inf]
