"""scikit-learn's own checks of estimators, and the few that cannot hold."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.base import is_classifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from proxmo.sklearn import ProxClassifier, ProxClassifierCV, ProxRegressor, ProxRegressorCV

STOCHASTIC = "batches are drawn from the samples, so that one sample of weight 2 is not two samples of weight 1"
HALF = "the check asks for an accuracy of 83%; with one of its two inputs a linear model reaches 74% or 78%"
WEIGHTS = ("check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data")


def expected_failures(estimator: Any) -> dict[str, str]:
    """Return the checks that an estimator cannot pass, with the reason for each."""
    options = estimator.get_params()
    found = {}
    if options.get("hidden") or options.get("early_stopping"):
        found |= dict.fromkeys(WEIGHTS, STOCHASTIC)
    if is_classifier(estimator) and (options.get("keep") == 0.5 or options.get("keeps")):
        found["check_classifiers_train"] = HALF
    return found


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [ProxClassifier(), ProxClassifier(keep=0.5), ProxRegressor(), ProxRegressor(keep=0.5)],
    expected_failed_checks=expected_failures,
)
def test_estimators_pass_the_checks_of_sklearn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [
        kind(**options)
        for kind in (ProxClassifier, ProxRegressor)
        for options in (
            {"penalty": "l1"},
            {"keep": 2},
            {"keep": 1.0},
            {"keep": 2, "penalty": "l1"},
            {"hidden": (8,), "max_iter": 20},
            {"hidden": (8,), "keep": 0.5, "max_iter": 20},
            {"early_stopping": True, "max_iter": 30},
            {"early_stopping": True, "keep": 0.5, "max_iter": 30},
        )
    ]
    + [
        kind(**options, cv=2)
        for kind in (ProxClassifierCV, ProxRegressorCV)
        for options in ({"strengths": [0.01, 0.001]}, {"keeps": [0.5, 0.25]})
    ],
    expected_failed_checks=expected_failures,
)
def test_more_estimators_pass_the_checks_of_sklearn(estimator: Any, check: Any) -> None:
    check(estimator)
