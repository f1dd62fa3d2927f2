"""Weights of the inputs that `keep` leaves: accurate for nearly collinear inputs, and never worse than before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.utils.estimator_checks import check_sample_weight_equivalence_on_sparse_data

from proxmo.sklearn import ProxRegressor
from proxmo.sklearn.full_batch import Objective, minimize
from proxmo.sklearn.goals import Goal
from proxmo.sklearn.linear import LinearFit


def test_correlated_inputs_of_many_samples_are_told_apart_in_float32() -> None:
    z, e = np.random.RandomState(0).randn(2, 100_000)
    X = np.c_[z, 0.9999 * z + np.sqrt(1 - 0.9999**2) * e].astype(np.float32)
    y = 10 * (X[:, 0] - X[:, 1])
    np.testing.assert_allclose(ProxRegressor(keep=2).fit(X, y).coef_, [10, -10], rtol=1e-3)


def test_equal_inputs_share_their_weight() -> None:
    x = np.random.RandomState(0).randn(1000)
    for dtype in (np.float32, np.float64):
        np.testing.assert_allclose(ProxRegressor(keep=2).fit(np.c_[x, x].astype(dtype), x).coef_, 0.5, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_directions_below_rounding_are_not_lost_if_the_start_has_them() -> None:
    """Among 100 columns, rounding may hide what the difference of two columns here still shows."""
    random = np.random.RandomState(0)
    X, e = random.randn(1000, 100), random.randn(1000)
    X[:, 1] = X[:, 0] + 1e-6 * e
    X = X.astype(np.float32)
    signal = 1e6 * (X[:, 1].astype(np.float64) - X[:, 0])
    fit = ProxRegressor(max_iter=39)._fitter(X, (signal + 0.3 * X[:, 2])[:, None], np.ones(1000))
    assert isinstance(fit, LinearFit)
    fit.point = fit.null.clone()
    fit.point[0, :2] = torch.tensor([-1e6, 1e6])
    objective = Objective(fit._problem, None)
    before, _ = objective.slopes(objective.outputs(fit.point))
    assert before < 0.1
    assert fit.fit(Goal.of("inputs", None, 100)).loss <= before


def test_first_step_does_not_raise_the_objective() -> None:
    """From the flat top of a loss that is not convex, the first step is far too long."""
    X = np.array([[1.0], [-1.0]])
    loss = lambda f, t: 1 - (f - t).cos()  # noqa: E731
    fit = ProxRegressor(loss=loss, fit_intercept=False)._fitter(X, np.array([[1.7], [-1.7]]), np.ones(2))
    assert isinstance(fit, LinearFit)
    objective = Objective(fit._problem, None)
    for start in np.linspace(0, 6, 61):
        point = torch.tensor([[start, 0.0]], dtype=torch.float64)
        before, _ = objective.slopes(objective.outputs(point))
        assert minimize(objective, point, fit.null, tol=1e-8, max_iter=1).value <= before + 1e-9


def test_weights_of_samples_equal_repeated_samples_after_a_refit() -> None:
    check_sample_weight_equivalence_on_sparse_data("ProxRegressor", ProxRegressor(keep=2))  # to seven digits
