"""Estimators that choose the strength, or the share to keep, by cross-validation."""

from __future__ import annotations

from typing import Any

from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, RegressorMixin, clone
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from typing_extensions import Self

from proxmo.sklearn.base import ProxEstimator
from proxmo.sklearn.classifier import ProxClassifier
from proxmo.sklearn.inputs import Array
from proxmo.sklearn.path import RegularizationPath
from proxmo.sklearn.regressor import ProxRegressor

STRENGTHS = 20


def _has(name: str) -> Any:
    """Return a condition for a method that the estimator must have, too."""

    def check(self: ProxEstimatorCV) -> bool:
        getattr(vars(self).get("estimator_") or self._given(), name)
        return True

    return check


class ProxEstimatorCV(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """The base class of `ProxClassifierCV` and `ProxRegressorCV`."""

    kind: type[ProxEstimator]
    estimator_: ProxEstimator
    path_: RegularizationPath

    def __init__(
        self, estimator: Any = None, *, strengths: Any = None, keeps: Any = None, cv: Any = None, scoring: Any = None
    ) -> None:
        self.estimator = estimator
        self.strengths = strengths
        self.keeps = keeps
        self.cv = cv
        self.scoring = scoring

    def _given(self) -> ProxEstimator:
        if self.estimator is not None and not isinstance(self.estimator, self.kind):
            raise TypeError(f"estimator must be a {self.kind.__name__} or None, got {self.estimator!r}")
        return self.estimator or self.kind()

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Score a path by cross-validation, and fit the estimator with the best value on all samples.

        Args:
            X: inputs.
            y: targets.
            sample_weight: how much each sample counts in training.
        """
        given: ProxEstimator = clone(self._given())
        strengths = STRENGTHS if self.strengths is None and self.keeps is None else self.strengths
        self.path_ = given.path(
            X,
            y,
            strengths=strengths,
            keeps=self.keeps,
            sample_weight=sample_weight,
            cv=5 if self.cv is None else self.cv,
            scoring=self.scoring,
        )
        assert self.path_.best is not None
        best = self.path_.values[self.path_.best].item()
        given.set_params(**{"strength": None, "keep": None, self.path_.parameter: best})
        self.estimator_ = given.fit(X, y, sample_weight)
        return self

    @property
    def best_(self) -> float:
        """The strength, or the share to keep, that was chosen."""
        check_is_fitted(self)
        value: float = getattr(self.estimator_, self.path_.parameter)
        return value

    def predict(self, X: Any) -> Array:
        """Predict with the best model."""
        check_is_fitted(self)
        found: Array = self.estimator_.predict(X)
        return found

    def __getattr__(self, name: str) -> Any:
        """Fitted attributes are those of the best model."""
        if name.endswith("_") and not name.startswith("_") and "estimator_" in vars(self):
            return getattr(self.estimator_, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class ProxClassifierCV(ClassifierMixin, ProxEstimatorCV):  # type: ignore[misc]
    """A `ProxClassifier` whose strength, or share to keep, is chosen by cross-validation.

    Models along the path are fitted with warm starts, in each fold and on all samples. Fitted attributes are those of
    the best model, ``estimator_``; ``path_`` is a `RegularizationPath` and ``best_`` the value chosen.

    Args:
        estimator: the estimator, `ProxClassifier()` by default.
        strengths: strengths to try, or how many; 20 by default, from the smallest that leaves no input.
        keeps: shares or counts to keep, in place of ``strengths``.
        cv: the number of folds, 5 by default, or a splitter of scikit-learn.
        scoring: what to score by, as for ``GridSearchCV``; accuracy by default.

    >>> from sklearn.datasets import load_wine
    >>> X, y = load_wine(return_X_y=True)
    >>> model = ProxClassifierCV(keeps=[10, 5, 2]).fit(X, y)
    >>> len(model.path_), bool(model.selected_.sum() == model.best_)
    (3, True)
    """

    kind = ProxClassifier

    @available_if(_has("predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class."""
        check_is_fitted(self)
        found: Array = self.estimator_.predict_proba(X)
        return found

    @available_if(_has("predict_log_proba"))  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of the probability of each class."""
        check_is_fitted(self)
        found: Array = self.estimator_.predict_log_proba(X)
        return found

    def decision_function(self, X: Any) -> Array:
        """Return the outputs of the best model."""
        check_is_fitted(self)
        found: Array = self.estimator_.decision_function(X)
        return found


class ProxRegressorCV(RegressorMixin, ProxEstimatorCV):  # type: ignore[misc]
    """A `ProxRegressor` whose strength, or share to keep, is chosen by cross-validation.

    Models along the path are fitted with warm starts, in each fold and on all samples. Fitted attributes are those of
    the best model, ``estimator_``; ``path_`` is a `RegularizationPath` and ``best_`` the value chosen.

    Args:
        estimator: the estimator, `ProxRegressor()` by default.
        strengths: strengths to try, or how many; 20 by default, from the smallest that leaves no input.
        keeps: shares or counts to keep, in place of ``strengths``.
        cv: the number of folds, 5 by default, or a splitter of scikit-learn.
        scoring: what to score by, as for ``GridSearchCV``; R² by default.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = ProxRegressorCV(keeps=[10, 8, 4, 1]).fit(X, y)
    >>> len(model.path_), bool(model.selected_.sum() == model.best_)
    (4, True)
    """

    kind = ProxRegressor

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
