"""scikit-learn's ℓ1-penalised logistic regression, with the arguments that the installed version takes."""

from __future__ import annotations

from typing import Any

from sklearn.linear_model import LogisticRegression
from sklearn.utils.fixes import parse_version

import sklearn


def l1_logistic_regression(strength: float, samples: int, **options: Any) -> LogisticRegression:
    """Return the estimator that minimises the mean loss over the samples plus strength·‖w‖₁."""
    by_ratio = parse_version(sklearn.__version__) >= parse_version("1.8")
    l1: dict[str, Any] = {"l1_ratio": 1.0} if by_ratio else {"penalty": "l1"}
    return LogisticRegression(C=1 / (strength * samples), **l1, **options)
