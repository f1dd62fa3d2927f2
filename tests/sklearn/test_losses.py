"""Losses: of every scale, of one's own, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import Lasso, PoissonRegressor

from proxmo.sklearn import ProxClassifier, ProxRegressor

Array = NDArray[Any]


@pytest.fixture
def diabetes() -> tuple[Array, Array]:
    X, y = load_diabetes(return_X_y=True)
    return X, y


def deviance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of Poisson regression with a log link."""
    return outputs.exp() - targets * outputs


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-12, 1e6, 1e20])
@pytest.mark.parametrize("options", [{}, {"loss": lambda f, t: (f - t).square() / 2}])
def test_targets_may_have_any_scale(diabetes: tuple[Array, Array], dtype: Any, scale: float, options: Any) -> None:
    if dtype == np.float32 and scale == 1e20:
        pytest.skip("squares of such targets are not finite in float32")
    X, y = diabetes
    model = ProxRegressor(strength=1e-3 * scale, **options).fit(X.astype(dtype), y * scale)
    lasso = Lasso(alpha=1e-3).fit(X, y)
    assert model.score(X, y * scale) == pytest.approx(lasso.score(X, y), abs=1e-4)


def test_huge_targets_and_kept_inputs_are_fitted(diabetes: tuple[Array, Array]) -> None:
    X, y = diabetes
    assert ProxRegressor(keep=5).fit(X.astype(np.float32), y * 1e8).score(X, y * 1e8) > 0.49
    nanoseconds = (1.7e18 + 1e13 * y).astype(np.int64)
    assert ProxRegressor().fit(X, nanoseconds).score(X, nanoseconds) > 0.5


def test_outliers_of_huber_do_not_end_the_fit(diabetes: tuple[Array, Array]) -> None:
    """All residuals are outliers, and the first gradient is short compared with the way to go."""
    X, y = diabetes
    with pytest.warns(ConvergenceWarning):  # the loss is nearly that of absolute errors, which is not smooth
        model = ProxRegressor(loss="huber", max_iter=500).fit(X, y * 1e9)
    assert model.score(X, y * 1e9) > 0.5


def test_long_steps_do_not_end_a_fit_whatever_the_tolerance(diabetes: tuple[Array, Array]) -> None:
    """The distance from the model without inputs, which the estimated gap is relative to, still grows then."""
    X, y = diabetes
    rough, fine = (ProxRegressor(None, loss="huber", tol=tol).fit(X, y) for tol in (0.5, 1e-3))
    assert rough.n_iter_ < fine.n_iter_
    assert rough.loss_curve_[-1] < 1.01 * fine.loss_curve_[-1]


@pytest.mark.parametrize("loss", ["squared_error", "huber"])
def test_mean_of_targets_costs_no_digits(diabetes: tuple[Array, Array], loss: str) -> None:
    X, y = diabetes
    near, far = (ProxRegressor(loss=loss, strength=0.1).fit(X.astype(np.float32), y + c) for c in (0.0, 1e7))
    np.testing.assert_allclose(far.coef_, near.coef_, rtol=1e-2, atol=0.1)
    before = far.score(X, y + 1e7)
    for part in (slice(0, 200), slice(200, 442)):
        far.partial_fit(X[part].astype(np.float32), y[part] + 1e7)
    assert far.score(X, y + 1e7) > before - 0.1


@pytest.mark.parametrize("mean", [0.5, 4.1, 6.7])
def test_loss_with_log_link_reaches_poisson_regression(diabetes: tuple[Array, Array], mean: float) -> None:
    X = diabetes[0]
    counts = np.random.RandomState(0).poisson(np.exp(mean + X[:, 2] * 5)).astype(float)
    model = ProxRegressor(None, loss=deviance).fit(X, counts)
    other = PoissonRegressor(alpha=0, tol=1e-8, max_iter=10_000).fit(X, counts)
    np.testing.assert_allclose(model.coef_, other.coef_, atol=1e-2)
    network = ProxRegressor(hidden=8, loss=deviance, random_state=0, max_iter=60).fit(X, counts)
    null = np.mean(counts.mean() - counts * np.log(counts.mean()))
    assert network.loss_curve_[-1] < null + 0.05 * abs(null)


def test_losses_of_other_types_are_converted(diabetes: tuple[Array, Array]) -> None:
    X, y = diabetes
    plain = ProxRegressor(strength=0.1, loss=lambda f, t: (f - t).square()).fit(X, y)
    narrow = ProxRegressor(strength=0.1, loss=lambda f, t: (f - t).square().float()).fit(X, y)
    np.testing.assert_allclose(narrow.coef_, plain.coef_, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda f, t: (f - t) * float("nan"), "loss must be finite"),
        (lambda f, t: (f.detach() - t).square(), "differentiable function of the outputs"),
        (lambda f, t: (f - t).long(), "differentiable function of the outputs"),
        (lambda f, t: (f - t).square().mean(), "one number per sample"),
    ],
)
@pytest.mark.parametrize("hidden", [(), (4,)])
def test_losses_that_cannot_be_minimised_are_refused(
    diabetes: tuple[Array, Array], loss: Any, message: str, hidden: Any
) -> None:
    X, y = diabetes
    for model, targets in ((ProxRegressor, y), (ProxClassifier, (y > 100).astype(int))):
        with pytest.raises(ValueError, match="no longer finite" if hidden and "finite" in message else message):
            model(loss=loss, hidden=hidden, max_iter=3).fit(X, targets)


@pytest.mark.parametrize("model", [ProxRegressor, ProxClassifier])
def test_class_of_losses_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"loss must be one of .* or a function of outputs and targets, got <class"):
        model(loss=torch.nn.MSELoss).fit([[0.0], [1.0]], [0, 1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("hidden", [(), (4,)])
def test_fits_under_modes_without_gradients(diabetes: tuple[Array, Array], mode: Any, hidden: Any) -> None:
    X, y = diabetes
    with mode():
        model = ProxRegressor(hidden=hidden, max_iter=300 if not hidden else 3, random_state=0).fit(X, y)
        model.partial_fit(X, y)
        path = ProxRegressor(hidden=hidden, max_iter=5 if hidden else None).path(X, y, strengths=[1.0])
    model.partial_fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    assert np.isfinite(path.losses).all()
