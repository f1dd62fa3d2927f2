"""Sparse regression."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from typing_extensions import Self

from proxmo.sklearn.base import ProxEstimator
from proxmo.sklearn.inputs import Array
from proxmo.sklearn.losses import REGRESSION, find_loss
from proxmo.sklearn.problem import Task


class ProxRegressor(RegressorMixin, ProxEstimator):  # type: ignore[misc]
    r"""Regressor.
    """

    def __init__(
        self,
        penalty: Any = "inputs",
        *,
        strength: Any = None,
        keep: Any = None,
        hidden: Any = (),
        loss: Any = "squared_error",
        fit_intercept: Any = True,
        max_iter: Any = None,
        tol: Any = 1e-6,
        batch_size: Any = None,
        early_stopping: Any = False,
        validation_fraction: Any = 0.1,
        n_iter_no_change: Any = 10,
        random_state: Any = None,
        verbose: Any = 0,
    ) -> None:
        self.penalty = penalty
        self.strength = strength
        self.keep = keep
        self.hidden = hidden
        self.loss = loss
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state
        self.verbose = verbose

    def _validate(self, X: Any, y: Any, sample_weight: Any, reset: bool = True) -> tuple[Any, Array, Array]:
        X, y = self._validate_inputs(X, y, multi_output=True, y_numeric=True, reset=reset)
        self._flat = y.ndim == 1
        return X, y.reshape(len(y), -1), self._weights(sample_weight, X)

    def _task(self, y: Array, weights: Array, dtype: Any) -> Task:
        shares = weights / weights.sum()
        center = shares @ y if self.fit_intercept else np.zeros(y.shape[1])
        spread = np.sqrt(shares @ np.square(y - center))
        spread = np.where(spread > 0, spread, 1.0)
        targets, center, spread = (torch.from_numpy(np.array(a, dtype)) for a in (y, center, spread))
        return Task(targets, center, spread, find_loss(self.loss, REGRESSION))

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from a part of a stream, in one pass over it.

        Args:
            X: inputs.
            y: targets.
            sample_weight: how much each sample counts.
        """
        self._check_arguments()
        self._learn(*self._validate(X, y, sample_weight, reset=not hasattr(self, "coefs_")))
        return self

    @property
    def coef_(self) -> Array:
        """Coefficients of a linear model, of shape (features,), or (targets, features) if y had two axes."""
        weight = self._linear_layer()[0]
        return weight[0] if self._flat else weight

    @property
    def intercept_(self) -> Any:
        """The intercept of a linear model, a number, or one per target if y had two axes."""
        bias = self._linear_layer()[1]
        return bias[0] if self._flat else bias

    def predict(self, X: Any) -> Array:
        """Return the predicted targets."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self._flat else outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
