"""Inputs, targets, weights and arguments of all kinds: what is taken, and what is refused with which error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes, load_iris, make_regression
from sklearn.feature_selection import SelectFromModel
from sklearn.linear_model import Lasso

import proxmo
from proxmo.sklearn import ProxClassifier, ProxClassifierCV, ProxRegressor, ProxRegressorCV

Array = NDArray[Any]


@pytest.fixture
def iris() -> tuple[Array, Array]:
    X, y = load_iris(return_X_y=True)
    return X, y


@pytest.fixture
def diabetes() -> tuple[Array, Array]:
    X, y = load_diabetes(return_X_y=True)
    return X, y


@pytest.mark.parametrize("form", ["csc", "coo", "lil", "bsr"])
@pytest.mark.parametrize("kind", [sp.csr_matrix, sp.csr_array])
def test_sparse_formats_give_the_same_model(iris: tuple[Array, Array], form: str, kind: Any) -> None:
    X, y = iris
    dense = ProxClassifier(strength=0.1).fit(X, y)
    sparse = ProxClassifier(strength=0.1).fit(kind(X).asformat(form), y)
    np.testing.assert_allclose(sparse.coef_, dense.coef_, atol=1e-4)


def test_repeated_entries_of_sparse_matrices_are_added() -> None:
    repeated = sp.csr_matrix(
        (np.arange(1.0, 9.0), np.array([0, 0, 1, 2, 1, 1, 0, 2]), np.array([0, 2, 4, 6, 8])), shape=(4, 3)
    )
    y = [0, 1, 0, 1]
    models = [ProxClassifier(strength=0.01).fit(X, y) for X in (repeated, repeated.toarray())]
    np.testing.assert_allclose(models[0].coef_, models[1].coef_, atol=1e-6)


def test_column_of_entries_in_two_parts_is_used() -> None:
    rows = np.repeat(np.arange(0, 100, 2), 2)
    X = sp.csr_matrix((np.ones(100), np.zeros(100, dtype=int), np.searchsorted(rows, np.arange(101))), shape=(100, 1))
    y = np.where(np.arange(100) % 2, 0.0, 2.0)
    assert ProxRegressor(strength=1e-6).fit(X, y).score(X, y) > 0.999
    assert X.nnz == 100  # the caller's matrix is left alone


def test_sparse_columns_with_a_large_mean_are_used() -> None:
    X, y = make_regression(200, 10, n_informative=4, noise=1.0, random_state=0)
    model = ProxRegressor(keep=4).fit(sp.csr_matrix(X + 1e8), y)
    assert model.selected_.sum() == 4
    assert model.score(X + 1e8, y) > 0.99


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # of Lasso
def test_columns_of_scales_from_1e_minus_8_to_1e8_reach_the_objective_of_lasso() -> None:
    X, y = make_regression(100, 17, n_informative=8, noise=5.0, random_state=0)
    X = X * 10.0 ** np.random.RandomState(0).permutation(np.linspace(-8, 8, 17))
    model, lasso = ProxRegressor(strength=1e-3).fit(X, y), Lasso(alpha=1e-3, tol=1e-8, max_iter=10_000).fit(X, y)
    ours, theirs = (np.square(y - m.predict(X)).mean() / 2 + 1e-3 * np.abs(m.coef_).sum() for m in (model, lasso))
    assert ours <= (1 + 1e-6) * theirs


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool, np.float16])
def test_other_numbers_become_float64(iris: tuple[Array, Array], dtype: Any) -> None:
    X, y = iris
    model = ProxClassifier(strength=0.01).fit(X.astype(dtype), y)
    assert model.coef_.dtype == np.float64
    np.testing.assert_array_equal(
        model.coef_, ProxClassifier(strength=0.01).fit(X.astype(dtype).astype(float), y).coef_
    )


@pytest.mark.parametrize("hidden", [(), (8,)])
def test_constant_columns_do_not_count_as_kept(hidden: tuple[int, ...]) -> None:
    X, y = make_regression(60, 3, noise=1.0, random_state=0)
    X = np.c_[np.ones((60, 3)), X]
    model = ProxRegressor(keep=3, hidden=hidden, max_iter=20, random_state=0).fit(X, y)
    assert model.selected_.tolist() == [False] * 3 + [True] * 3


def test_one_sample_and_constant_data_give_the_mean() -> None:
    for model in (ProxRegressor(), ProxRegressor(keep=1), ProxRegressor(hidden=4, max_iter=3)):
        assert model.fit([[1.0, 2.0]], [3.0]).predict([[1.0, 2.0]]) == pytest.approx(3.0)
    assert ProxRegressor().fit(np.ones((4, 2)), np.arange(4.0)).intercept_ == pytest.approx(1.5)
    with pytest.raises(ValueError, match="two classes, got one class"):
        ProxClassifier().fit([[1.0], [2.0]], ["a", "a"])


@pytest.mark.parametrize("kind", [np.array, pd.Series, lambda y: pd.Series(y, dtype="category")])
def test_labels_may_be_text(iris: tuple[Array, Array], kind: Any) -> None:
    X, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])
    model = ProxClassifier(keep=2).fit(X, kind(names[y]))
    assert model.classes_.tolist() == names.tolist()
    assert (model.predict(X) == names[y]).mean() > 0.9


def test_frames_keep_names_and_selection_returns_them(diabetes: tuple[Array, Array]) -> None:
    X, y = pd.DataFrame(diabetes[0], columns=list("abcdefghij")), diabetes[1]
    for model in (ProxRegressor(keep=6), ProxRegressor(keep=6, hidden=4, max_iter=5, random_state=0)):
        selection = SelectFromModel(model, importance_getter="selected_").fit(X, y)
        assert len(selection.get_feature_names_out()) == 6
    cross_validated = ProxRegressorCV(keeps=[3]).fit(X, y)
    assert cross_validated.feature_names_in_.tolist() == list(X.columns)
    with pytest.raises(ValueError, match="feature names"):
        cross_validated.predict(X.rename(columns={"a": "z"}))


def test_class_weights_are_factors_on_samples(iris: tuple[Array, Array]) -> None:
    X, y = iris[0][:70], iris[1][:70]
    balanced = ProxClassifier(strength=0.01, class_weight="balanced").fit(X, y)
    given = ProxClassifier(strength=0.01, class_weight={0: 0.7, 1: 1.75}).fit(X, y)
    np.testing.assert_allclose(balanced.coef_, given.coef_, atol=1e-6)
    for factor in (-1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="class_weight must be finite and not negative"):
            ProxClassifier(class_weight={0: factor}).fit(X, y)
    with pytest.raises(ValueError, match="positive sum"):
        ProxClassifier(class_weight={0: 0.0, 1: 0.0}).fit(X, y)


def test_samples_without_weight_do_not_count(diabetes: tuple[Array, Array]) -> None:
    X, y = diabetes
    weighted = ProxRegressor(strength=0.1).fit(X, y, sample_weight=np.arange(len(y)) % 2)
    np.testing.assert_allclose(weighted.coef_, ProxRegressor(strength=0.1).fit(X[1::2], y[1::2]).coef_, atol=1e-3)
    with pytest.raises(ValueError, match=r"held back|trained on"):
        ProxRegressor(early_stopping=True, random_state=0).fit(X, y, sample_weight=np.arange(len(y)) == 0)


@pytest.mark.parametrize(
    ("make", "y", "message"),
    [
        (ProxRegressor, "text", "could not convert string to float"),
        (ProxClassifier, "numbers", "Unknown label type"),
        (ProxClassifier, "two columns", "should be a 1d array"),
        (ProxRegressor, "missing", "NaN"),
    ],
)
def test_bad_targets_get_the_errors_of_sklearn(diabetes: tuple[Array, Array], make: Any, y: str, message: str) -> None:
    X, numbers = diabetes
    targets = {
        "text": np.where(numbers > 100, "high", "low"),
        "numbers": numbers + 0.5,
        "two columns": np.c_[numbers > 100, numbers > 200],
        "missing": np.where(numbers > 300, np.nan, numbers),
    }
    with pytest.raises(ValueError, match=message):
        make().fit(X, targets[y])


def test_early_stopping_holds_back_a_sample_of_each_class(iris: tuple[Array, Array]) -> None:
    X, y = iris[0][::10], iris[1][::10]
    model = ProxClassifier(early_stopping=True, validation_fraction=0.01, max_iter=20, random_state=0).fit(X, y)
    assert model.predict_proba(X).shape == (15, 3)
    with pytest.raises(ValueError, match=r"holds back 2 of the samples .* n_samples=2"):
        ProxClassifier(early_stopping=True).fit(X[:2], [0, 1])
    with pytest.raises(ValueError, match="only 1 member"):
        ProxClassifier(early_stopping=True).fit(X, [*y[:-1], 7])


def test_stream_is_for_strengths_without_early_stopping() -> None:
    for options in ({"keep": 3}, {"early_stopping": True}):
        for kind in (ProxClassifier, ProxRegressor):
            assert not hasattr(kind(**options), "partial_fit")
    assert hasattr(ProxRegressor(), "partial_fit")


@pytest.mark.parametrize("penalty", ["inputs", proxmo.Nuclear(1e-3)])
@pytest.mark.parametrize("hidden", [(), (8,)])
def test_stream_learns_from_features_that_appear_later(penalty: Any, hidden: tuple[int, ...]) -> None:
    X = np.random.RandomState(0).randn(3000, 4)
    y = (X[:, 0] + X[:, 3] > 0).astype(int)
    X[:500, 3] = 0
    model = ProxClassifier(penalty, hidden=hidden, random_state=0)
    for k in range(0, 3000, 100):
        model.partial_fit(X[k : k + 100], y[k : k + 100], classes=[0, 1])
    assert model.selected_[3]
    assert model.score(X[500:], y[500:]) > 0.95


def test_stream_of_constant_parts_is_learned() -> None:
    codes = np.repeat(np.arange(6), 100)
    X, y = np.eye(6)[codes], np.array([0, 1, 1, 0, 1, 0])[codes]
    model = ProxClassifier(random_state=0)
    for _ in range(5):
        for k in range(0, 600, 100):
            model.partial_fit(X[k : k + 100], y[k : k + 100], classes=[0, 1])
    assert model.score(X, y) == 1


def test_late_column_of_a_stream_leaves_the_model_as_it_is() -> None:
    """A column that is constant in a part after `fit` and then varies again keeps its coefficient."""
    random = np.random.RandomState(0)
    X = random.randn(600, 2) * [1.0, 100.0]
    y = (X[:, 0] + X[:, 1] / 100 > 0).astype(int)
    model = ProxClassifier(strength=1e-3).fit(X, y)
    constant = np.column_stack([X[:64, 0], np.zeros(64)])
    model.partial_fit(constant, y[:64])
    before = model.coef_[0, 1]
    model.partial_fit(X[:16], y[:16])
    assert model.coef_[0, 1] == pytest.approx(before, rel=0.5)
    assert model.score(X, y) > 0.9


def test_column_of_a_stream_that_hardly_varies_is_left_out() -> None:
    random = np.random.RandomState(0)
    model, w = ProxRegressor(strength=0.0), np.array([1.0, 1.0])
    for deviation in (0.0, 1e-6, *[1.0] * 20):
        X = random.randn(100, 2) * [1.0, deviation]
        model.partial_fit(X, X @ w)
    assert model.score(X, X @ w) > 0.9


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keeps": []}, ValueError, "keeps must have at least one value"),
        ({"keeps": [None]}, TypeError, "keeps must be a share"),
        ({"keeps": [1, 0.5]}, ValueError, "all shares .* or all counts"),
        ({"keeps": [5]}, ValueError, r"at most the number of inputs \(n_features=4\), got 5"),
        ({"strengths": []}, ValueError, "strengths must have at least one value"),
        ({"strengths": [-1.0]}, ValueError, "strengths must be a finite number >= 0, got -1.0"),
        ({"strengths": "x"}, TypeError, "strengths must be a finite number"),
    ],
)
def test_bad_paths_are_refused(
    iris: tuple[Array, Array], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ProxClassifier().path(*iris, **options)
    with pytest.raises(error, match=message):
        ProxClassifierCV(**options).fit(*iris)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"penalty": "l7"}, ValueError, "penalty"),
        ({"penalty": 3}, TypeError, "penalty"),
        ({"keep": 0.5, "strength": 1.0}, ValueError, "exclude"),
        ({"keep": 0.0}, ValueError, "keep"),
        ({"keep": True}, TypeError, "keep must be a share"),
        ({"keep": 99}, ValueError, r"keep must be at most the number of inputs \(n_features=4\), got 99"),
        ({"keep": 99, "penalty": "l1"}, ValueError, r"number of weights, 12 \(n_features=4\), got 99"),
        ({"keep": 0.5, "penalty": None}, ValueError, "with keep"),
        ({"strength": -1.0}, ValueError, "strength"),
        ({"strength": 1.0, "penalty": proxmo.NonNegative()}, ValueError, "strength"),
        ({"hidden": (0,)}, ValueError, "hidden"),
        ({"hidden": None}, TypeError, "hidden must be the size of a layer or a sequence"),
        ({"loss": "zero_one"}, ValueError, "loss"),
        ({"loss": ["log_loss"]}, ValueError, "loss"),
        ({"max_iter": 0}, ValueError, "max_iter"),
        ({"early_stopping": "yes"}, TypeError, "early_stopping"),
        ({"validation_fraction": 1.0}, ValueError, "validation_fraction must be a share in"),
        ({"tol": -1.0}, ValueError, "tol"),
        ({"class_weight": "bogus"}, ValueError, "class_weight"),
    ],
)
def test_bad_arguments_are_named(
    iris: tuple[Array, Array], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ProxClassifier(**options).fit(*iris)


def test_sizes_of_layers_may_be_a_number_or_a_sequence(diabetes: tuple[Array, Array]) -> None:
    for hidden in (4, np.int64(4), (4,), [4]):
        model = ProxRegressor(hidden=hidden, max_iter=1, random_state=0).fit(*diabetes)
        assert [weight.shape for weight in model.coefs_] == [(4, 10), (1, 4)]


def test_whole_share_keeps_all_inputs(diabetes: tuple[Array, Array]) -> None:
    assert ProxRegressor(keep=1.0).fit(*diabetes).selected_.all()
    assert ProxRegressor(keep=np.int64(10)).fit(*diabetes).selected_.all()
