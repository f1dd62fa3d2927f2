"""scikit-learn's own checks of estimators."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from proxmo.sklearn import ProxClassifier, ProxClassifierCV, ProxRegressor, ProxRegressorCV

STOCHASTIC = "batches are drawn from the samples, so that one sample of weight 2 is not two samples of weight 1"
FOLDS = "a sample of weight 2 is in one fold, two samples may be in two"
WEIGHTS = ("check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data")


def _reasons(estimator: Any) -> dict[str, str]:
    if isinstance(estimator, (ProxClassifierCV, ProxRegressorCV)):
        return dict.fromkeys(WEIGHTS, FOLDS)
    return dict.fromkeys(WEIGHTS, STOCHASTIC) if estimator.hidden else {}


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([ProxClassifier(), ProxRegressor()])
def test_estimators_pass_the_checks_of_sklearn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [
        ProxClassifier(hidden=(8,), max_iter=20),
        ProxRegressor(hidden=(8,), max_iter=20),
        ProxClassifierCV(strengths=[0.01, 0.001], cv=2),
        ProxRegressorCV(strengths=[0.01, 0.001], cv=2),
    ],
    expected_failed_checks=_reasons,
)
def test_slower_estimators_pass_the_checks_of_sklearn(estimator: Any, check: Any) -> None:
    check(estimator)
