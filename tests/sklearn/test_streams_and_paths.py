"""Streams and paths: weights and parameters of all parts, counts that are met, warnings, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.preprocessing import StandardScaler

import proxmo
from proxmo.sklearn import ProxClassifier, ProxRegressor, ProxRegressorCV

Array = NDArray[Any]


@pytest.fixture
def diabetes() -> tuple[Array, Array]:
    X, y = load_diabetes(return_X_y=True)
    return X, y


@pytest.fixture
def cancer() -> tuple[Array, Array]:
    X, y = load_breast_cancer(return_X_y=True)
    return StandardScaler().fit_transform(X), y


def stream(X: Array, y: Array, count: int = 400, **options: Any) -> ProxClassifier:
    model = ProxClassifier(random_state=0, **options)
    for k in range(0, count, 50):
        model.partial_fit(X[k : k + 50], y[k : k + 50], classes=[0, 1])
    return model


def test_parts_of_a_stream_count_by_their_weights(cancer: tuple[Array, Array]) -> None:
    X, y = cancer
    moves = {}
    for weight in (1e-9, 1.0, 10.0):
        model = stream(X, y, strength=0.0)
        before = model.coef_
        model.partial_fit(X[400:450], 1 - y[400:450], sample_weight=np.full(50, weight))
        moves[weight] = np.abs(model.coef_ - before).max()
        assert 0.01 < model.loss_curve_[-1] < 10  # a mean, whatever the weights
    assert moves[1e-9] < 0.5 * moves[1.0] < 0.5 * moves[10.0]


def test_unit_of_the_weights_of_a_stream_does_not_matter(cancer: tuple[Array, Array]) -> None:
    X, y = cancer
    models = [ProxClassifier(random_state=0) for _ in range(2)]
    for k in range(0, 400, 100):
        for model, weight in zip(models, (1.0, 2.0**20), strict=True):
            rows = slice(k, k + 100)
            model.partial_fit(X[rows], y[rows], classes=[0, 1], sample_weight=np.full(100, weight))
    np.testing.assert_allclose(models[1].coef_, models[0].coef_, rtol=1e-12)
    np.testing.assert_allclose(models[1].loss_curve_, models[0].loss_curve_, rtol=1e-12)


def test_parts_of_a_stream_may_have_other_means(diabetes: tuple[Array, Array]) -> None:
    """Targets are taken as differences from one mean, unless the loss is one's own."""
    X, y = diabetes
    named, own = ProxRegressor(random_state=0), ProxRegressor(random_state=0, loss=lambda f, t: (f - t).square() / 2)
    for part in np.array_split(np.argsort(y), 3):
        for model in (named, own):
            model.partial_fit(X[part], y[part])
    np.testing.assert_allclose(named.predict(X), own.predict(X), rtol=1e-9)


def test_weight_of_a_class_counts_where_a_part_holds_one_class(cancer: tuple[Array, Array]) -> None:
    X, y = cancer
    models = []
    for factor in (1.0, 50.0):
        model = ProxClassifier(random_state=0, class_weight={1: factor})
        for k in range(200):
            model.partial_fit(X[k : k + 1], y[k : k + 1], classes=[0, 1])
        models.append(model)
    assert not np.allclose(models[0].coef_, models[1].coef_)
    assert models[1].predict(X).sum() > models[0].predict(X).sum()


def test_stream_takes_a_new_strength_and_refuses_a_new_architecture(cancer: tuple[Array, Array]) -> None:
    X, y = cancer
    model = stream(X, y)
    model.set_params(strength=1e6).partial_fit(X[:100], y[:100])
    assert not model.selected_.any()
    with pytest.raises(ValueError, match=r"hidden must stay \(\) in a stream, got \(5,\)"):
        model.set_params(hidden=5).partial_fit(X[:100], y[:100])
    with pytest.raises(ValueError, match="penalty must be of one kind"):
        model.set_params(hidden=(), penalty=None, strength=None).partial_fit(X[:100], y[:100])
    network = ProxClassifier(hidden=5, max_iter=1).fit(X, y).set_params(hidden=3)
    with pytest.raises(ValueError, match=r"hidden must stay \(5,\) in a stream, got \(3,\)"):
        network.partial_fit(X, y)


def test_stream_refuses_another_fit_intercept(cancer: tuple[Array, Array]) -> None:
    X, y = cancer
    for model in (stream(X, y), ProxClassifier().fit(X, y)):
        with pytest.raises(ValueError, match="fit_intercept must stay True in a stream, got False"):
            model.set_params(fit_intercept=False).partial_fit(X[:100], y[:100])
        model.set_params(fit_intercept=True).partial_fit(X[:100], y[:100])


@pytest.mark.parametrize("hidden", [(), (4,)])
def test_stream_goes_on_after_a_part_that_failed(diabetes: tuple[Array, Array], hidden: tuple[int, ...]) -> None:
    X, y = diabetes
    broken = np.where(np.arange(len(y)) == 7, 1e200, y)
    model = ProxRegressor(hidden=hidden, random_state=0, loss=lambda f, t: (f - t).square())
    with pytest.raises(ValueError, match="no longer finite"), np.errstate(over="ignore"):
        model.partial_fit(X[:, :5], broken)
    model.partial_fit(X, y)  # of another width
    before = model.predict(X)
    with pytest.raises(ValueError, match="no longer finite"), np.errstate(over="ignore"):
        model.partial_fit(X, broken)
    np.testing.assert_array_equal(model.predict(X), before)
    assert np.isfinite(model.partial_fit(X, y).predict(X)).all()
    assert model.n_iter_ == 2


def test_number_of_targets_of_a_stream_stays(diabetes: tuple[Array, Array]) -> None:
    X, y = diabetes
    Y = np.c_[y, -y]
    for model in (ProxRegressor().partial_fit(X, y), ProxRegressor().fit(X, y)):
        with pytest.raises(ValueError, match=r"as many targets as in the first call \(1\), got 2"):
            model.partial_fit(X, Y)
        assert model.partial_fit(X, y[:, None]).predict(X).shape == y.shape
    with pytest.raises(ValueError, match=r"as many targets as in the first call \(2\), got 1"):
        ProxRegressor().partial_fit(X, Y).partial_fit(X, y)


def test_classes_of_a_stream_are_two_or_more(cancer: tuple[Array, Array]) -> None:
    X, y = cancer
    with pytest.raises(ValueError, match="classes must have at least two classes, got one class: 1"):
        ProxClassifier().partial_fit(X[:9], [1] * 9, classes=[1])
    zeros = X[y == 0][:20]
    assert ProxClassifier(class_weight={1: 3.0}).partial_fit(zeros, [0] * 20, classes=[0, 1]).coef_.shape == (1, 30)


def test_balanced_classes_count_the_weights_of_samples() -> None:
    X, y = load_iris(return_X_y=True)
    y, weights = (y == 2).astype(int), np.random.RandomState(0).randint(1, 6, 150)
    model = ProxClassifier(strength=0.01, class_weight="balanced")
    weighted = model.fit(X, y, weights).coef_
    repeated = model.fit(X.repeat(weights, axis=0), y.repeat(weights)).coef_
    np.testing.assert_allclose(weighted, repeated, atol=1e-4)


@pytest.mark.parametrize("max_iter", [1, 7, 100])
@pytest.mark.parametrize("hidden", [(), (4,)])
def test_count_is_met_in_as_many_passes_as_there_are(
    diabetes: tuple[Array, Array], hidden: tuple[int, ...], max_iter: int
) -> None:
    X, y = diabetes[0][:10], diabetes[1][:10]
    model = ProxRegressor(keep=2, hidden=hidden, max_iter=max_iter, random_state=0)
    if not hidden and max_iter == 1:
        with pytest.warns(ConvergenceWarning):
            model.fit(X, y)
    else:
        model.fit(X, y)
    assert model.selected_.sum() == 2
    assert model.n_iter_ <= max_iter


def test_counts_along_short_paths_are_met(diabetes: tuple[Array, Array]) -> None:
    X, y = diabetes[0][:10], diabetes[1][:10]
    path = ProxRegressor(hidden=4, max_iter=4, random_state=0).path(X, y, keeps=[8, 4, 2, 1])
    assert path.nonzeros.tolist() == [8, 4, 2, 1]


def test_kept_inputs_that_are_nearly_collinear_are_fitted_exactly() -> None:
    x = np.linspace(10, 12, 200)
    X, y = np.vander(x, 4)[:, :3], np.sin(4 * x)
    exact = LinearRegression().fit(X, y).score(X, y)
    assert ProxRegressor(keep=3).fit(X, y).score(X, y) == pytest.approx(exact, abs=1e-3)


def test_kept_inputs_of_a_classifier_reach_the_loss_of_logistic_regression(cancer: tuple[Array, Array]) -> None:
    X, y = cancer
    model = ProxClassifier(keep=6).fit(X, y)
    kept = X[:, model.selected_]
    other = LogisticRegression(C=1e8, tol=1e-8, max_iter=10_000).fit(kept, y)
    loss = -other.predict_log_proba(kept)[np.arange(len(y)), y].mean()
    assert model.loss_curve_[-1] == pytest.approx(loss, rel=1e-4)


def test_path_warns_once_of_fits_that_did_not_converge(diabetes: tuple[Array, Array]) -> None:
    for folds, count in ((None, 3), (2, 9)):
        with pytest.warns(ConvergenceWarning, match=f"in {count} of the fits of the path") as caught:
            ProxRegressor(max_iter=2).path(*diabetes, strengths=[100.0, 1.0, 0.1, 0.01], cv=folds)
        assert len(caught) == 1


def test_path_of_a_network_goes_from_no_inputs_to_all(diabetes: tuple[Array, Array]) -> None:
    path = ProxRegressor(hidden=8, max_iter=40, random_state=0).path(*diabetes, strengths=6)
    assert path.nonzeros[0] == 0
    assert path.nonzeros[-1] == 10
    assert (np.diff(path.values) < 0).all()
    assert (np.diff(path.nonzeros) >= 0).all()
    assert len(set(path.nonzeros)) > 2


def test_path_of_a_network_starts_without_inputs_where_linear_models_find_nothing() -> None:
    x = np.linspace(-1, 1, 200)[:, None]
    bits = np.random.RandomState(0).randint(0, 2, (200, 2))
    corners = np.tile([[0, 0], [0, 1], [1, 0], [1, 1]], (50, 1))
    for X, y in ((x, x[:, 0] ** 2), (1e6 * x, 1e3 * x[:, 0] ** 2), (corners, corners[:, 0] ^ corners[:, 1])):
        path = ProxRegressor(hidden=8, max_iter=12, random_state=0).path(X, y, strengths=4)
        assert path.nonzeros[0] == 0
        assert path.nonzeros[-1] == X.shape[1]
    path = ProxClassifier(hidden=8, max_iter=12, random_state=0).path(bits, bits[:, 0] ^ bits[:, 1], strengths=4)
    assert path.nonzeros.tolist() == [0, 2, 2, 2]


@pytest.mark.parametrize("hidden", [(), (4,)])
@pytest.mark.parametrize("target", [2.0, 3.3, 1e9 + 0.1])
def test_path_of_constant_targets_has_falling_strengths(hidden: tuple[int, ...], target: float) -> None:
    x = np.linspace(-1, 1, 100)[:, None]
    path = ProxRegressor(hidden=hidden, max_iter=10, random_state=0).path(x, np.full(100, target), strengths=4)
    assert path.strengths is not None
    assert (path.strengths > 0).all()
    assert (np.diff(path.strengths) < 0).all()
    assert path.nonzeros[0] == 0


@pytest.mark.parametrize("target", [3.3, 1e9 + 0.1])
def test_constant_targets_use_no_input(target: float) -> None:
    x = np.linspace(-1, 1, 200)[:, None]
    assert not ProxRegressor().path(x, np.full(200, target), strengths=4).nonzeros.any()


def test_cross_validation_refuses_what_it_cannot_do(diabetes: tuple[Array, Array]) -> None:
    X, y = diabetes
    with pytest.raises(TypeError, match="scoring must be one"):
        ProxRegressor().path(X, y, strengths=[1.0], cv=2, scoring=["r2", "neg_mean_squared_error"])
    with pytest.raises(ValueError, match=r"list\(cv.split\(X, y, groups\)\)"):
        ProxRegressorCV(strengths=[1.0], cv=GroupKFold(3)).fit(X, y)
    folds = list(GroupKFold(3).split(X, y, np.arange(len(y)) % 3))
    assert ProxRegressorCV(strengths=[1.0], cv=folds).fit(X, y).best_ == 1.0


def test_strength_replaces_that_of_a_penalty(diabetes: tuple[Array, Array]) -> None:
    X, y = diabetes
    replaced = ProxRegressor(proxmo.L1(7.0), strength=0.1).fit(X, y)
    np.testing.assert_array_equal(replaced.coef_, ProxRegressor(proxmo.L1(0.1)).fit(X, y).coef_)
