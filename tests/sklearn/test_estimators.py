"""Estimators: objectives of scikit-learn's solvers, counts that are met, units, sparse input, streams, paths."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from benchmarks.l1_logistic import l1_logistic_regression
from numpy.typing import NDArray
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_iris,
    load_wine,
    make_blobs,
    make_regression,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import SelectFromModel
from sklearn.linear_model import Lasso, MultiTaskLasso
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import proxmo
from proxmo.sklearn import ProxClassifier, ProxClassifierCV, ProxRegressor, ProxRegressorCV
from proxmo.sklearn.inputs import Columns, Inputs
from proxmo.sklearn.units import InUnits

Array = NDArray[Any]


def lasso_objective(model: Any, X: Any, y: Array, strength: float) -> float:
    return float(np.square(y - model.predict(X)).mean() / 2 + strength * np.abs(model.coef_).sum())


def logistic_objective(model: Any, X: Any, y: Array, strength: float) -> float:
    losses = -model.predict_log_proba(X)[np.arange(len(y)), y]
    return float(losses.mean() + strength * np.abs(model.coef_).sum())


def disagreements(model: Any, other: Any) -> int:
    return int(((model.coef_ != 0) != (np.abs(other.coef_) > 1e-9)).sum())


@pytest.mark.parametrize("strength", [1.0, 0.1, 0.01])
def test_regression_reaches_the_objective_of_lasso(strength: float) -> None:
    X, y = load_diabetes(return_X_y=True)
    model = ProxRegressor(strength=strength).fit(X, y)
    lasso = Lasso(alpha=strength, tol=1e-10, max_iter=100_000).fit(X, y)
    assert lasso_objective(model, X, y, strength) <= (1 + 1e-6) * lasso_objective(lasso, X, y, strength)
    assert disagreements(model, lasso) == 0


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine, load_iris])
def test_l1_classification_reaches_the_objective_of_saga(load: Any) -> None:
    X, y = load(return_X_y=True)
    X, strength = StandardScaler().fit_transform(X), 0.01
    model = ProxClassifier("l1", strength=strength).fit(X, y)
    saga = l1_logistic_regression(strength, len(y), solver="saga", tol=1e-6, max_iter=20_000, random_state=0).fit(X, y)
    assert logistic_objective(model, X, y, strength) <= (1 + 1e-6) * logistic_objective(saga, X, y, strength)
    assert disagreements(model, saga) <= 1


def test_several_targets_reach_the_objective_of_multi_task_lasso() -> None:
    X, Y = make_regression(60, 12, n_informative=5, n_targets=3, noise=1.0, random_state=0)
    model = ProxRegressor(strength=5.0).fit(X, Y)
    other = MultiTaskLasso(alpha=5.0, tol=1e-10, max_iter=10_000).fit(X, Y)
    np.testing.assert_allclose(model.coef_, other.coef_, atol=1e-3)
    assert model.coef_.shape == (3, 12)
    assert model.intercept_.shape == (3,)


def test_badly_scaled_columns_reach_the_objective_of_lasso() -> None:
    random = np.random.RandomState(0)
    X, y = make_regression(100, 20, n_informative=8, noise=5.0, random_state=0)
    X = X * 10.0 ** random.uniform(-4, 4, 20) + 10.0 ** random.uniform(-2, 2, 20)
    strength = 0.01 * np.abs((X - X.mean(0)).T @ (y - y.mean())).max() / len(y)
    model = ProxRegressor(strength=strength).fit(X, y)
    lasso = Lasso(alpha=strength, tol=1e-10, max_iter=1_000_000).fit(X, y)
    assert lasso_objective(model, X, y, strength) <= (1 + 1e-6) * lasso_objective(lasso, X, y, strength)
    assert model.n_iter_ < 200


def test_float32_reaches_the_same_objective() -> None:
    X, y = load_diabetes(return_X_y=True)
    narrow = ProxRegressor(strength=0.1).fit(X.astype(np.float32), y)
    wide = ProxRegressor(strength=0.1).fit(X, y)
    assert narrow.coef_.dtype == np.float32
    assert lasso_objective(narrow, X, y, 0.1) <= (1 + 1e-5) * lasso_objective(wide, X, y, 0.1)


def test_constant_columns_get_no_weight() -> None:
    X, y = load_diabetes(return_X_y=True)
    constant = np.c_[X, np.full(len(y), 0.1), np.zeros(len(y))]
    model = ProxRegressor(None).fit(constant, y)
    assert model.coef_[-2:].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(model.predict(constant), ProxRegressor(None).fit(X, y).predict(X), rtol=1e-3)


@pytest.mark.parametrize("hidden", [(), (5,)])
def test_sparse_and_dense_inputs_give_the_same_model(hidden: tuple[int, ...]) -> None:
    full = sp.random(60, 30, 0.1, format="csr", random_state=0)
    X = (sp.diags((np.arange(60) % 9 > 0).astype(float)) @ full).tocsr()  # with empty rows
    y = np.asarray(X[:, :4].sum(1)).ravel() > 0.1
    options = {"hidden": hidden, "max_iter": 5 if hidden else None, "random_state": 0, "strength": 0.01}
    dense, sparse = (ProxClassifier(**options).fit(inputs, y) for inputs in (X.toarray(), X))
    for one, other in zip(dense.coefs_, sparse.coefs_, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
    np.testing.assert_allclose(dense.predict_proba(X.toarray()), sparse.predict_proba(X), atol=1e-9)


def test_columns_of_sparse_and_dense_matrices_are_measured_alike() -> None:
    X = sp.random(40, 6, 0.3, format="csr", random_state=1)
    weights = np.random.RandomState(0).dirichlet(np.ones(40))
    for center in (True, False):
        for a, b in zip(
            Columns.of(X, weights, center=center), Columns.of(X.toarray(), weights, center=center), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=1e-14)
    columns = Columns.of(X, weights, center=True)
    v, slopes = torch.randn(2, 6, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    dense, sparse = Inputs.of(X.toarray(), columns), Inputs.of(X, columns)
    torch.testing.assert_close(dense.times(v), sparse.times(v))
    torch.testing.assert_close(dense.pull_back(slopes), sparse.pull_back(slopes))


def test_penalty_in_units_has_the_prox_of_its_value() -> None:
    unit = torch.tensor([[0.1, 1.0, 20.0]], dtype=torch.float64)
    penalty = InUnits(proxmo.L1(0.3), [unit])
    x, step = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64), 0.2
    torch.testing.assert_close(penalty.prox(x, step), x.sign() * (x.abs() - step * 0.3 * unit).relu())
    torch.testing.assert_close(penalty.value(x), 0.3 * (x * unit).abs().sum())


def test_keep_is_met_whatever_the_units() -> None:
    X, y = load_diabetes(return_X_y=True)
    model = ProxRegressor(keep=3).fit(X, y)
    assert model.selected_.sum() == 3
    rescaled = ProxRegressor(keep=3).fit(X * np.where(np.arange(10) % 2, 1e4, 1e-4), y)
    np.testing.assert_array_equal(model.selected_, rescaled.selected_)
    rest = ProxRegressor(None).fit(X[:, model.selected_], y)  # what is kept is not shrunk
    np.testing.assert_allclose(model.predict(X), rest.predict(X[:, model.selected_]), rtol=1e-3)


def test_network_keeps_a_share_of_inputs_or_weights() -> None:
    X, y = load_digits(return_X_y=True)
    X, y = X[:400], y[:400]
    inputs = ProxClassifier(keep=0.25, hidden=(16,), max_iter=20, random_state=0).fit(X, y)
    assert inputs.selected_.sum() == 16
    assert inputs.score(X, y) > 0.9
    weights = ProxClassifier("l1", keep=0.25, hidden=16, max_iter=20, random_state=0).fit(X, y)
    assert weights.sparsity_ == pytest.approx(0.75, abs=1e-3)
    with pytest.raises(AttributeError, match="coefs_"):
        _ = weights.coef_


def test_network_fits_targets_of_any_scale() -> None:
    X, y = make_regression(200, 5, noise=1.0, random_state=0)
    model = ProxRegressor(hidden=(16,), max_iter=60, random_state=0).fit(X * 1e3, y * 1e6 + 1e8)
    assert model.score(X * 1e3, y * 1e6 + 1e8) > 0.95


@pytest.mark.parametrize(
    "penalty",
    [
        proxmo.MCP(0.01, 100.0),
        proxmo.L0(1e-3),
        proxmo.Nuclear(0.01),
        proxmo.SparseGroup(0.001, 0.01, dim=1),
        proxmo.L1Ball(5.0),
        proxmo.TopK(20),
        proxmo.Trimmed(proxmo.L1(0.1), 20),
        proxmo.Rank(1),
        None,
    ],
)
def test_every_penalty_only_lowers_the_objective(penalty: Any) -> None:
    X, y = load_wine(return_X_y=True)
    with pytest.warns(ConvergenceWarning):
        model = ProxClassifier(penalty, max_iter=15).fit(X, y)
    assert np.isfinite(model.loss_curve_).all()
    assert (np.diff(model.loss_curve_) <= 0).all()
    assert model.score(X, y) > 0.6


@pytest.mark.parametrize("penalty", [proxmo.L0(100.0), proxmo.TopK(3), proxmo.LHalf(5.0)])
def test_steps_with_momentum_that_raise_the_objective_are_taken_back(penalty: Any) -> None:
    X, y = load_diabetes(return_X_y=True)
    curve = ProxRegressor(penalty, max_iter=200).fit(X, y).loss_curve_
    assert (np.diff(curve) <= 1e-10 * curve[0]).all()


def test_class_weights_and_sample_weights_multiply() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    one = ProxClassifier(strength=0.1, class_weight={0: 3.0}).fit(X, y)
    other = ProxClassifier(strength=0.1).fit(X, y, sample_weight=np.where(y == 0, 3.0, 1.0))
    np.testing.assert_allclose(one.coef_, other.coef_)
    assert not np.allclose(one.coef_, ProxClassifier(strength=0.1).fit(X, y).coef_)


def test_losses_of_users_are_minimised() -> None:
    X, y = load_diabetes(return_X_y=True)
    own = ProxRegressor(strength=0.1, loss=lambda f, t: ((f - t) ** 2 / 2)[:, 0]).fit(X, y)
    np.testing.assert_allclose(own.coef_, ProxRegressor(strength=0.1).fit(X, y).coef_, rtol=1e-6)
    with pytest.raises(ValueError, match="one number per sample"):
        ProxRegressor(loss=lambda f, t: (f - t).square().mean()).fit(X, y)


def test_huber_ignores_outliers() -> None:
    X, y = make_regression(100, 5, noise=0.1, random_state=0)
    y[:5] += 1e5
    model = ProxRegressor(loss="huber").fit(X, y)
    assert np.abs(model.predict(X) - y)[5:].max() < 1


def test_squared_hinge_has_no_probabilities() -> None:
    X, y = load_iris(return_X_y=True)
    model = ProxClassifier(loss="squared_hinge").fit(X, y)
    assert model.score(X, y) > 0.9
    assert not hasattr(model, "predict_proba")


def test_stream_learns_and_goes_on_after_pickling_and_after_fit() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    stream = ProxClassifier(random_state=0, strength=0.01)
    for k in range(0, 500, 100):
        stream = pickle.loads(pickle.dumps(stream.partial_fit(X[k : k + 100], y[k : k + 100], classes=[0, 1])))
    assert stream.n_iter_ == 5
    assert stream.score(X, y) > 0.9
    fitted = ProxClassifier(strength=0.01, random_state=0).fit(X, y)
    before = fitted.predict_proba(X)
    np.testing.assert_allclose(fitted.partial_fit(X[:64], y[:64]).predict_proba(X), before, atol=0.1)
    with pytest.raises(ValueError, match="classes must be passed"):
        ProxClassifier().partial_fit(X, y)


def test_early_stopping_ends_early_and_is_reproducible() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    options = {"early_stopping": True, "max_iter": 60, "n_iter_no_change": 3, "tol": 0.01, "random_state": 0}
    one, other = (ProxClassifier(**options).fit(X, y) for _ in range(2))
    assert one.n_iter_ < 60
    assert one.score(X, y) > 0.9
    np.testing.assert_array_equal(one.coef_, other.coef_)


@pytest.mark.parametrize("hidden", [(), (8,)])
def test_early_stopping_waits_until_inputs_have_left(hidden: tuple[int, ...]) -> None:
    X, y = load_breast_cancer(return_X_y=True)
    options = {"early_stopping": True, "max_iter": 20, "n_iter_no_change": 1, "tol": 0.5, "random_state": 0}
    model = ProxClassifier(keep=3, hidden=hidden, **options).fit(StandardScaler().fit_transform(X), y)
    assert 20 // 2 < model.n_iter_ < 20
    assert model.selected_.sum() == 3


def test_path_starts_without_inputs_and_equals_single_fits() -> None:
    X, y = load_diabetes(return_X_y=True, as_frame=True)
    path = ProxRegressor().path(X, y, strengths=5, cv=3)
    assert path.nonzeros[0] == 0
    assert path.nonzeros[1] > 0
    assert path.strengths is not None
    assert path.scores is not None
    assert path.feature_names is not None
    assert path.coefs.shape == (5, 10)
    np.testing.assert_allclose(path.strengths[-1] / path.strengths[0], 1e-3)
    single = ProxRegressor(strength=path.strengths[2]).fit(X, y)
    assert path.objectives[2] == pytest.approx(lasso_objective(single, X, y.to_numpy(), path.strengths[2]), rel=1e-6)
    assert path.best == np.argmax(path.scores[0])
    assert list(path.feature_names) == list(X.columns)


def test_path_over_keeps_uses_as_many_inputs() -> None:
    X, y = load_wine(return_X_y=True)
    path = ProxClassifier().path(X, y, keeps=[2, 8, 4])
    assert path.nonzeros.tolist() == [8, 4, 2]
    assert path.coefs.shape == (3, 3, 13)
    assert (np.diff(path.losses) > 0).all()


def test_path_refuses_what_it_cannot_do() -> None:
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match="strengths or keeps"):
        ProxClassifier().path(X, y)
    with pytest.raises(ValueError, match="leaves inputs out"):
        ProxClassifier(proxmo.SquaredL2(1.0)).path(X, y, strengths=3)


def test_cross_validated_estimators_take_the_best_value() -> None:
    X, y = load_diabetes(return_X_y=True)
    model = ProxRegressorCV(strengths=[100.0, 0.1], cv=3).fit(X, y)
    assert model.best_ == 0.1
    np.testing.assert_allclose(model.coef_, ProxRegressor(strength=0.1).fit(X, y).coef_)
    X, y = load_iris(return_X_y=True)
    classifier = ProxClassifierCV(ProxClassifier("l1"), keeps=[6, 1], cv=3, scoring="neg_log_loss").fit(X, y)
    assert classifier.best_ == 6
    assert np.count_nonzero(classifier.coef_) == 6
    with pytest.raises(TypeError, match="estimator"):
        ProxRegressorCV(ProxClassifier()).fit(X, y)


def test_works_in_pipelines_grids_and_selection() -> None:
    X, y = load_wine(return_X_y=True, as_frame=True)
    pipeline = make_pipeline(StandardScaler(), ProxClassifier())
    grid = GridSearchCV(pipeline, {"proxclassifier__strength": [1.0, 0.01]}, cv=3).fit(X, y)
    assert grid.best_params_ == {"proxclassifier__strength": 0.01}
    assert pickle.loads(pickle.dumps(grid)).score(X, y) == grid.score(X, y)
    selection = SelectFromModel(ProxClassifier(keep=4), threshold=1e-12).fit(X, y)
    assert len(selection.get_feature_names_out()) == 4


@pytest.mark.parametrize(
    "options", [{"strength": 0.1}, {"keep": 2}, {"hidden": (4,), "max_iter": 2}, {"early_stopping": True}]
)
def test_verbose_shows_progress_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    X, y = load_iris(return_X_y=True)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        ProxClassifier(verbose=1, random_state=0, **options).fit(X, y)
        assert all(name in stream.getvalue() for name in ("####", "loss", "zeros", "inputs")) == shown
        assert shown or not stream.getvalue()


def test_progress_of_linear_models_ends_at_100_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[int] = []
    monkeypatch.setattr(proxmo.progress.Progress, "reach", lambda self, steps: reached.append(steps))
    X, y = load_diabetes(return_X_y=True)
    ProxRegressor(strength=0.1).fit(X, y)
    assert reached[0] < 20
    assert reached[-1] == 100
    assert any(30 < steps < 70 for steps in reached)


def test_fit_ends_where_rounding_hides_the_rest() -> None:
    """Here the estimated gap never falls below the default tolerance: F is exact long before."""
    X, y = make_blobs(n_samples=21, random_state=0)
    assert ProxClassifier().fit(X - X.min(), y).n_iter_ < 1000


def test_small_losses_of_large_outputs_are_minimised_beyond_their_rounding() -> None:
    """Separable classes: the loss is small, but its rounding is that of the outputs."""
    random = np.random.RandomState(5)
    X, y, weights = random.rand(15, 30), random.randint(0, 3, 15), random.randint(0, 5, 15)
    weighted = ProxClassifier(tol=1e-12).fit(X, y, weights)
    repeated = ProxClassifier(tol=1e-12).fit(X.repeat(weights, axis=0), y.repeat(weights))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-9)


def test_one_weight_for_all_samples_changes_no_score() -> None:
    X, y = make_blobs(n_samples=30, random_state=0)
    plain, weighted = (
        ProxClassifier().path(X, y, strengths=[0.1], cv=2, sample_weight=weight) for weight in (None, 2.0)
    )
    assert plain.scores is not None
    assert weighted.scores is not None
    assert np.array_equal(plain.scores, weighted.scores)
